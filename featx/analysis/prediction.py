"""Prediction with a probe's head on new images, by the model, layer and transform of its store.

rows = featx.predict("runs/photos/probe/avgpool.safetensors", images="new/")
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.layer_vectors import as_vectors
from featx.analysis.new_images import (
    ExtractionRecipe,
    LoadedFunction,
    LoadedModel,
    NewImagesSink,
    config_with_factory,
    images_read_as,
    list_given_images,
)
from featx.analysis.probe.heads import Head, read_head
from featx.analysis.probe.metrics import CLASSIFICATION, LABEL_THRESHOLD, MULTILABEL, REGRESSION
from featx.base import check_memory, choose_device, command_text, log_message, name_text
from featx.config import Config, DataConfig
from featx.errors import StoreError, counted, first_names
from featx.models import copy_model
from featx.pipeline import RunContext, RunMetrics, run_parts
from featx.sources import FolderOptions, parent_key
from featx.storage import parse_path
from featx.store import FeatureStore, layout, read_result
from featx.types import Array, Batch, Json, LayerSpec


@dataclass(frozen=True)
class Prediction:
    """Prediction for one image.

    Attributes:
        key: key of the image as listed; of a list of images, its absolute path, or its number in
            the list if it is no path.
        label: name of the most likely class; None if the image failed, or for other heads.
        probability: probability of that class in [0, 1]; None without a class or if the head has
            no probabilities (ridge).
        status: 'ok', or the kind of failure.
        reason: message of the failure, or ''.
        labels: for a head of several labels, those with a probability of 0.5 or more.
        value: for a head of numbers, the number; None if the image failed or for other heads.
    """

    key: str
    label: str | None
    probability: float | None
    status: str
    reason: str = ""
    labels: tuple[str, ...] = ()
    value: float | None = None


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for several images, in their order; iteration and indices are over the rows.

    Attributes:
        rows: one `Prediction` per image.
        scores: (n, C) float32, of numbers float64; NaN for an image that failed.
        classes: C names of classes or labels, or that of the column of numbers.
        layer: layer of the head.
        accuracy: accuracy of the head on the test rows of its probe, or on the labelled rows of the
            store for a zero-shot head, in [0, 1]; NaN if it is not known or for other tasks.
        metrics: measurements of the run.
        task: 'classification', 'regression' or 'multilabel'.
    """

    rows: list[Prediction]
    scores: npt.NDArray[np.floating]
    classes: tuple[str, ...]
    layer: str
    accuracy: float
    metrics: RunMetrics
    task: str = CLASSIFICATION

    def __repr__(self) -> str:
        failed = sum(row.status != "ok" for row in self.rows)
        return (
            f"Predictions({counted(len(self), 'image')}, {failed} failed, {self.task} by "
            f"{self.layer}: {first_names(self.classes, 5)})"
        )

    def __getitem__(self, image: int) -> Prediction:
        return self.rows[image]

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def predict(
    head: str | os.PathLike[str],
    images: str | os.PathLike[str] | Sequence[object],
    device: str = "auto",
    model_factory: object = None,
) -> Predictions:
    """Predict classes, labels or numbers of images with a head of job=probe or job=zeroshot.

    Args:
        head: .safetensors file that one of them wrote, or a store: the head of the layer that its
            probe chose.
        images: a folder, or a list of images as `featx.embed` takes it.
        model_factory: for a head on model=custom, the 'package.module:factory' of its model, or
            the module or function that `featx.extract(model=...)` took. It must be given because
            featx imports no code that only a file names.

    Returns:
        One row per image, in the given order; for a folder, in the order of its keys. An image that
        cannot be read is a row with a reason.

    Raises:
        FeatxError: the head, its model or the images are not available.
    """
    config = config_with_factory(device, model_factory, data=FolderOptions(root="/"))
    with Predictor(
        config, parse_path(head, "head"), pads=True, model_factory=model_factory
    ) as model:
        return model(images)


