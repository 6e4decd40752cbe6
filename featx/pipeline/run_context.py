"""Builds everything a run needs from its config and decides every `auto`; writes nothing.

Checks are ordered by cost: errors that need no model are raised before a model is loaded.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from featx.base import keep_freed_memory, log_step, name_text, num_cpus, resident_memory
from featx.config import Config, ReduceConfig
from featx.errors import DataError, counted
from featx.images import ImagePolicy
from featx.layers import token_geometries
from featx.models import build_backbone, resolve_library
from featx.pipeline.provenance import (
    RESPONSE,
    Response,
    check_response,
    fingerprint,
    header,
    response_of,
)
from featx.pipeline.run_listing import refuse_missing_images, spread_rows, target_labels
from featx.pipeline.run_metrics import StepTimer
from featx.store import Grid, Run, codecs
from featx.types import (
    Batch,
    Failure,
    LayerSpec,
    Listing,
    ResumeState,
    Source,
    StoreHeader,
)

if TYPE_CHECKING:
    import torch

    from featx.engine import BatchParallelism, Engine, Windows
    from featx.images import DecodeSettings, Loader
    from featx.layers import CapturePoint, ChosenLayers, Selection
    from featx.models import Backbone
    from featx.pipeline.conformance import Conformance
    from featx.pipeline.conformance_trial import TrialImages


@dataclass(frozen=True)
class EngineSpec:
    """Functions that build the engine of a run and choose its layers.

    All three functions are module-level functions, since workers receive them pickled by name.

    Attributes:
        build: creates the engine from the config, a backbone, a device, and the dtype of its
            values.
        select: finds the requested datasets in one traced forward pass of the engine.
        bind_reductions: completes the reductions that need statistics of a data set.
        captures_layers: whether the datasets are tensors of the layers that the options `layers`
            and `capture` name, which is not so for heat maps.
    """

    build: Callable[[Config, Backbone, torch.device, str], Engine]
    select: Callable[[Config, Engine], Selection]
    bind_reductions: Callable[
        [Sequence[tuple[CapturePoint, ReduceConfig]], Config, Backbone], ChosenLayers
    ]
    captures_layers: bool


class RunTarget(Protocol):
    """Rows and layers that a run must compute, and what is known of its settings.

    `dtype` names that in which the engine returns values, such as 'float16'; `settings` are entries
    of the fingerprint that only this kind of run has.
    """

    dtype: str
    settings: dict[str, Any]

    @abstractmethod
    def list_images(self) -> tuple[Source, Listing]:
        """Open the data set and list its rows, in the order of the existing output."""

    @abstractmethod
    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """Select the requested layers that are still to be computed."""

    @abstractmethod
    def resume_state(self, names: set[str]) -> ResumeState | None:
        """Resume state for the named layers, or None if nothing exists yet."""

    @abstractmethod
    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """Largest number of rows per part, and the seconds of work that a part should take.

        `work_s` are the seconds that the model takes for all rows. Raises FeatxError if the target
        cannot be computed from these layers.
        """


@dataclass
class RunContext:
    """A run with all choices made.

    Attributes:
        listing: rows of the run, in the order of the store.
        listing_bytes: memory that they take, with what the source holds to read them.
        loader: loader of the images of the run; its decoders end with the context.
        engine: engine with the captures of the run attached.
        engine_spec: how the engine was built; workers build theirs from it.
        windows: windows in which an image of its own size goes through the engine; None if images
            have the size of its input.
        header: fingerprint, config and versions that every file of the run records.
        part_rows: rows per part; the last part may have fewer.
        model_s: seconds per image for the model, measured on trial images.
        parallelism: number of CPU threads per batch, and of parallel batches in each process.
        devices: devices of the processes that compute, one per process (torch.device).
        choices: name of each `auto` -> its value and the reason, as one line of text.
        left_out: layers that a preset asks for but that cannot be stored, with the reason.
        response: what a model of the user's code returns for noise; None for other models, and
            without any such values.
        conformance: comparison with the library's own path; None if there was none.
        start_seconds: step of building the context -> seconds: listing the images, importing torch
            and the engine, loading the weights, tracing the model, and the trial.
    """

    config: Config
    source: Source
    listing: Listing
    listing_bytes: int
    decoding: DecodeSettings
    loader: Loader
    engine: Engine
    engine_spec: EngineSpec
    windows: Windows | None
    specs: list[LayerSpec]
    header: StoreHeader
    part_rows: int
    model_s: float
    parallelism: BatchParallelism
    devices: list[torch.device]
    choices: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    response: Response | None = None
    conformance: Conformance | None = None
    start_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, summed over all layers."""
        return sum(spec.row_bytes for spec in self.specs)

    @property
    def batch_rows(self) -> int:
        """Number of rows of a batch: its images, or with windows 1."""
        return self.engine.compute.batch_size if self.windows is None else 1

    def as_run(self) -> Run:
        """The whole listing and the requested layers, as an entry for the manifest of a store."""
        from featx.engine import ALIGN  # imports torch

        windows, policy = self.windows, self.decoding.policy
        threads = self.parallelism.threads
        return Run(
            header=self.header,
            layers=tuple(self.specs),
            grid=Grid(len(self.listing), self.part_rows),
            codec=self.config.codec,
            resolved={
                **asdict(self.engine.compute),
                "jpeg": policy.jpeg,
                **({} if policy.heif is None else {"heif": policy.heif}),
                **({} if threads is None else {"threads": threads}),
                **({} if windows is None else {ALIGN: windows.align}),
                **({} if self.response is None else {RESPONSE: self.response.values}),
            },
            conformance={} if self.conformance is None else self.conformance.differences,
            tokens=token_geometries(
                [spec for spec in self.specs if spec.name not in self.engine.captures.misplaced],
                self.engine.backbone,
                self.engine.traced,
            )
            if windows is None
            else windows.geometries(),
        )

    @functools.cached_property
    def target_labels(self) -> npt.NDArray[np.int64]:
        """Class of the model of every row, (N,) int64; see `target_labels`."""
        return target_labels(self.config.target, self.listing, self.engine.backbone)

    def labels_and_keys(self, batch: Batch) -> tuple[torch.Tensor | None, list[bytes]]:
        """Class indices of a batch for gradients of `target=label` or `target=loss`, and its keys.

        The labels are (B,) int64 on the CPU with 0 in padding rows, or None for other targets. The
        keys are those of the rows, without padding.
        """
        rows = slice(batch.start, batch.start + batch.count)
        keys: list[bytes] = self.listing.keys[rows].tolist()
        if self.config.target not in ("label", "loss"):
            return None, keys
        import torch

        labels = torch.zeros(len(batch.images), dtype=torch.int64)
        labels[: batch.count] = torch.from_numpy(self.target_labels[rows].copy())
        return labels, keys


