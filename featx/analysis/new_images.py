"""New images through the model, layers and transform of an existing store.

Used by `featx.embed`, by job=neighbors for an image that is no row, and by job=predict.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from featx.analysis.engine_specs import FEATURES, engine_spec
from featx.analysis.reproducibility import refuse_unnamed_code, request_of
from featx.analysis.value_settings import refuse_changes
from featx.config import (
    Config,
    DataConfig,
    from_saved,
    in_this_process,
    model_choice,
    model_options,
    with_statistics_at,
)
from featx.errors import ConfigError, DataError
from featx.models import given_factory
from featx.pipeline import (
    PART_SECONDS,
    Interrupted,
    Rows,
    RunContext,
    build_run_context,
    compute_rows,
    list_images,
)
from featx.sources import MapSource, list_of_column, with_views
from featx.store import Grid, Run, from_raw, layout
from featx.types import Array, Batch, Failure, Json, LayerSpec, Listing, Part, ResumeState, Source

if TYPE_CHECKING:
    from featx.engine import Engine
    from featx.layers import ChosenLayers


@dataclass(frozen=True)
class ExtractionRecipe:
    """Settings by which the rows of some layers of a store were extracted.

    Attributes:
        origin: file or store that says so, for messages.
        config: config of the run, as text.
        resolved: `auto` values of the run.
        transform: preprocessing, as text.
        model_settings: `Run.model_settings` of the run; empty if they are not known.
    """

    origin: str
    config: str
    specs: tuple[LayerSpec, ...]
    resolved: Json
    weights_sha256: str
    transform: str
    model_settings: Json

    @classmethod
    def of_run(cls, origin: str, run: Run, names: Sequence[str]) -> ExtractionRecipe:
        """Return how a run of a store extracted the layers with some names."""
        specs = tuple(spec for spec in run.layers if spec.name in names)
        header = run.header
        model_values = header.weights_sha256, header.transform, run.model_settings
        return cls(origin, header.config, specs, run.resolved, *model_values)

    def config_for(self, config: Config, data: DataConfig) -> Config:
        """Return the config of the run with other images."""
        run_config = with_statistics_at(from_saved(self.config), config.reduce.statistics_path)
        if not engine_spec(run_config.job.name).captures_layers:
            raise ConfigError(
                f"{self.origin} is of heat maps; new images are taken through layers only."
            )
        if run_config.takes_gradients and run_config.target in ("label", "loss"):
            raise ConfigError(
                f"{self.origin} has gradients of target={run_config.target}; new images have no "
                "label."
            )
        refuse_unnamed_code(config, run_config, self.origin)
        return replace(
            in_this_process(run_config),
            job=replace(run_config.job, name="extract", json=False, show="shapes"),
            data=images_read_as(data, run_config.data),
            device=config.device,
            layers={spec.name: request_of(spec, run_config) for spec in self.specs},
            capture="output",  # the name of the dataset includes the capture
            precision=self.resolved.get("precision", run_config.precision),
            nonfinite="record",
        )

    @property
    def model_values(self) -> Json:
        """Entries of the fingerprint of a run that decide what its model computes."""
        values = {"weights_sha256": self.weights_sha256, "transform": self.transform}
        return {**values, **self.model_settings}

    def check(self, context: RunContext) -> None:
        """Check that the model, its weights, transform and layers are as they were."""
        pairs: dict[str, tuple[object, object]] = {
            key: (value, context.header.fingerprint.get(key))
            for key, value in self.model_values.items()
        }
        spec_of_name = {spec.name: spec for spec in context.specs}
        for spec in self.specs:
            now = spec_of_name[spec.name]
            pairs |= {
                f"{spec.name}, layer": (spec.layer, now.layer),
                f"{spec.name}, capture": (spec.capture, now.capture),
                f"{spec.name}, reduce": (
                    (spec.reduce, dict(spec.reduce_args)),
                    (now.reduce, dict(now.reduce_args)),
                ),
                f"{spec.name}, shape": (spec.shape, now.shape),
            }
        message = f"{self.origin} does not fit what is extracted now"
        refuse_changes(pairs, "was {!r}, is {!r}", message)


_READING = ("exif", "background", "max_pixels", "damaged", "white")
"""Options of the group `data` by which images are read."""


def images_read_as(now: DataConfig, before: DataConfig) -> DataConfig:
    """Return the options of the group `data` for the new images, read as those of the store."""
    settings = {key: getattr(before, key) for key in _READING}
    for key, value in settings.items():
        option = getattr(now, key)
        if option not in (value, getattr(DataConfig(), key)):
            raise ConfigError(
                f"data.{key}={option}: the images of the store were read with {value}, and new "
                "ones are read in the same way."
            )
    before_has_views = before.has_views or before.boxes is not None
    if before_has_views and not now.has_views and now.boxes is None:
        # These are cut out of images in full size; large JPEGs are decoded in a smaller one else.
        return replace(now, **settings, views=["original"])
    return replace(now, **settings)


def list_given_images(images: object) -> list[object]:
    """Return new images as a list, with the home folder for `~` in paths.

    A one-dimensional array or a column of a table holds paths, an array of four axes images. Raises
    DataError if `images` is neither that nor a list, or is empty.
    """
    # Iterating over an open file gives its lines.
    is_one = isinstance(images, str | bytes | bytearray | os.PathLike | io.IOBase)
    column = list_of_column(images)
    images = images if column is None else column
    # An array of numbers of one axis is no list of paths, but perhaps one encoded image.
    is_of_paths = isinstance(images, np.ndarray) and images.ndim == 1 and images.dtype.kind in "OU"
    is_array = is_of_paths or getattr(images, "ndim", 0) == 4
    if is_one or not (is_array or isinstance(images, Sequence | Iterator)):
        raise DataError(
            f"images is a {type(images).__name__}; expected a list of paths, Pillow images, arrays "
            "or encoded bytes; [image] for one."
        )
    items: list[object] = list(images)  # type: ignore[call-overload]
    if not items:
        raise DataError("images is empty: give at least one.")
    for i, item in enumerate(items):
        if isinstance(item, str | os.PathLike):  # Path.expanduser raises for a file named ~x.jpg
            items[i] = os.fsdecode(os.path.expanduser(item))  # noqa: PTH111
    return items


class NewImagesTarget:
    """Run target: features of new images, which are not stored."""

    def __init__(
        self, recipe: ExtractionRecipe, list_images: Callable[[], tuple[Source, Listing]]
    ) -> None:
        self.dtype = recipe.specs[0].dtype
        self.settings: dict[str, Any] = {}
        self.list_images = list_images
        self._recipe = recipe

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """Return the layers to compute: all."""
        return chosen

    def resume_state(self, names: set[str]) -> ResumeState | None:
        """Return the settings of the store."""
        return ResumeState(self._recipe.resolved, self._recipe.model_values, None)

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """Return the maximum number of rows and of seconds per part."""
        return layout.PART_BYTES / max(1, sum(spec.row_bytes for spec in specs)), PART_SECONDS


class LoadedModel:
    """Model of a recipe, built with the first images and used for others until it is closed.

    Threads may share it: a run waits for the one before it. With `pads`, a batch is filled up to
    the size of the store's, so that a row has the same bits; otherwise it holds no more images than
    there are. `model_factory` is that of `config_with_factory`.
    """

    def __init__(
        self, recipe: ExtractionRecipe, config: Config, pads: bool, model_factory: object
    ) -> None:
        self._recipe = recipe
        self.config = config
        self._pads = pads
        self._model_factory = model_factory
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._first: RunContext | None = None
        self._is_closed = False
        self._compute: Any = None

    @contextlib.contextmanager
    def run(
        self, images: Sequence[object] | None, data: DataConfig | None = None
    ) -> Iterator[RunContext]:
        """Yield the context of a run over some images, or over those of a data set, without
        gradients in the block. Raises Interrupted on Ctrl-C, also in the block.
        """
        import torch

        from featx.base import refuse_autocast  # which imports torch

        refuse_autocast()  # a head multiplies outside of the engine's own autocast
        config = self.config if data is None else replace(self.config, data=data)

        def list_new_images() -> tuple[Source, Listing]:
            if images is None:
                return list_images(config)
            source = with_views(MapSource(images), config.data)
            return source, source.listing()

        try:
            with (
                self._lock,
                given_factory(self._model_factory),
                self._context(list_new_images) as context,
                self._sized(context),
                torch.no_grad(),
            ):
                yield context
        except KeyboardInterrupt as interrupt:
            raise Interrupted(getattr(interrupt, "signum", signal.SIGINT)) from None

    @contextlib.contextmanager
    def _context(self, list_images: Callable[[], tuple[Source, Listing]]) -> Iterator[RunContext]:
        """Yield the context of the first run, which loads the model, or of a later one."""
        if self._is_closed:
            raise ConfigError("the model was let go by close(); make a new one.")
        if (first := self._first) is None:
            first = self._load(list_images)
            try:
                yield first
            finally:  # between two calls no process stays, and settings are those of the caller
                first.loader.end_decoders()
                first.engine.process_stack.close()
            return
        from featx.base import cpu_threads  # which imports torch
        from featx.images import Loader

        source, listing = list_images()
        with (
            first.engine.process_settings(),
            cpu_threads(first.parallelism.threads),
            Loader(source, listing, first.decoding, first.engine.device) as loader,
        ):
            yield replace(first, source=source, listing=listing, loader=loader)

    def _load(self, list_images: Callable[[], tuple[Source, Listing]]) -> RunContext:
        """Build the model, and keep it if it is the one of the recipe."""
        target = NewImagesTarget(self._recipe, list_images)
        with contextlib.ExitStack() as stack:
            context = stack.enter_context(build_run_context(self.config, "", FEATURES, target))
            self._recipe.check(context)
            self._stack = stack.pop_all()
            weakref.finalize(self, self._stack.close)  # at exit, while torch is still there
        self._first, self._compute = context, context.engine.compute
        return context

    @contextlib.contextmanager
    def _sized(self, context: RunContext) -> Iterator[None]:
        """Choose the batch size of a run inside the block."""
        compute = self._compute
        if not self._pads and not compute.compile and context.windows is None:
            size = min(compute.batch_size, len(context.listing))
            context.engine.compute = replace(compute, batch_size=size)
        try:
            yield
        finally:
            context.engine.compute = compute

    def close(self) -> None:
        """Let the model go, after the run in progress."""
        with self._lock:
            self._is_closed, self._first = True, None
            self._stack.close()


class LoadedFunction:
    """Function of new images whose models stay loaded until it is closed."""

    def __init__(self, models: Sequence[LoadedModel]) -> None:
        self.models = models

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the models go."""
        for model in self.models:
            model.close()