def predictor(
    head: str | os.PathLike[str], device: str = "auto", model_factory: object = None
) -> Predictor:
    """Return a function that predicts as `predict` does and loads head and model once.

        with featx.predictor("runs/photos/probe/avgpool.safetensors") as predict:
            predict(["new/1.jpg"]).rows[0].label    # the first call loads the model

    A batch holds the images of a call and is not filled up to the size of the store's, so that one
    image is fast; scores differ from those of `predict` by rounding. Arguments and errors are those
    of `predict`. A module that is given is copied, and may be trained or changed while the
    predictor is open.
    """
    config = config_with_factory(device, model_factory, data=FolderOptions(root="/"))
    path, copy = parse_path(head, "head"), copy_model(model_factory)
    return Predictor(config, path, pads=False, model_factory=copy)


class Predictor(LoadedFunction):
    """Predictions by a head and a model that stay loaded; made by `predictor`.

    The config says the data, device, seed and, for custom models, the model.
    """

    def __init__(
        self, config: Config, path: Path, pads: bool, model_factory: object = None
    ) -> None:
        if path.is_dir() or path.suffix == ".h5":  # a store, or its features.h5
            path = head_of_store(path, None)
        self._head, self._about = read_head(path, choose_device(config.device))
        about = self._about
        if about.get("spec") is None or about.get("config") is None:
            raise StoreError(
                f"{path} does not say how its features were extracted: the store it was fitted on "
                "had no featx.json. Probe the folder that job=extract made."
            )
        spec = LayerSpec(**{**about["spec"], "shape": tuple(about["spec"]["shape"])})
        settings = about.get("model_settings", {})
        model_values = about["weights_sha256"], about["transform"], settings
        recipe = ExtractionRecipe(
            str(path), about["config"], (spec,), about["resolved"], *model_values
        )
        run_config = recipe.config_for(config, config.data)
        run_config = replace(run_config, max_failures=config.max_failures)
        self._data = config.data  # which a call with a folder completes
        super().__init__([LoadedModel(recipe, run_config, pads, model_factory)])

    def __call__(self, images: str | os.PathLike[str] | Sequence[object]) -> Predictions:
        if isinstance(images, str | os.PathLike):
            return self.predict(replace(self._data, root=os.fspath(images)))
        return self.predict(self._data, list_given_images(images))

    def predict(self, data: DataConfig, images: Sequence[object] | None = None) -> Predictions:
        """Predict for the images of a data set, or of a list. The scores of the views of an image
        (data.views, data.crops) are averaged.
        """
        head, about, (model,) = self._head, self._about, self.models
        data = images_read_as(data, model.config.data)
        with model.run(images, data) as context:
            sink = _PredictionSink(context, head, about)
            metrics = run_parts(context, sink)
        if images is not None:
            keys = [
                str(Path(image).absolute() if isinstance(image, str) else number)
                for number, image in enumerate(images)
            ]
        elif data.has_views:
            keys = [name_text(key) for key in sink.average_views(context.listing.keys.tolist())]
        else:
            keys = [name_text(key) for key in context.listing.keys.tolist()]
        classes = tuple(about["classes"])
        rows = [sink.row(i, key, classes) for i, key in enumerate(keys)]
        sink.scores[list(sink.failures)] = np.nan
        accuracy = float("nan") if about["accuracy"] is None else float(about["accuracy"])
        layer = str(about["dataset"])
        return Predictions(rows, sink.scores, classes, layer, accuracy, metrics, head.task)


