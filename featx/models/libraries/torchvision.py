"""model=torchvision: backbones of torchvision, with its weight enums and their transforms."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from featx.config import LibraryModelConfig, check_weights_like, options
from featx.errors import ConfigError, FeatxError, ModelError, WeightsError, one_line
from featx.models.libraries.registry import LIBRARIES, ModelLibrary
from featx.models.timm_metadata import imagenet_classes

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torchvision.models import WeightsEnum

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

_IMAGENET_CLASSES = 1000
"""Classes of ImageNet; no other weights of torchvision have as many."""


@options("model")
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


class Torchvision(ModelLibrary[TorchvisionOptions]):
    """Models of torchvision."""

    def build(self, config: TorchvisionOptions, seed: int) -> Backbone:
        """Build a torchvision model by its registered name."""
        from torchvision import models

        from featx.models.base import Backbone, random_id
        from featx.models.preprocessing import change_preprocess

        name = config.name
        if name.startswith("quantized_"):
            raise ModelError(
                f"{name} is the float model built for quantisation; name the plain one: "
                f"{name.removeprefix('quantized_')}."
            )
        try:
            enum = models.get_model_weights(name)
        except ValueError as error:  # of another version than that of the catalogue
            raise ModelError(f"torchvision has no model {name!r} any more: {error}.") from error
        file = config.weights_file
        entry = _entry_of_file(enum, file) if file else _entry(enum, name, config.weights)
        has_own_file = file is not None and entry is None
        check_weights_like(config.weights_like, has_file=has_own_file)
        options = config.checkpoint
        if file is not None and entry is not None:
            options = replace(options, sha256=None)  # of a download too the checksum can be asked
        options.check_effect(has_file=has_own_file, is_converted=False)
        preset = (entry or _entry(enum, name, config.weights_like or "default")).transforms()
        if config.weights_like is not None and config.input_size is None:
            crop = getattr(preset, "crop_size", None)
            config = replace(config, input_size=None if crop is None else [crop[0], crop[0]])
        if config.input_size is not None:
            preset = _resize_preset(preset, config.input_size[0])
        preprocess = change_preprocess(preprocess_of(preset, name), config.transform)
        loading: Mapping[str, object] = {}
        missing: tuple[str, ...] = ()
        if entry is not None:
            module = _create_from_entry(entry, file, config, seed)
            weights = file or str(entry)
        elif file is not None:
            module, loading, missing = _create_from_file(file, config, seed)
            weights = file
        else:
            module, weights = self.untrained(config, seed), random_id(seed)
        classes = tuple(entry.meta.get("categories", ())) if entry is not None else ()
        is_imagenet = len(classes) == _IMAGENET_CLASSES
        return Backbone(
            module=module,
            name=f"torchvision/{name}",
            weights=weights,
            preprocess=preprocess,
            num_prefix_tokens=1 if name.startswith("vit_") else 0,
            classifier=missing[-1] if missing else classifier_of(module),
            classes=classes,
            class_ids=imagenet_classes("imagenet-1k")[1] if is_imagenet else (),
            reentrant=True,
            args=dict(config.args),
            checkpoint=loading,
            missing_heads=missing,
        )

    def untrained(self, config: TorchvisionOptions, seed: int) -> torch.nn.Module:
        """The architecture with torchvision's initialisation, with the classes of a file."""
        from torchvision import models

        file, args = config.weights_file, config.args
        if file is not None and _entry_of_file(models.get_model_weights(config.name), file) is None:
            loaded, _, missing = _create_from_file(file, config, seed)
            heads = _heads_of(_create_random(config, args, seed), config.name)
            if heads and not missing and "num_classes" not in args:
                classes = len(loaded.get_parameter(f"{heads[-1]}.weight"))
                args = {**args, "num_classes": classes}
        return _create_random(config, args, seed)

    def weight_files(self, config: TorchvisionOptions) -> list[Path]:
        """Return the file of the weights; torchvision's own tags stand for one file each."""
        return [] if config.weights_file is None else [Path(config.weights_file)]

    def own_names(self) -> list[str]:
        """Return what torchvision lists, also models that featx does not feed."""
        from torchvision import models

        return list(models.list_models())


