"""A config -> everything a run needs, with every `auto` decided; nothing is written yet.

The order is that of patience: what can be told without loading a model is told first.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from featx.config import Config, layer_requests
from featx.data import open_source
from featx.decode import ImagePolicy
from featx.errors import ConfigError, RunError
from featx.models import build_backbone, resolve_library
from featx.store import codecs, layout
from featx.store.session import listing_digest, read_descriptor
from featx.types import LayerSpec, Listing, Source, StoreHeader

logger = logging.getLogger(__name__)

PROBE_IMAGES = 16
"""Real images on which precision=auto and compile=auto are measured."""

_GLANCE_IMAGES = 2

CPU_BATCH = 16
CUDA_BATCH = 256

PART_SECONDS = 60.0
"""About this much work a part, within layout.PART_BYTES: what a kill can cost."""

COMPILE_PAYS_S = 600.0
"""Compiling costs a minute or so; compile=auto waits for a run of at least this length."""

_VERSIONED = ("torch", "torchvision", "timm", "pillow")


@dataclass
class Prepared:
    """What a run is made of.

    Attributes:
        choices: one line for each `auto` that was decided, with the reason.
        left_out: what a preset could not store, with the reason.
        seconds_per_image: of the backbone alone, measured on the probe.
        probe_images: how many real images the probe saw.
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
    choices: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all layers."""
        return sum(spec.row_bytes for spec in self.specs)

    @property
    def reference(self) -> bool:
        """Whether images take the reference path: asked for, or the only one there is."""
        return uses_reference(self.config, self.engine.backbone)


def uses_reference(config: Config, backbone: Any) -> bool:
    """decode=reference, or a transform that the fast path cannot follow."""
    return config.decode == "reference" or not backbone.preprocess.has_fast_path


def list_images(config: Config) -> tuple[Source, Listing]:
    """The data set of a config and its rows, `data.limit` applied.

    Raises:
        DataError: it is not there, or empty.
    """
    source = open_source(config.data)
    listing = source.listing()
    return source, listing if config.data.limit is None else listing.head(config.data.limit)


@contextlib.contextmanager
def prepare(config: Config, config_yaml: str) -> Iterator[Prepared]:
    """List the images, build the backbone, find the layers, and decide every `auto`.

    Args:
        config: checked.
        config_yaml: as the user gave it, for the store.

    Raises:
        FeatxError: whatever is wrong with the config, before anything is written.
    """
    source, listing = list_images(config)
    policy = ImagePolicy.from_config(config.data)
    resolve_library(config.model)
    codecs.filters(config.codec)
    out = Path(config.out).expanduser()
    stored = None if config.overwrite else read_descriptor(out)
    _check_out(out)

    # From here on torch is needed, which takes seconds to import.
    from featx.engine import Engine, choose_device
    from featx.loader import Loader
    from featx.preprocess import check_reference
    from featx.select import select

    device = choose_device(config.device)
    backbone = build_backbone(config.model, config.seed)
    check_reference(backbone.preprocess)
    with Engine(backbone, device, config.dtype) as engine:
        traced = engine.trace()
        selection = select(layer_requests(config), traced, backbone.classifier, backbone.stages)
        engine.bind(selection.chosen)
        reference = uses_reference(config, backbone)
        with Loader(source, listing, backbone.preprocess, policy, reference, 1) as loader:
            rows = np.unique(np.linspace(0, len(listing) - 1, PROBE_IMAGES).astype(int))
            images = loader.load(rows.tolist())
        resolver = _Resolver(config, engine, images, len(listing), stored)
        resolver.resolve()
        specs = engine.specs(selection.chosen)
        part_rows = resolver.part_rows(sum(spec.row_bytes for spec in specs))
        header = StoreHeader(
            fingerprint=_fingerprint(config, engine, specs, policy, listing, part_rows, reference),
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
            choices=resolver.choices,
            left_out=selection.left_out,
        )


class _Resolver:
    """Decides what the config leaves to us; what a store was begun with is taken from it."""

    def __init__(
        self,
        config: Config,
        engine: Any,
        images: Any,
        num_rows: int,
        stored: Mapping[str, Any] | None,
    ) -> None:
        self.choices: dict[str, str] = {}
        self.seconds_per_image = float("nan")
        self._config = config
        self._engine = engine
        self._images = images
        self._num_rows = num_rows
        self._stored = dict(stored["resolved"]) if stored else {}
        self._stored_part_rows = stored["part_rows"] if stored else None

    def resolve(self) -> None:
        """Settle the engine on precision, compilation, memory format and batch size."""
        from featx.engine import Compute

        engine, config = self._engine, self._config
        channels_last = self._stored.get("channels_last")
        if channels_last is None:
            channels_last = engine.supports_channels_last()
        compute = Compute("fp32", False, channels_last, self._batch_size())
        compute = replace(compute, batch_size=self._fitting(compute))
        precision = config.precision
        if precision == "auto":
            precision = self._stored_choice("precision") or self._fastest(compute)
        compute = replace(compute, precision=precision)
        engine.settle(compute)
        self._time()
        if config.compile != "auto":
            compiled = config.compile
        else:
            compiled = self._stored_choice("compile")
            compiled = self._worth_compiling() if compiled is None else compiled
        if compiled:
            engine.settle(replace(compute, compile=True))
            self._compile(compute)

    def part_rows(self, row_bytes: int) -> int:
        """Rows per part: as asked, as stored, or from bytes and measured speed."""
        batch_size = self._engine.compute.batch_size
        if self._config.part_rows != "auto":
            rows = int(self._config.part_rows)
            if batch_size > rows:
                raise ConfigError(
                    f"part_rows={rows} is smaller than batch_size={batch_size}; a batch never "
                    "crosses a part, so raise part_rows or lower batch_size."
                )
            return rows
        if self._stored_part_rows is not None:
            return int(self._stored_part_rows)
        by_bytes = layout.PART_BYTES / max(1, row_bytes)
        by_time = PART_SECONDS / max(1e-6, self.seconds_per_image or 0)
        rows = layout.power_of_two_at_most(min(by_bytes, by_time))
        rows = max(rows, layout.power_of_two_at_least(batch_size))
        self.choices["part_rows"] = f"{rows}"
        return rows

    def _stored_choice(self, key: str) -> Any:
        if key not in self._stored:
            return None
        value = self._stored[key]
        shown = str(value).lower() if isinstance(value, bool) else value
        self.choices[key] = f"{shown} (as the store was begun)"
        return value

    def _batch_size(self) -> int:
        if self._config.batch_size != "auto":
            return int(self._config.batch_size)
        if (stored := self._stored_choice("batch_size")) is not None:
            return int(stored)
        largest = CUDA_BATCH if self._engine.device.type == "cuda" else CPU_BATCH
        if self._config.part_rows != "auto":
            largest = min(largest, int(self._config.part_rows))
        size = min(largest, layout.power_of_two_at_least(self._num_rows))
        self.choices["batch_size"] = f"{size}"
        return size

    def _fitting(self, compute: Any) -> int:
        """The batch size, halved until it fits on the device where it was left to us."""
        import torch

        left_to_us = self._config.batch_size == "auto" and "batch_size" not in self._stored
        size = int(compute.batch_size)
        while True:
            try:
                if self._engine.device.type == "cuda":
                    self._engine.settle(replace(compute, batch_size=size))
                    self._engine.run(self._filled(size))
                return size
            except torch.cuda.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                if not left_to_us or size == 1:
                    raise RunError(
                        f"batch_size={size} does not fit into the memory of "
                        f"{self._engine.device}. Lower batch_size."
                    ) from error
                size //= 2
                self.choices["batch_size"] = f"{size} (what fits)"

    def _filled(self, size: int) -> Any:
        """A batch of the probe's images, repeated to `size`; grey where there is none."""
        import torch

        if len(self._images) == 0:
            shape = (size, 3, *self._engine.backbone.preprocess.crop)
            return torch.full(shape, 127, dtype=torch.uint8)
        repeats = -(-size // len(self._images))
        return torch.cat([self._images] * repeats)[:size]

    def _time(self) -> None:
        size = min(self._engine.compute.batch_size, PROBE_IMAGES)
        self.seconds_per_image = self._engine.seconds_per_image(self._filled(size), repeats=2)

    def _fastest(self, compute: Any) -> str:
        """precision=auto: the fastest whose rows all stay near fp32, on real images."""
        from featx.engine import MIN_COSINE, MIN_SPEEDUP, row_cosines

        if len(self._images) == 0:
            self.choices["precision"] = "fp32 (no image could be read to probe others)"
            return "fp32"
        accelerator = self._engine.device.type != "cpu"
        candidates = ("fp16", "bf16") if accelerator else ("bf16",)
        few = self._images[:_GLANCE_IMAGES]
        self._engine.settle(compute)
        exact = {k: v.clone() for k, v in self._engine.run(self._images).items()}
        best, seconds = "fp32", self._engine.seconds_per_image(self._images)
        glance = self._engine.seconds_per_image(few)
        told = [f"fp32 {1 / seconds:.1f} images/s"]
        for precision in candidates:
            self._engine.settle(replace(compute, precision=precision))
            # A CPU without bf16 units takes minutes for a full probe; a glance is enough there.
            if (took := self._engine.seconds_per_image(few, repeats=2)) > 2 * glance:
                told.append(f"{precision} {took / glance:.1f} times slower")
                continue
            cosine = row_cosines(self._engine.run(self._images), exact)
            took = self._engine.seconds_per_image(self._images)
            told.append(f"{precision} {1 / took:.1f} images/s, cosine {cosine:.5f}")
            if cosine >= MIN_COSINE and took * MIN_SPEEDUP < seconds:
                best, seconds = precision, took
        self.choices["precision"] = f"{best} ({'; '.join(told)})"
        return best

    def _worth_compiling(self) -> bool:
        seconds = self.seconds_per_image * self._num_rows
        compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
        if seconds < COMPILE_PAYS_S:
            why = f"about {seconds:.0f} s of work, too little to earn it back"
        elif self._engine.device.type == "cpu" and compiler is None:
            why = "no C++ compiler found"
        else:
            self.choices["compile"] = f"true (about {seconds:.0f} s of work)"
            return True
        self.choices["compile"] = f"false ({why})"
        return False

    def _compile(self, eager: Any) -> None:
        """Compile, and keep it only if the values agree with the eager model's."""
        from featx.engine import MIN_COSINE, row_cosines

        images = self._filled(eager.batch_size)
        self._engine.settle(eager)
        expected = {k: v.clone() for k, v in self._engine.run(images).items()}
        self._engine.settle(replace(eager, compile=True))
        try:
            cosine = row_cosines(self._engine.run(images), expected)
            failed = None if cosine >= MIN_COSINE else f"cosine to eager is {cosine:.5f}"
        except Exception as error:  # noqa: BLE001 - torch.compile fails in every possible way
            failed = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"
        if failed is None:
            self._time()
            return
        if self._config.compile is True:
            raise RunError(f"compile=true failed ({failed}). Use compile=false.")
        logger.warning("torch.compile failed, going on without it: %s", failed)
        self.choices["compile"] = f"false ({failed})"
        self._engine.settle(eager)


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
    backbone = engine.backbone
    return {
        "model": backbone.name,
        "weights": backbone.weights,
        "weights_sha256": backbone.weights_sha256,
        **{
            f"layer.{spec.name}": f"{spec.capture} of {spec.layer}, reduce {spec.reduce} "
            f"{dict(spec.reduce_args)}, shape {list(spec.shape)}"
            for spec in specs
        },
        "layers": [spec.name for spec in specs],
        "dtype": config.dtype,
        "transform": backbone.preprocess.describe(),
        "decode": "reference" if reference else "fast",
        "data.exif": policy.exif,
        "data.background": list(policy.background),
        "data.max_pixels": policy.max_pixels,
        "listing": f"{len(listing)} rows, sha256 {listing_digest(listing)}",
        "device": engine.device.type,
        **engine.compute.as_dict(),
        "part_rows": part_rows,
        "codec": config.codec,
        "nonfinite": config.nonfinite,
        **{f"version.{name}": version for name, version in _versions().items()},
    }


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _VERSIONED}


def _own_version() -> str:
    from featx import __version__

    return __version__


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file; expected a folder for the store.")
