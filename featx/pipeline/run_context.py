"""A config -> everything a run needs, with every `auto` decided; nothing is written yet.

The order is that of patience: what can be told without loading a model is told first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from featx.base.allocator import keep_freed_memory
from featx.base.machine import num_cpus, resident_memory
from featx.config.run_config import Config
from featx.images.crash_journal import CrashList
from featx.images.decode import ImagePolicy
from featx.models import build_backbone, resolve_library
from featx.pipeline.engine_spec import EngineSpec
from featx.pipeline.provenance import fingerprint, header
from featx.pipeline.run_target import RunTarget, StoreTarget
from featx.store import codecs
from featx.store.layout import Grid
from featx.store.manifest import Run
from featx.types import Batch, LayerSpec, Listing, Source, StoreHeader

if TYPE_CHECKING:
    import torch

    from featx.engine.batch_parallelism import BatchParallelism
    from featx.engine.engine import Engine
    from featx.images.decode_settings import DecodeSettings
    from featx.images.loader import Loader
    from featx.pipeline.trial import TrialSpeed


@dataclass
class RunContext:
    """What a run is made of.

    Attributes:
        choices: one line for each `auto` that was decided, with the reason.
        left_out: what a preset could not store, with the reason.
        trial: what reading, decoding and the model took for an image of the trial.
        at_once: threads of a batch, and batches that are computed side by side in each process.
        engine_spec: how the engine was built, for workers.
        devices: of the processes that compute, torch.device.
    """

    config: Config
    source: Source
    listing: Listing
    decoding: DecodeSettings
    engine: Engine
    engine_spec: EngineSpec
    specs: list[LayerSpec]
    header: StoreHeader
    part_rows: int
    trial: TrialSpeed
    at_once: BatchParallelism
    devices: list[torch.device]
    choices: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all layers."""
        return sum(spec.row_bytes for spec in self.specs)

    def as_run(self) -> Run:
        """All rows and the layers that are asked for, as a run of a store."""
        policy, share = self.decoding.policy, self.decoding.device_share
        threads = self.at_once.threads
        return Run(
            header=self.header,
            layers=tuple(self.specs),
            grid=Grid(len(self.listing), self.part_rows),
            codec=self.config.codec,
            resolved={
                **self.engine.compute.as_dict(),
                "jpeg": policy.jpeg,
                **({} if share is None else {"gpu_share": share}),
                **({} if policy.heif is None else {"heif": policy.heif}),
                **({} if threads is None else {"threads": threads}),
            },
        )

    def labels_of(self, batch: Batch) -> Any:
        """(B,) int64 labels of a batch as a tensor, 0 for its padding; None where nobody asks."""
        if self.config.target not in ("label", "loss"):
            return None
        import torch

        labels = torch.zeros(len(batch.images), dtype=torch.int64)
        here = self.listing.labels[batch.start : batch.start + batch.count]
        labels[: batch.count] = torch.from_numpy(here.copy())
        return labels

    def loader(self, batch_size: int) -> Loader:
        """A Loader of the run's images; a context manager."""
        from featx.images.loader import Loader  # which imports torch

        device = self.engine.device
        return Loader(self.source, self.listing, self.decoding, batch_size, device)