# Weights: the members of torchvision's enums, their files and their downloads


def _entry(enum: Any, name: str, weights: str | None) -> Any:
    """The enum member that `model.weights` names, or None for random weights."""
    if weights is None:
        return None
    if weights == "default":
        if len(enum) == 0:
            raise ModelError("this model has no weights in torchvision, and so no preprocessing.")
        return enum.DEFAULT
    tag = weights.rsplit(".", 1)[-1]
    if tag not in enum.__members__:
        raise WeightsError(
            f"model.weights={weights}: torchvision has no such weights for {name}; it has "
            f"{', '.join(enum.__members__)}. A path (.safetensors, .pth) and null are valid too."
        )
    return enum[tag]


def _entry_of_file(enum: Any, file: str) -> WeightsEnum | None:
    """The enum member to whose download a local file belongs, or None.

    The file is recognised by its name, which contains a hash. It then gets the preprocessing of its
    own weights, which may differ from that of DEFAULT, and a builder that knows them: googlenet and
    inception_v3 rescale their input for torchvision's weights only.
    """
    name = Path(file).name
    return next((entry for entry in enum if Path(urlparse(entry.url).path).name == name), None)


def _create_from_entry(
    entry: WeightsEnum, file: str | None, config: TorchvisionOptions, seed: int
) -> torch.nn.Module:
    """Build a model by torchvision's builder, with weights of a local file or of a download."""
    from featx.models.checkpoint import read_weights

    def get_state_dict(*args: object, **keywords: object) -> Mapping[str, torch.Tensor]:
        if file is not None:
            return read_weights(Path(file), config.checkpoint.sha256)
        return _fetch_weights(entry.url, config.name)

    # torchvision's loader unpickles arbitrary objects (weights_only=False). Builders accept members
    # of the enum only, and the member itself belongs to the whole process, so a copy reads tensors.
    readable = object.__new__(type(entry))
    readable.__dict__.update(entry.__dict__, get_state_dict=get_state_dict)
    try:
        return _call_builder(config, {"weights": readable}, seed)
    except RuntimeError as error:  # from load_state_dict in the builder
        raise WeightsError(f"{file or entry} does not fit this model: {one_line(error)}") from error


def _fetch_weights(url: str, name: str) -> Mapping[str, torch.Tensor]:
    """Read the state dict of a torchvision URL from PyTorch's cache, or download it."""
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


# Creation of the module


def _create_from_file(
    file: str, config: TorchvisionOptions, seed: int
) -> tuple[torch.nn.Module, Mapping[str, object], tuple[str, ...]]:
    """Build a model with the tensors of a file, as `load_with_heads` does.

    A head that the file lacks, or that does not fit, is replaced by the identity, unless model.args
    states the number of classes. The main head is the last one.
    """
    import torch

    from featx.models.checkpoint import load_with_heads

    module = _create_random(config, config.args, seed)
    heads = () if "num_classes" in config.args else _heads_of(module, config.name)

    def with_classes(number: int) -> torch.nn.Module:
        if number:
            return _create_random(config, {**config.args, "num_classes": number}, seed)
        for head in heads:
            module.set_submodule(head, torch.nn.Identity())
        return module

    return load_with_heads(module, file, config.checkpoint, heads, with_classes)


def _create_random(
    config: TorchvisionOptions, args: Mapping[str, object], seed: int
) -> torch.nn.Module:
    """Build a model with random weights of a seed, also for its backbone."""
    from torchvision import models

    keywords: dict[str, object] = {**args, "weights": None}
    if config.name.startswith(("googlenet", "inception")):
        keywords["init_weights"] = True  # the default, without its deprecation warning
    builder = models.get_model_builder(config.name)
    if "weights_backbone" in inspect.signature(builder).parameters:
        keywords["weights_backbone"] = None
    return _call_builder(config, keywords, seed)


