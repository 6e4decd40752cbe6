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
from featx.images.preprocess import Preprocess
from featx.models.base import (
    Backbone,
    is_weights_file,
    load_weights,
    random_id,
    read_weights,
    seeded,
)

_patch_lock = threading.Lock()


def build(config: ModelConfig, seed: int) -> Backbone:
    """A torchvision model by its registered name."""
    from torchvision import models

    name = config.name
    if name.startswith("quantized_"):
        raise ModelError(
            f"{name} is the float model built for quantisation; name the plain one: "
            f"{name.removeprefix('quantized_')}."
        )
    enum = models.get_model_weights(name)
    file = config.weights if config.weights and is_weights_file(config.weights) else None
    entry = _entry_of_file(enum, file) if file else _weights_entry(enum, name, config.weights)
    preset = (entry if entry is not None else _default(enum)).transforms()
    preprocess = preprocess_of(preset, name)
    if entry is not None:
        try:
            with seeded(seed), _own_downloads(name, file):
                module = models.get_model(name, weights=entry)
        except RuntimeError as error:  # load_state_dict's, by the builder
            reason = " ".join(str(error).split())[:300]
            raise WeightsError(f"{file or entry} is not of this model: {reason}") from error
        weights = file or str(entry)
    else:
        module = untrained(config, seed)
        weights = random_id(seed)
        if file is not None:
            load_weights(module, read_weights(Path(file)), file)
            weights = file
    return Backbone(
        module=module,
        name=f"torchvision/{name}",
        weights=weights,
        preprocess=preprocess,
        num_prefix_tokens=1 if name.startswith("vit_") else 0,
        classifier=classifier_of(module),
        classes=tuple(entry.meta.get("categories", ())) if entry is not None else (),
        reentrant=True,
    )


def classifier_of(module: torch.nn.Module) -> str | None:
    """The last convolution of a segmentation model's main head; its auxiliary head runs later."""
    if getattr(module, "aux_classifier", None) is None:
        return None
    head = module.get_submodule("classifier")
    convolutions = [n for n, m in head.named_modules() if isinstance(m, torch.nn.Conv2d)]
    return f"classifier.{convolutions[-1]}"


def untrained(config: ModelConfig, seed: int) -> torch.nn.Module:
    """The same architecture as torchvision initialises it."""
    from torchvision import models

    with seeded(seed):
        return _without_weights(models, config.name)


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
    """The enum member that `model.weights` names, or None for random weights."""
    if weights is None:
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


def _entry_of_file(enum: Any, file: str) -> Any:
    """The enum member whose download a local file is, by its name (it carries a hash), or None.

    Such a file gets the preprocessing of its own weights, which DEFAULT's may not be, and a builder
    that knows of it: googlenet and inception_v3 rescale their input for torchvision's weights only.
    """
    name = Path(file).name
    return next((entry for entry in enum if Path(urlparse(entry.url).path).name == name), None)


@contextlib.contextmanager
def _own_downloads(name: str, file: str | None) -> Iterator[None]:
    """While a builder runs, weights come through `fetch_weights`, or from a local file.

    torchvision's own loader unpickles whatever the file holds (weights_only=False) and reports a
    missing network as a bare URLError. To be removed when torchvision loads tensors only.
    """
    from torchvision.models import _api

    def fetch(url: str, *args: Any, **keywords: Any) -> Mapping[str, torch.Tensor]:
        return read_weights(Path(file)) if file else fetch_weights(url, name)

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
        found = re.search(r"-([0-9a-f]{8,})\.", file_name)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(cached), found.group(1) if found else None)
        except (OSError, RuntimeError) as error:
            raise WeightsError(
                f"the weights {file_name} of {name} are not here and cannot be downloaded "
                f"({error}). Looked in {cached} and at {url}. Two ways on: put the file there on "
                "a machine with internet access, or give model.weights=PATH to a local "
                ".safetensors or .pth (model.weights=null runs with random weights)."
            ) from error
    return read_weights(cached)
