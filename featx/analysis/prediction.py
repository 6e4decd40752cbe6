"""A probe's head on new pictures: the model, layer and preprocessing that its store was made with.

rows = featx.predict("runs/photos/probe/avgpool.safetensors", images="new/")
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.analysis.engine_specs import FEATURES
from featx.analysis.probe.heads import Head, read_head
from featx.analysis.probe.labelled_rows import as_vectors
from featx.analysis.reproducibility import refuse_unnamed_code, request_of
from featx.config import DataConfig, ModelConfig
from featx.config.layer_requests import with_statistics_at
from featx.config.run_config import Config, in_this_process
from featx.config.saved_config import from_saved
from featx.errors import ConfigError, DataError, StoreError, StoreMismatchError
from featx.pipeline.feature_sink import Rows, compute_rows
from featx.pipeline.loop import run_parts
from featx.pipeline.run_context import RunContext, build_run_context
from featx.pipeline.run_metrics import RunMetrics
from featx.pipeline.run_target import PART_SECONDS, list_images
from featx.sources.base import FolderSource
from featx.store import layout
from featx.store.dtypes import from_raw
from featx.store.layout import PART_BYTES, Grid
from featx.types import Batch, Failure, LayerSpec, Listing, Part, ResumeState, Source

if TYPE_CHECKING:
    from featx.engine.engine import Engine
    from featx.layers.projection import ChosenLayers


@dataclass(frozen=True)
class Prediction:
    """What a head says of one picture.

    Attributes:
        key: of the picture, as it was listed; the path where single files were given.
        label: the name of the likeliest class; None where the picture failed.
        probability: of that class; None where it failed, or the head has none (ridge).
        status: 'ok', or why it failed.
        reason: the message of the failure.
    """

    key: str
    label: str | None
    probability: float | None
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Predictions:
    """What a head says of many pictures, in their order.

    Attributes:
        rows: one each.
        scores: (n, C) float32, NaN for a picture that failed.
        classes: C names.
        figures: what the run measured.
    """

    rows: list[Prediction]
    scores: npt.NDArray[np.float32]
    classes: tuple[str, ...]
    figures: RunMetrics

    def __iter__(self) -> Any:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def predict(
    head: str | os.PathLike[str],
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    device: str = "auto",
    model_target: str | None = None,
) -> Predictions:
    """Classify pictures with a head of job=probe.

    Args:
        head: the .safetensors file that job=probe made.
        images: a folder, or a list of image files.
        device: as the key `device`.
        model_target: of a head on model=custom, its package.module:factory: featx imports no code
            because a file names it.

    Returns:
        One row for each image, in the order given (of a folder: in the order of its keys). An
        image that cannot be read is a row with its reason.

    Raises:
        FeatxError: the head, its model or the images are not to be had.
    """
    single = isinstance(images, str | os.PathLike)
    files = None if single else [Path(image).absolute() for image in images]  # type: ignore[union-attr]
    root = str(images) if single else "/"
    config = Config(
        model=ModelConfig()
        if model_target is None
        else ModelConfig(name="custom", library="custom", target=model_target),
        data=DataConfig(name="folder", root=root),
        device=device,
    )
    return run_prediction(config, Path(head), files)


def run_prediction(config: Config, path: Path, files: Sequence[Path] | None = None) -> Predictions:
    """Classify the pictures of `config.data` with the head in `path`.

    Args:
        config: its data, device, seed and, for custom models, its model are taken.
        path: of the head.
        files: these files instead of the whole of a folder.

    Raises:
        FeatxError: as of `predict`.
    """
    import torch

    from featx.base.devices import choose_device

    head, about = read_head(path.expanduser(), choose_device(config.device))
    spec = _spec_of(path, about)
    again = _as_extracted(config, path, about, spec)
    purpose = _PredictionTarget(again, spec.dtype, about["resolved"], files)
    with contextlib.ExitStack() as stack:
        prepared = stack.enter_context(build_run_context(again, "", FEATURES, purpose))
        _refuse_another_model(path, about, spec, prepared)
        work = _PredictionSink(prepared, head, about)
        with torch.no_grad():
            figures = run_parts(prepared, work)
    keys = [os.fsdecode(key) for key in prepared.listing.keys.tolist()]
    order: Sequence[int] = range(len(keys))
    if files is not None:
        place = {key: i for i, key in enumerate(keys)}
        order = [place[_key_of(file)] for file in files]
        keys = [f"/{key}" for key in keys]
    classes = tuple(about["classes"])
    rows = [work.row(i, keys[i], classes) for i in order]
    return Predictions(rows, work.scores[list(order)], classes, figures)


def _spec_of(path: Path, about: dict[str, Any]) -> LayerSpec:
    """The dataset that the head was fitted on.

    Raises:
        StoreError: the head does not say how it was extracted.
    """
    if about.get("spec") is None or about.get("config") is None:
        raise StoreError(
            f"{path} does not say how its features were extracted: the store it was fitted on had "
            "no featx.json. Probe the folder that job=extract made."
        )
    return LayerSpec(**{**about["spec"], "shape": tuple(about["spec"]["shape"])})


def _as_extracted(config: Config, path: Path, about: dict[str, Any], spec: LayerSpec) -> Config:
    """The config of the run that made the head's layer, with other pictures.

    Raises:
        ConfigError: it needs code that the command does not name, or other image policies.
    """
    before = with_statistics_at(from_saved(about["config"]), config.reduce.stats)
    if before.job.name == "attribute":
        raise ConfigError(f"{path} was fitted on heat maps; job=predict does features only.")
    refuse_unnamed_code(config, before, str(path))
    return replace(
        in_this_process(before),
        job=replace(before.job, name="extract", json=False, show="shapes"),
        data=_pictures(config.data, before.data),
        device=config.device,
        layers={spec.name: request_of(spec, before)},
        capture="output",  # the dataset's name says what is captured
        precision=about["resolved"].get("precision", before.precision),
        # As near to each other as decoders are; here there may be no GPU, and pictures are few.
        decode="fast" if before.decode == "gpu" else before.decode,
        max_failures=config.max_failures,
        nonfinite="record",
    )


def _pictures(now: DataConfig, before: DataConfig) -> DataConfig:
    """Where the new pictures are; odd ones are treated as they were."""
    policy = {key: getattr(before, key) for key in ("exif", "background", "max_pixels")}
    for key, value in policy.items():
        given = getattr(now, key)
        if given not in (value, getattr(DataConfig(), key)):
            raise ConfigError(
                f"data.{key}={given}: the store's pictures were read with {value}, and new ones "
                "are read in the same way."
            )
    return replace(now, **policy)


def _refuse_another_model(
    path: Path, about: dict[str, Any], spec: LayerSpec, prepared: RunContext
) -> None:
    """Features of other weights, or of another layer, say nothing to the head."""
    header, made = prepared.header, prepared.specs[0]
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
    return str(file).lstrip("/")


class _PredictionTarget:
    """Features of one layer for a head; nothing is stored."""

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
        if self._files is None:
            return list_images(self._config)
        if not self._files:
            raise DataError("images is empty: give a folder or the paths of image files.")
        keys = sorted({os.fsencode(_key_of(file)) for file in self._files})
        labels = np.full(len(keys), -1, np.int64)
        return FolderSource(Path("/")), Listing(np.array(keys, dtype=np.bytes_), labels)

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        return chosen

    def begun(self, names: set[str]) -> ResumeState | None:
        return ResumeState(self._resolved, None, "the head's store was")

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        return PART_BYTES / max(1, specs[0].row_bytes), PART_SECONDS


class _PredictionSink:
    """The head on every batch; scores stay in memory.

    Attributes:
        scores: (N, C) float32, NaN where an image failed.
        seconds: there are no stages beside those of every run.
    """

    def __init__(self, prepared: RunContext, head: Head, about: dict[str, Any]) -> None:
        spec = prepared.specs[0]
        self.seconds: dict[str, float] = {}
        self.scores = np.full((len(prepared.listing), len(head.bias)), np.nan, np.float32)
        self.rows_done = 0
        self._prepared = prepared
        self._head = head
        self._spec = spec
        self._pooled = tuple(about["reduction"]["axes"]) or None
        self._failures: dict[int, Failure] = {}
        self._taken = 0

    @property
    def rows_asked(self) -> int:
        return len(self._prepared.listing)

    @property
    def rows_failed(self) -> int:
        return 0  # scores lie in memory: ending early would lose them

    def missing(self) -> list[Part]:
        grid = Grid(self.rows_asked, self._prepared.part_rows)
        return [grid.part(index) for index in range(len(grid))]

    def compute(self, engine: Engine, batch: Batch) -> Rows:
        return compute_rows(self._prepared, engine, batch)

    def take(self, part: Part, batch: Batch, computed: Callable[[], Rows]) -> list[Failure]:
        import torch

        rows = computed()
        features, failures = rows.features, rows.failures
        # As stored and read back: what the head was fitted on went through the store's dtype.
        stored = from_raw(features[self._spec.name], self._spec.dtype).astype(np.float32)
        width = self._head.weight.shape[1]
        x = as_vectors(torch.from_numpy(stored), self._pooled, width)
        scores = self._head.scores(x.to(self._head.weight.device)).cpu().numpy()
        failed = {failure.row: failure for failure in failures}
        for i in range(batch.count):
            if batch.start + i not in failed:
                self.scores[batch.start + i] = scores[i]
        self._failures |= failed
        self._taken += batch.count
        return failures

    def finish_part(self) -> Callable[[], None]:
        self.rows_done = self._taken
        return _nothing_to_commit

    def row(self, number: int, key: str, classes: Sequence[str]) -> Prediction:
        """What came of one image."""
        failure = self._failures.get(number)
        if failure is not None:
            return Prediction(key, None, None, failure.status.label, failure.message)
        scores = self.scores[number]
        best = int(scores.argmax())
        probability = float(scores[best]) if self._head.probabilities else None
        return Prediction(key, classes[best], probability, "ok")


def _nothing_to_commit() -> None:
    """Scores are kept in memory alone."""


def head_of_store(store: Path, layer: str | None) -> Path:
    """The head of a layer of a store, or of the best one.

    Raises:
        StoreError: the store was not probed, or this layer has no head.
    """
    import json

    from featx.store.reader import FeatureStore

    opened = FeatureStore(store)
    folder = opened.root if opened.root.is_dir() else opened.root.parent
    path = folder / layout.PROBE
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        layer = result["layer"] if layer is None else layer
        head = result["layers"].get(layer, {}).get("head")
        known = [name for name, about in result["layers"].items() if about.get("head")]
    except FileNotFoundError as error:
        raise StoreError(
            f"{folder} has no probe.json: python -m featx job=probe store={store} makes it."
        ) from error
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise StoreError(f"{path} cannot be read: {error}. job=probe makes it anew.") from error
    if head is None:
        raise StoreError(
            f"{path} has no head of {layer}; it has {', '.join(known) or 'none'}. Heads are made "
            "by probe.method=linear or ridge."
        )
    return folder / str(head["file"])