def _call_builder(
    config: TorchvisionOptions, more: Mapping[str, object], seed: int
) -> torch.nn.Module:
    """Call torchvision's builder with a seed, model.args, the input size and further arguments."""
    from torchvision import models

    from featx.models.base import seeded

    args: dict[str, object] = dict(config.args)
    side = None if config.input_size is None else config.input_size[0]
    if side is not None and config.name.startswith("vit_"):
        args["image_size"] = side
    elif side is not None and config.name.startswith("maxvit"):
        args["input_size"] = (side, side)
    try:
        with seeded(seed):
            builder = models.get_model_builder(config.name)
            module: torch.nn.Module = builder(**{**args, **more})
    except FeatxError:  # about the weights; some are a ValueError as well
        raise
    except (TypeError, ValueError, AssertionError) as error:
        raise ModelError(
            f"torchvision cannot build {config.name} with model.args={config.args} and "
            f"model.input_size={config.input_size}: {error}."
        ) from error
    return module


def classifier_of(module: torch.nn.Module) -> str | None:
    """Name of the classifier if it is not the last linear layer, otherwise None.

    In a segmentation model it is the last convolution of the main head; the auxiliary head runs
    later. LRASPP adds two classifiers of two maps: its whole head is named.
    """
    import torch
    from torchvision.models.segmentation import FCN, LRASPP, DeepLabV3

    if isinstance(module, LRASPP):
        return "classifier"
    if not isinstance(module, FCN | DeepLabV3):
        return None
    head = module.get_submodule("classifier")
    convolutions = [n for n, m in head.named_modules() if isinstance(m, torch.nn.Conv2d)]
    return f"classifier.{convolutions[-1]}"


def _heads_of(module: torch.nn.Module, name: str) -> tuple[str, ...]:
    """Return the names of the classifiers of a model with its usual classes, the main one last."""
    import torch
    from torchvision import models

    usual = _entry(models.get_model_weights(name), name, "default")
    classes = len(usual.meta.get("categories", ()))
    sizes = {
        part: layer.out_features if isinstance(layer, torch.nn.Linear) else layer.out_channels
        for part, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
    }
    heads = [part for part, size in sizes.items() if size == classes]
    main = classifier_of(module)
    return tuple(sorted(heads, key=lambda head: head == main))


# Transforms of the weights


def preprocess_of(preset: object, name: str) -> Preprocess:
    """The Preprocess of the transform of some weights of the model `name`."""
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


def _resize_preset(preset: object, side: int) -> object:
    """Return the transform of some weights for another size, with the same share of the centre."""
    from torchvision.transforms._presets import ImageClassification, SemanticSegmentation

    values: dict[str, Any] = {
        "mean": tuple(getattr(preset, "mean", ())),
        "std": tuple(getattr(preset, "std", ())),
        "interpolation": getattr(preset, "interpolation", None),
        "antialias": getattr(preset, "antialias", None),
    }
    if isinstance(preset, ImageClassification):
        resize = round(preset.resize_size[0] * side / preset.crop_size[0])
        return ImageClassification(crop_size=side, resize_size=resize, **values)
    if isinstance(preset, SemanticSegmentation):
        return SemanticSegmentation(resize_size=side, **values)
    return preset


def _square(preset: Any, side: int) -> object:
    """A segmentation transform followed by a square centre crop."""
    from torchvision.transforms import functional as TF

    def reference(image: Image.Image) -> torch.Tensor:
        x: torch.Tensor = TF.center_crop(preset(image), [side, side])
        return x

    return reference


LIBRARIES.register(
    Torchvision("torchvision", "Models of torchvision.", TorchvisionOptions, auto_rank=1)
)
