"""A config -> everything a run needs, with every `auto` decided; nothing is written yet.

The order is that of patience: what can be told without loading a model is told first.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from featx.config import GRADIENTS, Config, ReduceConfig, layer_requests
from featx.data import open_source
from featx.decode import PILLOW, ImagePolicy, jpeg_decoder
from featx.errors import ConfigError, StoreMismatchError
from featx.models import build_backbone, resolve_library
from featx.store import codecs
from featx.store.joining import growth_refused, refuse_difference
from featx.store.layout import Grid
from featx.store.listing import in_stored_order, listing_identity, read_listing
from featx.store.manifest import Manifest, Run, load_manifest
from featx.store.session import missing_parts
from featx.types import Begun, LayerSpec, Listing, Source, StoreHeader

if TYPE_CHECKING:
    from featx.loader import Loader

_VERSIONED = ("torch", "torchvision", "timm", "pillow")


@dataclass
class Prepared:
    """What a run is made of.

    Attributes:
        choices: one line for each `auto` that was decided, with the reason.
        left_out: what a preset could not store, with the reason.
        seconds_per_image: of the backbone alone, measured on the probe.
        jpeg: who decodes JPEGs.
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
    jpeg: str
    choices: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

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
            resolved={**self.engine.compute.as_dict(), "jpeg": self.jpeg},
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
            self.jpeg,
        )


def uses_reference(config: Config, backbone: Any) -> bool:
    """decode=reference, or a transform that the fast path cannot follow."""
    return config.decode == "reference" or not backbone.preprocess.has_fast_path


def list_images(
    config: Config, stored: Manifest | None = None, known_rows_only: bool = False
) -> tuple[Source, Listing]:
    """The data set of a config and its rows, `data.limit` applied, in the store's order.

    Args:
        config: checked.
        stored: the store that is gone on with.
        known_rows_only: leave images alone that the store does not know.

    Raises:
        DataError: it is not there, or empty.
        StoreMismatchError: rows of the store are not in it any more, or new ones unasked for.
    """
    source = open_source(config.data)
    listing = source.listing()
    listing = listing if config.data.limit is None else listing.head(config.data.limit)
    if stored is not None:
        root = Path(config.out).expanduser()
        before = read_listing(root, stored.num_rows, stored.listing_identity)
        if before is not None:
            listing = in_stored_order(root, before, listing)
            if known_rows_only:
                return source, before
        new_rows = len(listing) - stored.num_rows
        if new_rows > 0 and not config.grow:
            raise StoreMismatchError(growth_refused(root, new_rows))
    return source, listing


@contextlib.contextmanager
def prepare(config: Config, config_yaml: str, known_rows_only: bool = False) -> Iterator[Prepared]:
    """List the images, build the backbone, find the layers, and decide every `auto`.

    Args:
        config: checked.
        config_yaml: as the user gave it, for the store.
        known_rows_only: leave images alone that the store in `out` does not know.

    Raises:
        FeatxError: whatever is wrong with the config, before anything is written.
    """
    out = Path(config.out).expanduser()
    _check_out(out)
    stored = None if config.overwrite else load_manifest(out)[0]
    source, listing = list_images(config, stored, known_rows_only)
    policy = ImagePolicy.from_config(config.data)
    resolve_library(config.model)
    codecs.filters(config.codec)

    # From here on torch is needed, which takes seconds to import.
    from featx.devices import choose_device
    from featx.engine import Engine
    from featx.loader import Loader
    from featx.preprocess import check_reference
    from featx.resolve import PROBE_IMAGES, Resolver
    from featx.select import select

    device = choose_device(config.device)
    backbone = build_backbone(config.model, config.seed)
    check_reference(backbone.preprocess)
    with Engine(backbone, device, config.dtype, config.target) as engine:
        traced = engine.trace()
        selection = select(layer_requests(config), traced, backbone.classifier, backbone.stages)
        chosen = _unfinished(config, stored, listing, selection.chosen)
        engine.bind(chosen)
        reference = uses_reference(config, backbone)
        begun = _begun(stored, {tap.name for tap, _ in chosen})
        before = begun.resolved.get("jpeg", PILLOW) if begun else None
        jpeg = PILLOW if reference else jpeg_decoder(before)
        with Loader(source, listing, backbone.preprocess, policy, reference, 1, jpeg) as loader:
            rows = np.unique(np.linspace(0, len(listing) - 1, PROBE_IMAGES).astype(int))
            images = loader.load(rows.tolist())
        resolver = Resolver(config, engine, images, len(listing), begun)
        resolver.resolve()
        specs = engine.specs(chosen)
        part_rows = resolver.part_rows(sum(spec.row_bytes for spec in specs))
        header = StoreHeader(
            fingerprint=_fingerprint(
                config, engine, specs, policy, listing, part_rows, reference, jpeg
            ),
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
            jpeg=jpeg,
            choices=resolver.choices,
            left_out=selection.left_out,
        )


def _unfinished(
    config: Config, stored: Manifest | None, listing: Listing, chosen: list[Any]
) -> list[Any]:
    """Of the layers asked for, those that the store lacks or has not finished; else all.

    A store of [layer4] that is asked for [layer3,layer4] gets layer3; the model runs no deeper
    than it must.
    """
    out = Path(config.out).expanduser()
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
        layer=tap.module,
        capture=tap.capture,
        reduce=reduce.name,
        reduce_args=reduce.args,
        dtype=config.dtype,
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
    jpeg: str,
) -> dict[str, Any]:
    """Everything that changes values, in JSON types; a resume with another one is refused."""
    backbone = engine.backbone
    return {
        "model": backbone.name,
        "weights": backbone.weights,
        "weights_sha256": backbone.weights_sha256,
        **{f"layer.{spec.name}": _layer_line(spec, config) for spec in specs},
        "layers": [spec.name for spec in specs],
        "dtype": config.dtype,
        "transform": backbone.preprocess.describe(),
        "decode": "reference" if reference else "fast",
        # Stores of early runs knew Pillow only, whose version stands below.
        **({} if jpeg == PILLOW else {"jpeg": f"{jpeg} {importlib.metadata.version(jpeg)}"}),
        "data.exif": policy.exif,
        "data.background": list(policy.background),
        "data.max_pixels": policy.max_pixels,
        "listing": listing_identity(listing),
        "device": engine.device.type,
        **engine.compute.as_dict(),
        "part_rows": part_rows,
        "codec": config.codec,
        "nonfinite": config.nonfinite,
        **{f"version.{name}": version for name, version in _versions().items()},
    }


def _layer_line(spec: LayerSpec, config: Config) -> str:
    """What a layer's values are, in words; for gradients also of what."""
    target = f", target {config.target}" if spec.capture in GRADIENTS else ""
    return (
        f"{spec.capture} of {spec.layer}, reduce {spec.reduce} {dict(spec.reduce_args)}, "
        f"shape {list(spec.shape)}{target}"
    )


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _VERSIONED}


def _own_version() -> str:
    from featx import __version__

    return __version__


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file; expected a folder for the store.")
