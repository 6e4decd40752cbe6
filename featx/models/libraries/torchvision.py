"""model=torchvision: backbones of torchvision, with its weight enums and their transforms."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from featx.config import LibraryModelConfig
from featx.errors import ConfigError, FeatxError, ModelError, WeightsError
from featx.models.libraries.registry import LIBRARIES, library_member
from featx.models.model_names import registered_names

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from featx.images import Preprocess
    from featx.models.base import Backbone

_REFUSED_ARGS = {
    "weights": "name the weights in model.weights",
    "weights_backbone": "name the weights in model.weights",
    "progress": "it changes no values",
    "image_size": "model.input_size sets the size of the model and of its images together",
    "input_size": "model.input_size sets the size of the model and of its images together",
}
"""Arguments of torchvision's builders -> what to do instead."""

_patch_lock = threading.Lock()
"""Protects the function of torchvision that `_own_downloads` replaces."""


@dataclass
class TorchvisionOptions(LibraryModelConfig):
    """Options of model=torchvision."""

    name: str = ""
    library: str = "torchvision"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_args(_REFUSED_ARGS)
        if self.input_size is not None and self.input_size[0] != self.input_size[1]:
            raise ConfigError(
                f"model.input_size={self.input_size}: the transforms of torchvision crop squares."
            )


def build(config: TorchvisionOptions, seed: int) -> Backbone:
    """Build a torchvision model by its registered name.

    Args:
        config: name and weights.
        seed: seed of random weights.

    Raises:
        ModelError: the model takes no batch of single images, or is a quantised variant.
        WeightsError: the weights do not exist, or cannot be downloaded, read or loaded.
    """
    from torchvision import models

    from featx.models.base import Backbone, random_id, seeded
    from featx.models.checkpoint import is_weights_file, load_weights, read_weights
    from featx.models.preprocessing import changed_preprocess

    name = config.name
    if name.startswith("quantized_"):
        raise ModelError(
            f"{name} is the float model built for quantisation; name the plain one: "
            f"{name.removeprefix('quantized_')}."
        )
    enum = models.get_model_weights(name)
    file = config.weights if config.weights and is_weights_file(config.weights) else None
    if config.checkpoint.prefix is not None and (not file or _entry_of_file(enum, file)):
        raise ConfigError(
            "model.checkpoint.prefix has an effect with a file of your own in model.weights only."
        )
    entry = _entry_of_file(enum, file) if file else _weights_entry(enum, name, config.weights)
    preset = (entry if entry is not None else _default(enum)).transforms()
    side = None if config.input_size is None else config.input_size[0]
    preset = preset if side is None else _resized(preset, side)
    preprocess = changed_preprocess(preprocess_of(preset, name), config.transform)
    if entry is not None:
        try:
            with seeded(seed), _own_downloads(name, file), _refused_args(config):
                module = models.get_model(name, weights=entry, **_all_args(config))
        except RuntimeError as error:  # from load_state_dict in the builder
            reason = " ".join(str(error).split())[:300]
            raise WeightsError(f"{file or entry} does not fit this model: {reason}") from error
        weights = file or str(entry)
    else:
        module = untrained(config, seed)
        weights = random_id(seed)
        if file is not None:
            load_weights(module, read_weights(Path(file)), file, config.checkpoint.prefix)
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
        args=dict(config.args),
    )


def _all_args(config: TorchvisionOptions) -> dict[str, Any]:
    """Return model.args with the input size, for the builders that are told it."""
    side = None if config.input_size is None else config.input_size[0]
    if side is not None and config.name.startswith("vit_"):
        return {**config.args, "image_size": side}
    if side is not None and config.name.startswith("maxvit"):
        return {**config.args, "input_size": (side, side)}
    return dict(config.args)


@contextlib.contextmanager
def _refused_args(config: TorchvisionOptions) -> Iterator[None]:
    """Turn the errors of a builder about its arguments into a ModelError."""
    try:
        yield
    except FeatxError:  # about the weights; some are a ValueError as well
        raise
    except (TypeError, ValueError, AssertionError) as error:
        raise ModelError(
            f"torchvision cannot build {config.name} with model.args={config.args} and "
            f"model.input_size={config.input_size}: {error}."
        ) from error


def _resized(preset: Any, side: int) -> Any:
    """Return the transform of some weights for images of another size.

    Args:
        preset: transform from a weights enum; another one than those of classification and
            segmentation is returned as it is.
        side: height and width of the images in pixels; the share of the centre stays the same.
    """
    from torchvision.transforms._presets import ImageClassification, SemanticSegmentation

    known: dict[str, Any] = {
        "mean": tuple(getattr(preset, "mean", ())),
        "std": tuple(getattr(preset, "std", ())),
        "interpolation": getattr(preset, "interpolation", None),
        "antialias": getattr(preset, "antialias", None),
    }
    if isinstance(preset, ImageClassification):
        resize = round(preset.resize_size[0] * side / preset.crop_size[0])
        return ImageClassification(crop_size=side, resize_size=resize, **known)
    if isinstance(preset, SemanticSegmentation):
        return SemanticSegmentation(resize_size=side, **known)
    return preset