@contextlib.contextmanager
def build_run_context(
    config: Config, config_yaml: str, spec: EngineSpec, target: RunTarget
) -> Iterator[RunContext]:
    """List the images, build the backbone, find the layers and decide every `auto`.

    The model is back in its original state when the context ends, also after an exception. Raises
    FeatxError if the config cannot be run; nothing has been written then. The store keeps
    `config_yaml`, the composed config without secrets.
    """
    timer = StepTimer()
    memory_before = resident_memory()
    source, listing = target.list_images()
    listing_bytes = max(listing.num_bytes, (resident_memory() or 0) - (memory_before or 0))
    ImagePolicy.from_config(config.data)  # reports an invalid background colour before loading
    resolve_library(config.model)
    codecs.filters(config.codec)
    is_new = target.resume_state(set()) is None
    if is_new and config.allowed_failures(len(listing)) < len(listing):
        refuse_missing_images(source, listing)
    timer.end("listing")

    # From here on torch is needed, which takes seconds to import.
    log_step("importing PyTorch ...")
    import torch

    from featx.base import choose_devices, cpu_threads, explained_memory
    from featx.engine import TRIAL_IMAGES, AutoSettings, attach_windows, batch_parallelism
    from featx.images import FEW_ROWS, DecodeSettings, Loader, check_reference
    from featx.pipeline.conformance_trial import (
        NUM_COMPARED_IMAGES,
        check_golden,
        compare_with_plain_path,
        take_plain_path,
    )

    timer.end("imports")
    with contextlib.ExitStack() as stack:
        executor = config.executor
        local_workers = executor.workers if executor.name == "local" else None
        devices = choose_devices(config.device, local_workers)
        stack.enter_context(explained_memory(devices[0]))
        if devices[0].type == "cpu":
            keep_freed_memory()  # before any thread allocates
        log_step(f"loading {config.model.name} ...")
        backbone = build_backbone(config.model, config.seed)
        stack.callback(backbone.give_back)  # covers errors raised before the engine is entered
        timer.end("weights")

        target_labels(config.target, listing, backbone)  # raises before any trial pass
        check_reference(backbone.preprocess)
        memory_before = resident_memory()
        has_windows = backbone.preprocess.has_windows
        dtype = "float32" if has_windows else target.dtype  # maps are rounded when they are blended
        engine = stack.enter_context(spec.build(config, backbone, devices[0], dtype))
        selection = spec.select(config, engine)
        response = response_of(engine) if backbone.is_users else None
        requested = spec.bind_reductions(selection.chosen, config, backbone)
        chosen = target.unfinished(listing, requested)
        resume_state = target.resume_state({point.name for point, _ in chosen})
        timer.end("trace")

        cpus = None  # on which this process computes forward passes
        if devices[0].type == "cpu":
            cpus = config.cpus_of_worker(num_cpus())
            if executor.name == "local":  # in torch's threads at most
                cpus = min(torch.get_num_threads(), cpus)
        # The trial passes use all threads; the run itself may use fewer per batch.
        engine.process_stack.enter_context(
            cpu_threads(batch_parallelism.trial_threads(cpus, resume_state))
        )
        log_step("trying the settings on some images ...")
        decoding = DecodeSettings.of_run(config, backbone.preprocess, listing, resume_state)
        loader = stack.enter_context(Loader(source, listing, decoding, engine.device))
        # The trial passes over 16 images take longer than all passes of a run of 20. So a short run
        # measures on fewer images: a quarter of its own, as long as that is enough for the
        # comparison with the library's own path.
        count = min(TRIAL_IMAGES, max(NUM_COMPARED_IMAGES, len(listing) // 4))
        trial = _load_trial_images(loader, source, listing, decoding, count)
        engine.trial_images = trial.images

        windows = None
        if has_windows:
            windows = attach_windows(engine, chosen, target.dtype, trial.sizes, resume_state)
            chosen = windows.maps
        else:
            engine.attach_captures(chosen)

        # The library's path is taken while the weights are as they were loaded, and judged by rows
        # of the trial at the settings of the run.
        plain = golden = None
        compared = chosen if spec.captures_layers else []
        if resume_state is None or resume_state.has_new_layers:
            if config.model.golden is not None:
                golden = check_golden(engine, compared, config.model.golden)
            if config.conformance.mode != "off":
                plain = take_plain_path(config, engine, compared, loader, trial)

        per_image = None if windows is None else windows.per_image
        auto_settings = AutoSettings(
            config, engine, trial.images, len(listing), resume_state, per_image
        )
        auto_settings.resolve()
        parallelism = batch_parallelism.decide(
            engine, cpus, resume_state, memory_before, auto_settings.make_batch
        )

        specs = engine.specs(chosen)
        if windows is not None:
            specs = windows.set_specs(specs)
        conformance = compare_with_plain_path(
            engine, plain, golden, trial, auto_settings.trial_rows, specs, config.conformance.mode
        )
        work_s = auto_settings.seconds_per_image * len(listing)
        part_rows = auto_settings.part_rows(*target.part_limits(engine, specs, work_s))
        settings = fingerprint(config, engine, decoding, specs, listing, part_rows)
        if resume_state is not None:
            code = config.model.code or config.model.name
            check_response(code, response, settings, resume_state)
        timer.end("trial")

        engine.process_stack.enter_context(cpu_threads(parallelism.threads))
        if len(listing) > FEW_ROWS:
            loader.end_decoders()  # they hold the weights as they were before the trial
        yield RunContext(
            config=config,
            source=source,
            listing=listing,
            listing_bytes=listing_bytes,
            decoding=decoding,
            loader=loader,
            engine=engine,
            engine_spec=spec,
            windows=windows,
            specs=specs,
            header=header(config_yaml, backbone, {**settings, **target.settings}),
            part_rows=part_rows,
            model_s=auto_settings.seconds_per_image,
            parallelism=parallelism,
            devices=devices,
            choices={**auto_settings.choices, **parallelism.choices},
            left_out=selection.left_out,
            response=response,
            conformance=conformance,
            start_seconds=timer.seconds,
        )


def _load_trial_images(
    loader: Loader, source: Source, listing: Listing, decoding: DecodeSettings, count: int
) -> TrialImages:
    """Load trial images, spread evenly over the data set."""
    import torch

    from featx.images import UNFIT, centre_crop
    from featx.pipeline.conformance_trial import TrialImages

    rows = spread_rows(len(listing), count).tolist()
    loaded, sizes, failures = {}, [], []
    for row, result in zip(rows, loader.whole_results(rows), strict=True):
        if isinstance(result, Failure):
            failures.append(result)
            continue
        loaded[row] = result
        if decoding.preprocess.has_windows:
            sizes.append((result.shape[1], result.shape[2]))
            loaded[row] = centre_crop(result, decoding.preprocess.crop).clone()
    if not loaded and all(failure.error in UNFIT for failure in failures):
        first = failures[0]
        raise DataError(
            f"none of {counted(len(failures), 'image')} that were tried fits the model. "
            f"{name_text(first.key)}: {first.message}."
        )
    images = torch.stack([*loaded.values()]) if loaded else loader.load([])
    return TrialImages([*loaded], images, source, listing, decoding.reference, sizes)
