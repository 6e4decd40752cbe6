"""Prediction with a probe's head on new images, by the model, layer and transform of its store.

rows = featx.predict("runs/photos/probe/avgpool.safetensors", images="new/")
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.analysis.engine_specs import FEATURES, engine_spec
from featx.analysis.probe.heads import Head, read_head
from featx.analysis.probe.labelled_rows import as_vectors
from featx.analysis.reproducibility import refuse_unnamed_code, request_of
from featx.config import (
    Config,
    DataConfig,
    ModelConfig,
    from_saved,
    in_this_process,
    model_choice,
    model_options,
    with_statistics_at,
)
from featx.errors import ConfigError, DataError, StoreError, StoreMismatchError
from featx.pipeline import (
    PART_SECONDS,
    Rows,
    RunContext,
    RunMetrics,
    build_run_context,
    compute_rows,
    list_images,
    run_parts,
)
from featx.sources import FolderOptions, FolderSource
from featx.store import PART_BYTES, Grid, from_raw, layout
from featx.types import Batch, Failure, LayerSpec, Listing, Part, ResumeState, Source

if TYPE_CHECKING:
    from featx.engine import Engine
    from featx.layers import ChosenLayers


@dataclass(frozen=True)
class Prediction:
    """Prediction for one image.

    Attributes:
        key: key of the image as listed; for single files, the path.
        label: name of the most likely class, or None if the image failed.
        probability: probability of that class in [0, 1]; None if the image failed or the head has
            no probabilities (ridge).
        status: 'ok', or the kind of failure.
        reason: message of the failure, or ''.
    """

    key: str
    label: str | None
    probability: float | None
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Predictions:
    """Predictions for several images, in their order.

    Attributes:
        rows: one `Prediction` per image.
        scores: (n, C) float32; NaN for an image that failed.
        classes: C class names.
        layer: layer of the head.
        accuracy: accuracy of the head on the test rows of its probe, or on the labelled rows of the
            store for a zero-shot head, in [0, 1]; NaN if it is not known.
        figures: measurements of the run.
    """

    rows: list[Prediction]
    scores: npt.NDArray[np.float32]
    classes: tuple[str, ...]
    layer: str
    accuracy: float
    figures: RunMetrics

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def predict(
    head: str | os.PathLike[str],
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    device: str = "auto",
    model_factory: str | None = None,
) -> Predictions:
    """Classify images with a head of job=probe or job=zeroshot.

    Args:
        head: .safetensors file that one of them wrote.
        images: a folder, or a list of image files.
        device: as the option `device`.
        model_factory: for a head on model=custom, the 'package.module:factory' of its model. It
            must be given because featx imports no code that only a file names.

    Returns:
        One row per image, in the given order; for a folder, in the order of its keys. An image that
        cannot be read is a row with a reason.

    Raises:
        FeatxError: the head, its model or the images are not available.
    """
    single = isinstance(images, str | os.PathLike)
    files = None if single else [Path(image).absolute() for image in images]  # type: ignore[union-attr]
    root = str(images) if single else "/"
    config = Config(
        model=ModelConfig()
        if model_factory is None
        else model_options(**model_choice("custom"), factory=model_factory),
        data=FolderOptions(root=root),
        device=device,
    )
    return run_prediction(config, Path(head), files)


def run_prediction(config: Config, path: Path, files: Sequence[Path] | None = None) -> Predictions:
    """Classify the images of `config.data` with the head in `path`.

    Args:
        config: config of which the data, device, seed and, for custom models, the model are used.
        path: file of the head.
        files: image files to classify instead of a whole folder.

    Raises:
        FeatxError: as for `predict`.
    """
    import torch

    from featx.base import choose_device

    head, about = read_head(path.expanduser(), choose_device(config.device))
    spec = _spec_of(path, about)
    again = _as_extracted(config, path, about, spec)
    target = _PredictionTarget(again, spec.dtype, about["resolved"], files)
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(build_run_context(again, "", FEATURES, target))
        _refuse_another_model(path, about, spec, context)
        work = _PredictionSink(context, head, about)
        with torch.no_grad():
            figures = run_parts(context, work, work)
    keys = [os.fsdecode(key) for key in context.listing.keys.tolist()]
    order: Sequence[int] = range(len(keys))
    if files is not None:
        place = {key: i for i, key in enumerate(keys)}
        order = [place[_key_of(file)] for file in files]
        keys = [f"/{key}" for key in keys]
    classes = tuple(about["classes"])
    rows = [work.row(i, keys[i], classes) for i in order]
    scores = work.scores[list(order)]
    accuracy = float("nan") if about["accuracy"] is None else float(about["accuracy"])
    return Predictions(rows, scores, classes, str(about["dataset"]), accuracy, figures)


def _spec_of(path: Path, about: dict[str, Any]) -> LayerSpec:
    """Return the description of the dataset that the head was fitted on.

    Raises:
        StoreError: the head does not contain it.
    """
    if about.get("spec") is None or about.get("config") is None:
        raise StoreError(
            f"{path} does not say how its features were extracted: the store it was fitted on had "
            "no featx.json. Probe the folder that job=extract made."
        )
    return LayerSpec(**{**about["spec"], "shape": tuple(about["spec"]["shape"])})


def _as_extracted(config: Config, path: Path, about: dict[str, Any], spec: LayerSpec) -> Config:
    """Return the config of the run that extracted the head's layer, with other images.

    Raises:
        ConfigError: the run needs code that the command does not name, or read images in another
            way.
    """
    before = with_statistics_at(from_saved(about["config"]), config.reduce.statistics_path)
    if not engine_spec(before.job.name).captures_layers:
        raise ConfigError(f"{path} was fitted on heat maps; job=predict does features only.")
    refuse_unnamed_code(config, before, str(path))
    return replace(
        in_this_process(before),
        job=replace(before.job, name="extract", json=False, show="shapes"),
        data=_data_options(config.data, before.data),
        device=config.device,
        layers={spec.name: request_of(spec, before)},
        capture="output",  # the name of the dataset includes the capture
        precision=about["resolved"].get("precision", before.precision),
        # The CPU decoders agree closely with the GPU decoder. This machine may have no GPU, and
        # images are few.
        decode="fast" if before.decode == "gpu" else before.decode,
        max_failures=config.max_failures,
        nonfinite="record",
    )


def _data_options(now: DataConfig, before: DataConfig) -> DataConfig:
    """Return the options of the group `data` for the new images, read as those of the store.

    Raises:
        ConfigError: the command asks for another way.
    """
    policy = {key: getattr(before, key) for key in ("exif", "background", "max_pixels")}
    for key, value in policy.items():
        given = getattr(now, key)
        if given not in (value, getattr(DataConfig(), key)):
            raise ConfigError(
                f"data.{key}={given}: the images of the store were read with {value}, and new ones "
                "are read in the same way."
            )
    return replace(now, **policy)


def _refuse_another_model(
    path: Path, about: dict[str, Any], spec: LayerSpec, context: RunContext
) -> None:
    """Check that weights, transform and layer are those of the head.

    Raises:
        StoreMismatchError: they are not.
    """
    header, made = context.header, context.specs[0]
    pairs = {
        "weights_sha256": (about["weights_sha256"], header.weights_sha256),
        "transform": (about["transform"], header.transform),
        "layer": (spec.layer, made.layer),
        "capture": (spec.capture, made.capture),
        "reduce": ((spec.reduce, dict(spec.reduce_args)), (made.reduce, dict(made.reduce_args))),
        "shape": (spec.shape, made.shape),
    }
    changed = [
        f"  {key}: the head has {before!r}, now {now!r}"
        for key, (before, now) in pairs.items()
        if before != now
    ]
    if changed:
        raise StoreMismatchError(
            f"{path} does not fit what is extracted now:\n" + "\n".join(changed)
        )


def _key_of(file: Path) -> str:
    """Return the key of a file, relative to '/'."""
    return str(file).lstrip("/")


class _PredictionTarget:
    """Run target: features of one layer for a head, which are not stored.

    Args:
        config: config of the run.
        dtype: dtype of the store that the head was fitted on.
        resolved: `auto` values of that store.
        files: image files instead of a folder, or None.
    """

    def __init__(
        self,
        config: Config,
        dtype: str,
        resolved: dict[str, Any],
        files: Sequence[Path] | None,
    ) -> None:
        self.dtype = dtype
        self.settings: dict[str, Any] = {}
        self.folder: Path | None = None
        self._config = config
        self._resolved = resolved
        self._files = files

    def list_images(self) -> tuple[Source, Listing]:
        """Return the source and the listing.

        Raises:
            DataError: there are no images.
        """
        if self._files is None:
            return list_images(self._config)
        if not self._files:
            raise DataError("images is empty: give a folder or the paths of image files.")
        keys = sorted({os.fsencode(_key_of(file)) for file in self._files})
        labels = np.full(len(keys), -1, np.int64)
        return FolderSource(Path("/")), Listing(np.array(keys, dtype=np.bytes_), labels)

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """Return the layers to compute: all."""
        return chosen

    def resume_state(self, names: set[str]) -> ResumeState | None:
        """Return the settings of the store that the head was fitted on."""
        return ResumeState(self._resolved, None, "the head's store was")

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """Return the maximum number of rows and of seconds per part."""
        return PART_BYTES / max(1, specs[0].row_bytes), PART_SECONDS


class _PredictionSink:
    """Batch sink that applies the head to every batch and keeps the scores in memory.

    Args:
        context: the run.
        head: the head.
        about: description of the head from its file.

    Attributes:
        scores: (N, C) float32, NaN for an image that failed.
        seconds: always empty, as there are no stages in addition to those of every run.
        rows_done: number of rows in finished parts.
    """

    def __init__(self, context: RunContext, head: Head, about: dict[str, Any]) -> None:
        spec = context.specs[0]
        self.seconds: dict[str, float] = {}
        self.scores = np.full((len(context.listing), len(head.bias)), np.nan, np.float32)
        self.rows_done = 0
        self._context = context
        self._head = head
        self._spec = spec
        self._pooled = tuple(about["reduction"]["axes"]) or None
        self._failures: dict[int, Failure] = {}
        self._taken = 0

    @property
    def rows_asked(self) -> int:
        """Number of rows of the run."""
        return len(self._context.listing)

    @property
    def rows_failed(self) -> int:
        """Always 0: a limit of failures would end the run and lose the scores in memory."""
        return 0  # scores lie in memory: ending early would lose them

    def missing(self) -> list[Part]:
        """Return all parts of the run."""
        grid = Grid(self.rows_asked, self._context.part_rows)
        return [grid.part(index) for index in range(len(grid))]

    def compute(self, engine: Engine, batch: Batch) -> Rows:
        """Compute the features of a batch."""
        return compute_rows(self._context, engine, batch)

    def take(self, part: Part, batch: Batch, computed: Callable[[], Rows]) -> list[Failure]:
        """Score the rows of a batch, and return its failures."""
        import torch

        rows = computed()
        features, failures = rows.features, rows.failures
        # Converted as if stored and read back, because the head was fitted on values in the store's
        # dtype.
        stored = from_raw(features[self._spec.name], self._spec.dtype).astype(np.float32)
        width = self._head.weight.shape[1]
        x = as_vectors(torch.from_numpy(stored), self._pooled, width)
        scores = self._head.scores(x.to(self._head.weight.device)).numpy()
        failed = {failure.row: failure for failure in failures}
        for i in range(batch.count):
            if batch.start + i not in failed:
                self.scores[batch.start + i] = scores[i]
        self._failures |= failed
        self._taken += batch.count
        return failures

    def finish_part(self) -> Callable[[], None]:
        """Count the rows of the part; there is nothing to commit."""
        self.rows_done = self._taken
        return _nothing_to_commit

    def row(self, number: int, key: str, classes: Sequence[str]) -> Prediction:
        """Return the prediction for one row.

        Args:
            number: row of the listing.
            key: its key.
            classes: C class names.
        """
        failure = self._failures.get(number)
        if failure is not None:
            return Prediction(key, None, None, failure.status.label, failure.message)
        scores = self.scores[number]
        best = int(scores.argmax())
        probability = float(scores[best]) if self._head.probabilities else None
        return Prediction(key, classes[best], probability, "ok")


def _nothing_to_commit() -> None:
    """Do nothing, since scores are only kept in memory."""


def head_of_store(store: Path, layer: str | None) -> Path:
    """Return the file of a layer's head in a store.

    Args:
        store: path of the store.
        layer: name of the layer, or None for the best layer of the probe.

    Raises:
        StoreError: the store was not probed, or the layer has no head.
    """
    import json

    from featx.store import FeatureStore

    opened = FeatureStore(store)
    folder = opened.root if opened.root.is_dir() else opened.root.parent
    path = folder / layout.PROBE
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        layer = result["layer"] if layer is None else layer
        head = result["layers"].get(layer, {}).get("head")
        known = [name for name, about in result["layers"].items() if about.get("head")]
    except FileNotFoundError as error:
        zeroshot = sorted((folder / layout.ZEROSHOT_HEADS).glob("*.safetensors"))
        other = f" For its zero-shot head give store={zeroshot[0]}." if zeroshot else ""
        raise StoreError(
            f"{folder} has no probe.json: python -m featx job=probe store={store} makes it.{other}"
        ) from error
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise StoreError(f"{path} cannot be read: {error}. job=probe writes it again.") from error
    if head is None:
        raise StoreError(
            f"{path} has no head of {layer}; it has {', '.join(known) or 'none'}. Heads are made "
            "by probe.method=linear or ridge, for classes."
        )
    return folder / str(head["file"])
