"""Features of new images by the model, layers and transform of a store.

found = featx.embed(["new/1.jpg", pillow_image, array], store="runs/photos")
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.new_images import (
    ExtractionRecipe,
    LoadedFunction,
    LoadedModel,
    NewImagesSink,
    config_with_factory,
    list_given_images,
)
from featx.config import Config, DataConfig
from featx.errors import StoreError
from featx.models import copy_model
from featx.pipeline import RunContext, run_parts
from featx.store import FeatureStore, manifest_of, matching_layers, open_if_path
from featx.types import Array, Batch, Failure


@dataclass(frozen=True, eq=False)
class Embedding:
    """Features of n new images, in their order; `len` is n, `in` and iteration are over the layers.

    Attributes:
        features: layer -> (n, ...) array with the shape and dtype of the store's rows; NaN for an
            image that failed.
        ok: (n,) bool, whether an image has features.
        failures: images that failed, in ascending order, as `FeatureStore.failures`: row (place of
            the image), status, error and message of each.
    """

    features: Mapping[str, Array]
    ok: npt.NDArray[np.bool_]
    failures: list[dict[str, Any]]

    def __repr__(self) -> str:
        return (
            f"Embedding({len(self.ok)} images, {len(self.failures)} failed, layers: "
            f"{', '.join(self.features)})"
        )

    def __getitem__(self, layer: str) -> Array:
        return self.features[layer]

    def __contains__(self, layer: object) -> bool:
        return layer in self.features

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.ok)


def embed(
    images: Sequence[object],
    store: FeatureStore | str | os.PathLike[str],
    layers: Sequence[str] | str | None = None,
    device: str = "auto",
    model_factory: object = None,
) -> Embedding:
    """Compute the features that a store would hold for some images.

        found = featx.embed(["new/1.jpg"], store="runs/photos")
        found["avgpool"]    # (1, 2048), to be compared with featx.open("runs/photos")["avgpool"]

    The model is built as for the store: same weights (their SHA-256 is compared), preprocessing,
    precision, batch size and reduction. Nothing is written.

    Args:
        images: paths of image files, Pillow images, arrays (H, W), (H, W, 1|3|4) or (1|3, H, W)
            uint8, arrays of the numbers and channels that a store with model.transform.scale takes,
            or encoded bytes: a list, a column of a table or an array of paths, or an array of
            images (N, H, W, C) or (N, C, H, W). A Pillow image or an array is taken with the pixels
            it has; a file is decoded as those of the store, so its row has the same bits as one of
            the store on the same machine, batch size and number of threads.
        store: open store or its path.
        layers: names or globs; None for all layers.
        model_factory: for a store of model=custom, the 'package.module:factory' of its model, or
            the module or function that `featx.extract(model=...)` took. It must be given because
            featx imports no code that only a file names.

    Returns:
        The features, one row per image. An image that cannot be read or decoded has a failure.

    Raises:
        FeatxError: the store does not say how it was made, its model is not available as it was, or
            a layer holds tokens that were chosen by key (reduce=sample).
    """
    config = config_with_factory(device, model_factory)
    with Embedder(config, store, layers, pads=True, model_factory=model_factory) as model:
        return model(images)


def embedder(
    store: FeatureStore | str | os.PathLike[str],
    layers: Sequence[str] | str | None = None,
    device: str = "auto",
    model_factory: object = None,
) -> Embedder:
    """Return a function that computes features as `embed` does and loads the model once.

        with featx.embedder("runs/photos") as embed:
            embed(["new/1.jpg"])["avgpool"]    # the first call loads the model

    A batch holds the images of a call and is not filled up to the size of the store's, so that one
    image is fast; values differ from those of the store by rounding. For the same bits use `embed`.
    Arguments and errors are those of `embed`. A module that is given is copied, and may be trained
    or changed while the embedder is open.
    """
    config = config_with_factory(device, model_factory)
    return Embedder(config, store, layers, pads=False, model_factory=copy_model(model_factory))


class Embedder(LoadedFunction):
    """Features of new images by models that stay loaded; made by `embedder`.

    The config says the device and, for custom models, the model.
    """

    def __init__(
        self,
        config: Config,
        store: FeatureStore | str | os.PathLike[str],
        layers: Sequence[str] | str | None,
        pads: bool,
        model_factory: object = None,
    ) -> None:
        store = open_if_path(store)
        manifest = manifest_of(store)
        if manifest is None:
            raise StoreError(
                f"{store.root} does not say how its features were extracted: there is no "
                "featx.json of it. Give the folder that job=extract made."
            )
        self._layers = matching_layers(store, layers)
        for name in self._layers:
            if store[name].attrs.get("reduce") == "sample":
                raise StoreError(
                    f"{store.root}: the tokens of {name} were chosen by the key of each row "
                    "(reduce=sample). A new image has no key, so they would be other tokens than "
                    "those of a row. Name other layers, or extract the images to a store of their "
                    "own."
                )
        models: list[LoadedModel] = []
        for run in manifest.runs:
            if names := [name for name in self._layers if manifest.first_run_with(name) is run]:
                recipe = ExtractionRecipe.of_run(str(store.root), run, names)
                run_config = recipe.config_for(config, DataConfig())
                # A given module has the captures of one run at a time.
                factory = copy_model(model_factory) if models else model_factory
                models.append(LoadedModel(recipe, run_config, pads, factory))
        super().__init__(models)

    def __call__(self, images: Sequence[object]) -> Embedding:
        items = list_given_images(images)
        features: dict[str, Array] = {}
        failures: dict[int, Failure] = {}
        for model in self.models:
            with model.run(items) as context:
                sink = _EmbeddingSink(context)
                run_parts(context, sink)
            features |= sink.features
            failures |= sink.failures
        ok = np.ones(len(items), bool)
        ok[list(failures)] = False
        for values in features.values():
            values[~ok] = np.nan
        found = {name: features[name] for name in self._layers}
        listed = [
            {
                "row": row,
                "status": failure.status.label,
                "error": failure.error,
                "message": failure.message,
            }
            for row, failure in sorted(failures.items())
        ]
        return Embedding(found, ok, listed)


class _EmbeddingSink(NewImagesSink):
    """Batch sink that keeps the features."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.features: dict[str, Array] = {}

    def keep(self, batch: Batch, features: Mapping[str, Array]) -> None:
        for name, values in features.items():
            if name not in self.features:
                shape = (self.num_rows, *values.shape[1:])
                self.features[name] = np.full(shape, np.nan, values.dtype)
            self.features[name][batch.start : batch.start + batch.count] = values[: batch.count]
