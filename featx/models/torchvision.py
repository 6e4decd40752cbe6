"""Backbones of torchvision, with its weights enums and their transforms."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF
from torchvision.transforms._presets import ImageClassification, SemanticSegmentation

from featx.config import ModelConfig
from featx.errors import ModelError, WeightsError
from featx.models.base import (
    Backbone,
    is_weights_file,
    load_weights,
    random_id,
    read_weights,
    seeded,
)
from featx.preprocess import Preprocess

_patch_lock = threading.Lock()


def build(config: ModelConfig, seed: int) -> Backbone:
    """A torchvision model by its registered name."""
    from torchvision import models

    name = config.name
    enum = models.get_model_weights(name)
    entry = _weights_entry(enum, name, config.weights)
    if entry is not None:
        with _own_downloads(name):
            module = models.get_model(name, weights=entry)
        weights = str(entry)
    else:
        with seeded(seed):
            module = _without_weights(models, name)
        weights = random_id(seed)
        if config.weights is not None and is_weights_file(config.weights):
            load_weights(module, read_weights(Path(config.weights)), config.weights)
            weights = config.weights
    preset = (entry if entry is not None else _default(enum)).transforms()
    return Backbone(
        module=module,
        name=f"torchvision/{name}",
        weights=weights,
        preprocess=preprocess_of(preset, name),
        num_prefix_tokens=1 if name.startswith("vit_") else 0,
    )


def preprocess_of(preset: Any, name: str) -> Preprocess:
    """The Preprocess of a weights' transform.

    Raises:
        ModelError: the model takes something other than a batch of single images.
    """
    if isinstance(preset, ImageClassification):
        crop, resize = preset.crop_size[0], preset.resize_size[0]
        reference = preset
    elif isinstance(preset, SemanticSegmentation):
        # Its preset keeps the picture's own proportions; a batch needs one size, so we crop.
        crop = resize = preset.resize_size[0]
        reference = _square(preset, crop)
    else:
        raise ModelError(
            f"{name} takes no batch of single images (its transform is "
            f"{type(preset).__name__}). Name the classification model it is built on, such as "
            "resnet50."
        )
    interpolation = {
        InterpolationMode.BILINEAR: "bilinear",
        InterpolationMode.BICUBIC: "bicubic",
    }.get(preset.interpolation, "other")
    return Preprocess(
        reference=reference,
        crop=(crop, crop),
        resize=resize,
        interpolation=interpolation,
        mean=tuple(preset.mean),
        std=tuple(preset.std),
    )


def _square(preset: Any, side: int) -> Any:
    def reference(image: Image.Image) -> torch.Tensor:
        x: torch.Tensor = TF.center_crop(preset(image), [side, side])
        return x

    return reference


def _default(enum: Any) -> Any:
    if len(enum) == 0:
        raise ModelError("this model has no weights in torchvision, and so no preprocessing.")
    return enum.DEFAULT


def _without_weights(models: Any, name: str) -> torch.nn.Module:
    builder = models.get_model_builder(name)
    keywords: dict[str, Any] = {"weights": None}
    if name.startswith(("googlenet", "inception")):
        keywords["init_weights"] = True  # what it does anyway, with a warning that it will not
    if "weights_backbone" in inspect.signature(builder).parameters:
        keywords["weights_backbone"] = None
    module: torch.nn.Module = builder(**keywords)
    return module


def _weights_entry(enum: Any, name: str, weights: str | None) -> Any:
    """The enum member that `model.weights` names, or None for random weights and files."""
    if weights is None or is_weights_file(weights):
        return None
    if weights == "default":
        return _default(enum)
    tag = weights.rsplit(".", 1)[-1]
    if tag not in enum.__members__:
        raise WeightsError(
            f"model.weights={weights}: torchvision has no such weights for {name}; it has "
            f"{', '.join(enum.__members__)}. A path (.safetensors, .pth) or null goes as well."
        )
    return enum[tag]


@contextlib.contextmanager
def _own_downloads(name: str) -> Iterator[None]:
    """While a builder runs, weights come through `fetch_weights`.

    torchvision's own loader unpickles whatever the file holds (weights_only=False) and reports a
    missing network as a bare URLError. To be removed when torchvision loads tensors only.
    """
    from torchvision.models import _api

    def fetch(url: str, *args: Any, **keywords: Any) -> Mapping[str, torch.Tensor]:
        return fetch_weights(url, name)

    with _patch_lock:
        before = _api.load_state_dict_from_url
        _api.load_state_dict_from_url = fetch
        try:
            yield
        finally:
            _api.load_state_dict_from_url = before


def fetch_weights(url: str, name: str) -> Mapping[str, torch.Tensor]:
    """The state dict behind a torchvision URL, from PyTorch's cache or from the network.

    Raises:
        WeightsError: it cannot be downloaded, or the file's hash is not the one in its name.
    """
    file_name = Path(urlparse(url).path).name
    cached = Path(torch.hub.get_dir()) / "checkpoints" / file_name
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        found = re.search(r"-([0-9a-f]{8,})\.", file_name)
        try:
            torch.hub.download_url_to_file(url, str(cached), found.group(1) if found else None)
        except (OSError, RuntimeError) as error:
            raise WeightsError(
                f"the weights {file_name} of {name} are not here and cannot be downloaded "
                f"({error}). Looked in {cached} and at {url}. Two ways on: put the file there on "
                "a machine with internet access, or give model.weights=PATH to a local "
                ".safetensors or .pth (model.weights=null runs with random weights)."
            ) from error
    return read_weights(cached)
