"""A config -> everything a run needs, with every `auto` decided; nothing is written yet.

The order is that of patience: what can be told without loading a model is told first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from featx.config import Config, layer_requests
from featx.data import open_source, with_boxes
from featx.decode import PILLOW, ImagePolicy, heif_version, jpeg_decoder
from featx.errors import ConfigError, StoreMismatchError
from featx.machine import num_cpus
from featx.models import build_backbone, resolve_library
from featx.object_path import place_of
from featx.options import GRADIENTS, ReduceConfig
from featx.store import codecs
from featx.store.joining import growth_refused, refuse_difference
from featx.store.layout import PART_BYTES, Grid
from featx.store.listing import in_stored_order, listing_identity, marks_digest, read_listing
from featx.store.manifest import Manifest, Run, load_manifest
from featx.store.session import missing_parts
from featx.suspects import Suspects
from featx.types import Begun, LayerSpec, Listing, Source, StoreHeader

if TYPE_CHECKING:
    from featx.loader import Loader

PART_SECONDS = 60.0
"""At most about this much work a part, within PART_BYTES: what a kill can cost."""

SHORT_PART_SECONDS, SHORT_PARTS = 4.0, 256
"""A run that is done in so many shorter parts has its first rows, and loses least, with those."""

_VERSIONED = ("torch", "torchvision", "timm", "pillow")


@dataclass
class Prepared:
    """What a run is made of.

    Attributes:
        choices: one line for each `auto` that was decided, with the reason.
        left_out: what a preset could not store, with the reason.
        suspects: images that are decoded with care.
        seconds_per_image: of the backbone alone, measured on the probe.
        threads: of the CPU that computes, in each process; None where another device does.
        devices: of the processes that compute, torch.device.
    """

    config: Config
    source: Source
    listing: Listing
    policy: ImagePolicy
    engine: Any
    specs: list[LayerSpec]
    header: StoreHeader
    part_rows: int
    seconds_per_image: float
    threads: int | None
    devices: list[Any]
    choices: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    suspects: Suspects = field(default_factory=lambda: Suspects(None))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all layers."""
        return sum(spec.row_bytes for spec in self.specs)

    def as_run(self) -> Run:
        """All rows and the layers that are asked for, as a run of a store."""
        return Run(
            header=self.header,
            layers=tuple(self.specs),
            grid=Grid(len(self.listing), self.part_rows),
            codec=self.config.codec,
            resolved={
                **self.engine.compute.as_dict(),
                "jpeg": self.policy.jpeg,
                **({} if self.policy.heif is None else {"heif": self.policy.heif}),
                **({} if self.threads is None else {"threads": self.threads}),
            },
        )

    def loader(self, batch_size: int) -> Loader:
        """A Loader of the run's images; a context manager."""
        from featx.loader import Loader  # which imports torch

        backbone = self.engine.backbone
        reference = uses_reference(self.config, backbone)
        return Loader(
            self.source,
            self.listing,
            backbone.preprocess,
            self.policy,
            reference,
            batch_size,
            pinned=self.engine.device.type == "cuda",
            timeout_s=self.config.data.timeout_s,
            suspects=self.suspects,
        )