@contextlib.contextmanager
def build_run_context(
    config: Config, config_yaml: str, spec: EngineSpec, purpose: RunTarget | None = None
) -> Iterator[RunContext]:
    """List the images, build the backbone, find the layers, and decide every `auto`.

    Args:
        config: checked.
        config_yaml: as the user gave it, for the store.
        spec: of the engine that computes the rows.
        purpose: what the run is for; None for the store in `out`, where nothing is written.

    Raises:
        FeatxError: whatever is wrong with the config, before anything is written.
    """
    suspects = CrashList(None if purpose is None else purpose.folder)
    purpose = StoreTarget(config) if purpose is None else purpose
    source, listing = purpose.list_images()
    ImagePolicy.from_config(config.data)  # a colour that is none is told without a model
    resolve_library(config.model)
    codecs.filters(config.codec)

    # From here on torch is needed, which takes seconds to import.
    from featx.base.devices import choose_devices, cpu_threads
    from featx.engine import batch_parallelism
    from featx.engine.auto_settings import AutoSettings
    from featx.images.decode_settings import DecodeSettings
    from featx.images.gpu_decode_share import check_device, with_share
    from featx.images.preprocess import check_reference
    from featx.pipeline.trial import TrialSpeed

    devices = choose_devices(config.device, config.devices)
    check_device(config.decode, source, devices[0])
    if devices[0].type == "cpu":
        keep_freed_memory()  # before any thread allocates
    backbone = build_backbone(config.model, config.seed)
    with contextlib.ExitStack() as stack:
        stack.callback(backbone.give_back)  # an engine that is not entered would not
        check_reference(backbone.preprocess)
        before = resident_memory()
        engine = stack.enter_context(spec.build(config, backbone, devices[0], purpose.dtype))
        selection = spec.select(config, engine)
        chosen = spec.bind_reductions(selection.chosen, config, backbone)
        chosen = purpose.unfinished(listing, chosen)
        begun = purpose.begun({tap.name for tap, _ in chosen})
        cpus = batch_parallelism.cpus_that_compute(config, devices[0])
        stack.enter_context(cpu_threads(batch_parallelism.calibration_threads(cpus, begun)))
        decoding = DecodeSettings.of_run(config, backbone.preprocess, listing, suspects, begun)
        images, read_s, decode_s = _probe_images(source, listing, decoding)
        engine.trial_images = images
        engine.attach_captures(chosen)
        decoding, why_share = with_share(config.decode, source, listing, decoding, devices[0])
        resolver = AutoSettings(config, engine, images, len(listing), begun)
        resolver.resolve()
        at_once = batch_parallelism.decide(engine, cpus, begun, before, resolver.filled)
        specs = engine.specs(chosen)
        work_s = resolver.seconds_per_image * len(listing)
        part_rows = resolver.part_rows(*purpose.part_limits(engine, specs, work_s))
        stack.enter_context(cpu_threads(at_once.threads))
        settings = fingerprint(config, engine, decoding, specs, listing, part_rows)
        yield RunContext(
            config=config,
            source=source,
            listing=listing,
            decoding=decoding,
            engine=engine,
            engine_spec=spec,
            specs=specs,
            header=header(config_yaml, backbone, {**settings, **purpose.settings}),
            part_rows=part_rows,
            trial=TrialSpeed(
                read_s=read_s,
                decode_s=decode_s,
                model_s=resolver.seconds_per_image,
                threads=num_cpus(),
                is_on_cpu=devices[0].type == "cpu",
            ),
            at_once=at_once,
            devices=devices,
            choices={**resolver.choices, **at_once.choices, **why_share},
            left_out=selection.left_out,
        )


def _probe_images(
    source: Source, listing: Listing, decoding: DecodeSettings
) -> tuple[torch.Tensor, float, float]:
    """Some images from all over the data set, to try and time the backbone on.

    What a run that died was decoding is looked at first, as they may be among them.

    Returns:
        the images, (n, 3, H, W), and the busy seconds of reading and of decoding one.
    """
    from featx.engine.auto_settings import PROBE_IMAGES
    from featx.images.loader import Loader

    rows = np.unique(np.linspace(0, len(listing) - 1, PROBE_IMAGES).astype(int))
    with Loader(source, listing, decoding, batch_size=1) as loader:
        loader.retry_suspects()
        loader.load(rows[:1].tolist())  # imports what decodes, which is not to be timed
        read, decode = loader.times.read, loader.times.decode
        images = loader.load(rows.tolist())
        count = max(1, len(images))
        read_s, decode_s = loader.times.read - read, loader.times.decode - decode
        return images, read_s / count, decode_s / count