def classifier_of(module: torch.nn.Module) -> str | None:
    """Name of the classifier if it is not the last linear layer, otherwise None.

    In a segmentation model it is the last convolution of the main head; the auxiliary head runs
    later.
    """
    import torch

    if getattr(module, "aux_classifier", None) is None:
        return None
    head = module.get_submodule("classifier")
    convolutions = [n for n, m in head.named_modules() if isinstance(m, torch.nn.Conv2d)]
    return f"classifier.{convolutions[-1]}"


def untrained(config: TorchvisionOptions, seed: int) -> torch.nn.Module:
    """The architecture with torchvision's initialisation."""
    from torchvision import models

    from featx.models.base import seeded

    with seeded(seed), _refused_args(config):
        return _without_weights(models, config.name, _all_args(config))


def preprocess_of(preset: Any, name: str) -> Preprocess:
    """The Preprocess of the transform of some weights.

    Args:
        preset: transform from a weights enum.
        name: name of the model, for the message.

    Raises:
        ModelError: the model takes no batch of single images.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms._presets import ImageClassification, SemanticSegmentation

    from featx.images import Preprocess

    if isinstance(preset, ImageClassification):
        crop, resize = preset.crop_size[0], preset.resize_size[0]
        reference = preset
    elif isinstance(preset, SemanticSegmentation):
        # The transform keeps the proportions of each image. A batch needs one size, so the centre
        # is cropped to a square.
        crop = resize = preset.resize_size[0]
        reference = _square(preset, crop)
    else:
        raise ModelError(
            f"{name} takes no batch of single images (its transform is "
            f"{type(preset).__name__}). Choose the classification model that it is built on, "
            "such as resnet50."
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
    """A segmentation transform followed by a square centre crop."""
    from torchvision.transforms import functional as TF

    def reference(image: Image.Image) -> torch.Tensor:
        x: torch.Tensor = TF.center_crop(preset(image), [side, side])
        return x

    return reference


def _default(enum: Any) -> Any:
    """The default weights of an enum.

    Raises:
        ModelError: the model has no weights and so no preprocessing.
    """
    if len(enum) == 0:
        raise ModelError("this model has no weights in torchvision, and so no preprocessing.")
    return enum.DEFAULT


def _without_weights(models: Any, name: str, args: Mapping[str, Any]) -> torch.nn.Module:
    """The model with random weights, also for its backbone."""
    builder = models.get_model_builder(name)
    keywords: dict[str, Any] = {**args, "weights": None}
    if name.startswith(("googlenet", "inception")):
        keywords["init_weights"] = True  # the default, without its deprecation warning
    if "weights_backbone" in inspect.signature(builder).parameters:
        keywords["weights_backbone"] = None
    module: torch.nn.Module = builder(**keywords)
    return module


def _weights_entry(enum: Any, name: str, weights: str | None) -> Any:
    """The enum member that `model.weights` names, or None for random weights.

    Raises:
        WeightsError: there is no such member; the message lists them.
    """
    if weights is None:
        return None
    if weights == "default":
        return _default(enum)
    tag = weights.rsplit(".", 1)[-1]
    if tag not in enum.__members__:
        raise WeightsError(
            f"model.weights={weights}: torchvision has no such weights for {name}; it has "
            f"{', '.join(enum.__members__)}. A path (.safetensors, .pth) and null are valid too."
        )
    return enum[tag]


def _entry_of_file(enum: Any, file: str) -> Any:
    """The enum member to whose download a local file belongs, or None.

    The file is recognised by its name, which contains a hash. It then gets the preprocessing of its
    own weights, which may differ from that of DEFAULT, and a builder that knows them: googlenet and
    inception_v3 rescale their input for torchvision's weights only.
    """
    name = Path(file).name
    return next((entry for entry in enum if Path(urlparse(entry.url).path).name == name), None)


@contextlib.contextmanager
def _own_downloads(name: str, file: str | None) -> Iterator[None]:
    """Let a builder of torchvision load weights by `fetch_weights` or from a local file.

    torchvision's loader unpickles arbitrary objects (weights_only=False) and reports a missing
    network as URLError only. This can be removed when torchvision loads tensors only.

    Args:
        name: name of the model, for messages.
        file: path of a local file, or None to download.
    """
    from torchvision.models import _api

    from featx.models.checkpoint import read_weights

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
    """Read the state dict of a torchvision URL from PyTorch's cache, or download it.

    Args:
        url: URL of the weights.
        name: name of the model, for the message.

    Raises:
        WeightsError: the download fails, or the file does not have the hash in its name.
    """
    import torch

    from featx.models.checkpoint import read_weights

    file_name = Path(urlparse(url).path).name
    cached = Path(torch.hub.get_dir()) / "checkpoints" / file_name
    if not cached.exists():
        found = re.search(r"-([0-9a-f]{8,})\.", file_name)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(cached), found.group(1) if found else None)
        except (OSError, RuntimeError) as error:
            raise WeightsError(
                f"the weights {file_name} of {name} are not on this machine and cannot be "
                f"downloaded ({error}). Looked in {cached} and at {url}. Either download the file "
                "on a machine with internet access and copy it to that path, or give "
                "model.weights=PATH to a local .safetensors or .pth (model.weights=null runs "
                "with random weights)."
            ) from error
    return read_weights(cached)


LIBRARIES.register(
    library_member(
        "torchvision",
        "Models of torchvision.",
        TorchvisionOptions,
        build=build,
        untrained=untrained,
        names=lambda: registered_names("torchvision"),
        auto_rank=1,
    )
)