class Purpose(Protocol):
    """What a run is for, as far as `prepare` has to know: a store, or statistics.

    Attributes:
        dtype: in which the engine gives its values.
        settings: of the fingerprint, beside those of every run.
        folder: that the run writes to, None where it writes to none.
    """

    dtype: str
    folder: Path | None
    settings: dict[str, Any]

    def list_images(self) -> tuple[Source, Listing]:
        """The data set and its rows, in the order of what was begun."""

    def unfinished(self, listing: Listing, chosen: list[Any]) -> list[Any]:
        """Of the layers asked for, those that are still to be done."""

    def begun(self, names: set[str]) -> Begun | None:
        """What was decided for these layers, None where nothing was begun."""

    def part_limits(
        self, engine: Any, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """Rows of a part at the most, and the seconds of work that it should take.

        Args:
            engine: bound.
            specs: what a row holds.
            work_s: seconds that the model takes for all rows.

        Raises:
            FeatxError: what is asked cannot be done with these layers.
        """


class StorePurpose:
    """Features in the store that `out` names.

    Args:
        config: checked.
        known_rows_only: leave images alone that the store does not know.
        source: the data set, where it is an object from Python; None opens the config's.
    """

    def __init__(
        self, config: Config, known_rows_only: bool = False, source: Source | None = None
    ) -> None:
        self.folder: Path | None = place_of(config.out)
        check_out(self.folder)
        self.dtype = config.dtype
        self.settings = {"dtype": config.dtype, "codec": config.codec}
        self._config = config
        self._known_rows_only = known_rows_only
        self._source = source
        self._stored = None if config.overwrite else load_manifest(self.folder)[0]

    def list_images(self) -> tuple[Source, Listing]:
        """The rows of the store first, and then what is new."""
        return list_images(self._config, self._stored, self._known_rows_only, self._source)

    def unfinished(self, listing: Listing, chosen: list[Any]) -> list[Any]:
        """The layers that the store lacks or has not finished; all, where it has them all."""
        return _unfinished(self._config, self._stored, listing, chosen)

    def begun(self, names: set[str]) -> Begun | None:
        """What the first run of the store decided, and the one that makes these layers."""
        return _begun(self._stored, names)

    def part_limits(
        self, engine: Any, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """A part is built in memory; a folder of very many parts is slow to resume."""
        row_bytes = sum(spec.row_bytes for spec in specs)
        return PART_BYTES / max(1, row_bytes), seconds_of_part(work_s)


def seconds_of_part(work_s: float) -> float:
    """Seconds of work that a part should take, of a run that takes `work_s`."""
    return min(PART_SECONDS, max(SHORT_PART_SECONDS, work_s / SHORT_PARTS))


def uses_reference(config: Config, backbone: Any) -> bool:
    """decode=reference, or a transform that the fast path cannot follow."""
    return config.decode == "reference" or not backbone.preprocess.has_fast_path


def list_images(
    config: Config,
    stored: Manifest | None = None,
    known_rows_only: bool = False,
    source: Source | None = None,
) -> tuple[Source, Listing]:
    """The data set of a config and its rows, `data.limit` applied, in the store's order.

    Args:
        config: checked.
        stored: the store that is gone on with.
        known_rows_only: leave images alone that the store does not know.
        source: the data set, where it is an object from Python; None opens the config's.

    Raises:
        DataError: it is not there, or empty.
        StoreMismatchError: rows of the store are not in it any more, their images were changed,
            or new ones are there unasked for.
    """
    source = open_source(config.data) if source is None else with_boxes(source, config.data)
    listing = source.listing()
    listing = listing if config.data.limit is None else listing.head(config.data.limit)
    if stored is not None:
        root = place_of(config.out)
        before = read_listing(root, stored.num_rows, stored.listing_identity)
        if before is not None:
            listing = in_stored_order(root, before, listing)
            _refuse_changed_images(root, stored, listing)
            if known_rows_only:
                return source, replace(before, marks=listing.head(len(before)).marks)
        new_rows = len(listing) - stored.num_rows
        if new_rows > 0 and not config.grow:
            raise StoreMismatchError(growth_refused(root, new_rows))
    return source, listing


def _refuse_changed_images(root: Path, stored: Manifest, listing: Listing) -> None:
    """Raise StoreMismatchError where the images of the store's rows are known to be others."""
    before = stored.runs[-1].header.fingerprint.get("data.marks")
    now = marks_digest(listing, stored.num_rows)
    if before is not None and now is not None and before != now:
        raise StoreMismatchError(
            f"{root} was begun with other images: the data set has the same keys, but what it says "
            "of the images (their sizes, samples of their bytes) has changed. Put the data set "
            "back, choose out=DIR for a new store, or overwrite=true to delete this one."
        )


@contextlib.contextmanager
def prepare(config: Config, config_yaml: str, purpose: Purpose | None = None) -> Iterator[Prepared]:
    """List the images, build the backbone, find the layers, and decide every `auto`.

    Args:
        config: checked.
        config_yaml: as the user gave it, for the store.
        purpose: what the run is for; None for the store in `out`, where nothing is written.

    Raises:
        FeatxError: whatever is wrong with the config, before anything is written.
    """
    suspects = Suspects(None if purpose is None else purpose.folder)
    purpose = StorePurpose(config) if purpose is None else purpose
    source, listing = purpose.list_images()
    policy = ImagePolicy.from_config(config.data)
    resolve_library(config.model)
    codecs.filters(config.codec)

    # From here on torch is needed, which takes seconds to import.
    from featx.devices import choose_devices, cpu_threads
    from featx.loader import Loader
    from featx.preprocess import check_reference
    from featx.projected import with_statistics
    from featx.resolve import PROBE_IMAGES, Resolver

    devices = choose_devices(config.device, config.devices)
    device = devices[0]
    backbone = build_backbone(config.model, config.seed)
    check_reference(backbone.preprocess)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(_engine(config, backbone, device, purpose.dtype))
        selection = _selection(config, engine)
        chosen = with_statistics(selection.chosen, config, backbone)
        chosen = purpose.unfinished(listing, chosen)
        engine.bind(chosen)
        reference = uses_reference(config, backbone)
        begun = purpose.begun({tap.name for tap, _ in chosen})
        threads, why_threads = _threads(config, device, begun)
        stack.enter_context(cpu_threads(threads))
        before = begun.resolved if begun else {"jpeg": None}
        jpeg = PILLOW if reference else jpeg_decoder(before.get("jpeg", PILLOW))
        heif = heif_version(listing.keys, before.get("heif"), new=begun is None)
        policy = replace(policy, jpeg=jpeg, heif=heif)
        with Loader(
            source,
            listing,
            backbone.preprocess,
            policy,
            reference,
            1,
            timeout_s=config.data.timeout_s,
            suspects=suspects,
        ) as loader:
            loader.settle_suspects()
            rows = np.unique(np.linspace(0, len(listing) - 1, PROBE_IMAGES).astype(int))
            images = loader.load(rows.tolist())
        resolver = Resolver(config, engine, images, len(listing), begun)
        resolver.resolve()
        specs = engine.specs(chosen)
        work_s = resolver.seconds_per_image * len(listing)
        part_rows = resolver.part_rows(*purpose.part_limits(engine, specs, work_s))
        settings = _fingerprint(config, engine, specs, policy, listing, part_rows, reference)
        header = StoreHeader(
            fingerprint={**settings, **purpose.settings},
            config=config_yaml,
            model=backbone.name,
            weights=backbone.weights,
            weights_sha256=backbone.weights_sha256,
            transform=backbone.preprocess.describe(),
            versions={**_versions(), "featx": _own_version()},
        )
        yield Prepared(
            config=config,
            source=source,
            listing=listing,
            policy=policy,
            engine=engine,
            specs=specs,
            header=header,
            part_rows=part_rows,
            seconds_per_image=resolver.seconds_per_image,
            threads=threads,
            devices=devices,
            choices={**resolver.choices, **why_threads},
            left_out=selection.left_out,
            suspects=suspects,
        )


def _threads(config: Config, device: Any, begun: Begun | None) -> tuple[int | None, dict[str, str]]:
    """Threads that compute on a CPU, and a line on the choice.

    The last bits of a row depend on them, so a store that is gone on with keeps its number.

    Returns:
        None where another device computes.
    """
    import torch

    if device.type != "cpu":
        return None, {}
    cpus = config.cpus_of_worker(num_cpus())
    here = cpus if config.executor.name != "local" else min(torch.get_num_threads(), cpus)
    before = begun.resolved.get("threads", here) if begun else here
    if before == here:
        return here, {}
    assert begun is not None
    text = f"{before} (as {begun.what} begun; here it would be {here}, and other last bits)"
    return int(before), {"threads": text}


def _engine(config: Config, backbone: Any, device: Any, dtype: str) -> Any:
    """What computes the rows that a job asks for."""
    if config.job.name == "attribute":
        from featx.attribution import Attributor

        return Attributor(backbone, device, dtype, config.target, config.attribute)
    from featx.engine import Engine

    return Engine(backbone, device, dtype, config.target)


def _selection(config: Config, engine: Any) -> Any:
    """The datasets that a job asks for, found on one pass of the model."""
    if config.job.name == "attribute":
        return engine.select(engine.trace())
    from featx.select import select

    backbone = engine.backbone
    requests = layer_requests(config)
    traced = engine.trace([name for name, _ in requests])
    return select(requests, traced, backbone.classifier, backbone.stages)


def _unfinished(
    config: Config, stored: Manifest | None, listing: Listing, chosen: list[Any]
) -> list[Any]:
    """Of the layers asked for, those that the store lacks or has not finished; else all.

    A store of [layer4] that is asked for [layer3,layer4] gets layer3; the model runs no deeper
    than it must.
    """
    out = place_of(config.out)
    if stored is None or len(listing) > stored.num_rows:
        return chosen
    unfinished = {name for run, _ in missing_parts(out, stored) for name in run.names}
    finished = set(stored.layers) - unfinished
    fresh = [pair for pair in chosen if pair[0].name not in finished]
    if not fresh:
        return chosen
    for tap, reduce in chosen:
        if tap.name in finished:
            _refuse_another_layer(out, stored, tap, reduce, config)
    return fresh


def _refuse_another_layer(
    out: Path, stored: Manifest, tap: Any, reduce: ReduceConfig, config: Config
) -> None:
    """A finished layer that is not computed again must be what is asked for, all the same."""
    before = stored.layers[tap.name]
    now = replace(
        before,
        layer=tap.layer,
        capture=tap.capture,
        reduce=reduce.name,
        reduce_args=reduce.args,
        dtype=tap.dtype or config.dtype,
    )
    line = stored.holder(tap.name).header.fingerprint.get(f"layer.{tap.name}")
    refuse_difference(
        out,
        {f"layer {tap.name}": {**asdict(before), "as": line}},
        {f"layer {tap.name}": {**asdict(now), "as": _layer_line(now, config)}},
    )


def _begun(stored: Manifest | None, names: set[str]) -> Begun | None:
    """What a store decided for these layers when it was begun."""
    if stored is None:
        return None
    holders = [run for run in stored.runs if run.names & names]
    return Begun(stored.runs[0].resolved, holders[0].grid.part_rows if holders else None)


def _fingerprint(
    config: Config,
    engine: Any,
    specs: list[LayerSpec],
    policy: ImagePolicy,
    listing: Listing,
    part_rows: int,
    reference: bool,
) -> dict[str, Any]:
    """Everything that changes values, in JSON types; a resume with another one is refused."""
    backbone, jpeg = engine.backbone, policy.jpeg
    return {
        "model": backbone.name,
        "weights": backbone.weights,
        "weights_sha256": backbone.weights_sha256,
        # Where it is not there nothing is said, for stores of before it was a key.
        **({"model.init": config.model.init} if config.model.init != "loaded" else {}),
        **{f"layer.{spec.name}": _layer_line(spec, config) for spec in specs},
        "layers": [spec.name for spec in specs],
        "transform": backbone.preprocess.describe(),
        "decode": "reference" if reference else "fast",
        # Stores of early runs knew Pillow only, whose version stands below.
        **({} if jpeg == PILLOW else {"jpeg": jpeg, f"version.{jpeg}": version_of(jpeg)}),
        **({} if policy.heif is None else {"version.pillow_heif": policy.heif}),
        "data.exif": policy.exif,
        "data.background": list(policy.background),
        "data.max_pixels": policy.max_pixels,
        "listing": listing_identity(listing),
        # Sources that know nothing of their images beside the keys have no such line.
        **({} if listing.marks is None else {"data.marks": marks_digest(listing)}),
        "device": engine.device.type,
        **engine.compute.as_dict(),
        "part_rows": part_rows,
        "nonfinite": config.nonfinite,
        **{f"version.{name}": version for name, version in _versions().items()},
    }


def _layer_line(spec: LayerSpec, config: Config) -> str:
    """What a layer's values are, in words; for gradients also of what."""
    target = f", target {config.target}" if spec.capture in GRADIENTS else ""
    of_layer = f" of {spec.layer}" if spec.layer else ""
    return (
        f"{spec.capture}{of_layer}, reduce {spec.reduce} {dict(spec.reduce_args)}, "
        f"shape {list(spec.shape)}{target}"
    )


def _versions() -> dict[str, str]:
    return {name: version_of(name) for name in _VERSIONED}


def _own_version() -> str:
    from featx import __version__

    return __version__


def check_out(out: Path) -> None:
    """Raise ConfigError where no folder can be made."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file; expected a folder for the store.")