class _PredictionSink(NewImagesSink):
    """Batch sink that applies the head to every batch and keeps the scores."""

    def __init__(self, context: RunContext, head: Head, about: Json) -> None:
        super().__init__(context)
        check_memory(
            4 * self.num_rows * len(head.bias),
            f"The scores of {self.num_rows} images and {len(head.bias)} classes",
            "Predict fewer images at a time.",
        )
        dtype = np.float64 if head.task == REGRESSION else np.float32
        self.scores = np.full((self.num_rows, len(head.bias)), np.nan, dtype)
        self._head = head
        self._layer = context.specs[0].name
        self._pooled = tuple(about["reduction"]["axes"]) or None

    def keep(self, batch: Batch, features: Mapping[str, Array]) -> None:
        stored = features[self._layer].astype(np.float32)
        x = as_vectors(torch.from_numpy(stored), self._pooled)
        scores = self._head.scores(x.to(self._head.weight.device)).numpy()
        self.scores[batch.start : batch.start + batch.count] = scores[: batch.count]

    def average_views(self, keys: Sequence[bytes]) -> list[bytes]:
        """Average the scores of the views of each image, which fails if one of its views does.
        Return the keys of the images, to which scores and failures now belong.
        """
        images, image_of_row = np.unique([parent_key(key) for key in keys], return_inverse=True)
        sums = np.zeros((len(images), self.scores.shape[1]))
        np.add.at(sums, image_of_row, self.scores)
        self.scores = (sums / np.bincount(image_of_row)[:, None]).astype(self.scores.dtype)
        self.failures = {int(image_of_row[row]): each for row, each in self.failures.items()}
        image_keys: list[bytes] = images.tolist()
        return image_keys

    def row(self, number: int, key: str, classes: Sequence[str]) -> Prediction:
        """Return the prediction for one row."""
        failure = self.failures.get(number)
        if failure is not None:
            return Prediction(key, None, None, failure.status.label, failure.message)
        scores = self.scores[number]
        if self._head.task == REGRESSION:
            return Prediction(key, None, None, "ok", value=float(scores[0]))
        if self._head.task == MULTILABEL:
            labels = tuple(classes[i] for i in np.flatnonzero(scores >= LABEL_THRESHOLD).tolist())
            return Prediction(key, None, None, "ok", labels=labels)
        best = int(scores.argmax())
        probability = float(scores[best]) if self._head.probabilities else None
        return Prediction(key, classes[best], probability, "ok")


def head_of_store(store: Path, layer: str | None) -> Path:
    """Return the file of a layer's head in a store; without a layer, of the best one of the probe.
    A probe of another state of the store is said. Raises StoreError if the store was not probed, or
    the layer has no head.
    """
    opened = FeatureStore(store)
    folder = opened.folder
    path = folder / layout.PROBE
    try:
        result = read_result(path)
        layer = result["layer"] if layer is None else layer
        head = result["layers"].get(layer, {}).get("head")
        layers_with_head = [name for name, about in result["layers"].items() if about.get("head")]
    except FileNotFoundError as error:
        zeroshot = sorted((folder / layout.ZEROSHOT_HEADS).glob("*.safetensors"))
        hint = f" For its zero-shot head give store={zeroshot[0]}." if zeroshot else ""
        command = command_text("job=probe", f"store={store}")
        raise StoreError(f"{folder} has no probe.json: {command} makes it.{hint}") from error
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise StoreError(f"{path} cannot be read: {error}. job=probe writes it again.") from error
    if head is None:
        reason = "Heads are made by probe.method=linear, ridge or attentive."
        if result.get("task") == "segmentation":
            reason = "Probes of probe.masks write none: their result is a class for each pixel."
        raise StoreError(
            f"{path} has no head of {layer}; it has {', '.join(layers_with_head) or 'none'}. "
            f"{reason}"
        )
    head_file = folder / str(head["file"])
    try:
        digest = hashlib.sha256(head_file.read_bytes()).hexdigest()
    except FileNotFoundError:
        return head_file  # read_head reports it
    if digest != str(head["sha256"]):
        raise StoreError(
            f"{head_file} is not the head that {path} names with its SHA-256: it is damaged or was "
            "replaced, or a probe was interrupted before it wrote probe.json. Run job=probe again."
        )
    if result.get("rows_sha256") != opened.rows_sha256:
        log_message(
            f"{path} belongs to another state of the store, whose rows have changed since. Its "
            "heads predict; job=probe fits them to the rows of now.",
            level="warning",
        )
    return head_file