def config_with_factory(device: str, model_factory: object, **options: Any) -> Config:
    """Return a config with a device, the factory of a custom model, and other options."""
    with given_factory(model_factory) as factory:
        pass
    if factory is not None:
        options["model"] = model_options(**model_choice("custom"), factory=factory)
    return Config(device=device, **options)


class NewImagesSink(ABC):
    """Part sink that keeps the values of new images in memory; subclasses compute them.
    `num_failed` is always 0: a limit of failures would end the run and lose the rows in memory.
    """

    num_failed = 0
    seconds: Mapping[str, float] = {}

    def __init__(self, context: RunContext) -> None:
        self.failures: dict[int, Failure] = {}
        self.num_committed = 0
        self._context = context

    @abstractmethod
    def keep(self, batch: Batch, features: Mapping[str, Array]) -> None:
        """Keep the rows of a batch."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the run."""
        return len(self._context.listing)

    def missing(self) -> list[Part]:
        """Return all parts of the run."""
        grid = Grid(self.num_rows, self._context.part_rows)
        return [grid.part(index) for index in range(len(grid))]

    def compute(self, engine: Engine, batch: Batch) -> Rows:
        """Compute the features of a batch."""
        return compute_rows(self._context, engine, batch)

    def begin_part(self, part: Part) -> _NewImagesPart:
        """Begin a part, whose batches follow."""
        return _NewImagesPart(part, self, self._context.specs)

    def commit(self, rows: _NewImagesPart) -> None:
        """Count the rows of a part; there is nothing to commit."""
        self.num_committed += len(rows.part)


@dataclass(frozen=True)
class _NewImagesPart:
    part: Part
    sink: NewImagesSink
    specs: Sequence[LayerSpec]

    def add(self, batch: Batch, rows: Rows) -> None:
        # As if stored and read back, so that results agree with those of the store's rows.
        values = {spec.name: from_raw(rows.features[spec.name], spec.dtype) for spec in self.specs}
        self.sink.keep(batch, values)
        self.sink.failures |= {failure.row: failure for failure in rows.failures}
