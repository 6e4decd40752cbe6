"""model=torchvision: backbones of torchvision, with its weight enums and their transforms."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from featx.config import LibraryModelConfig
from featx.errors import ConfigError, FeatxError, ModelError, WeightsError, one_line
from featx.models.libraries.registry import LIBRARIES, LibraryFunctions, library_member
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
    from featx.models.preprocessing import changed_preprocess

    name = config.name
    if name.startswith("quantized_"):
        raise ModelError(
            f"{name} is the float model built for quantisation; name the plain one: "
            f"{name.removeprefix('quantized_')}."
        )
    enum = models.get_model_weights(name)
    file = config.weights_file
    entry = _entry_of_file(enum, file) if file else _weights_entry(enum, name, config.weights)
    config.check_file(has_file=file is not None and entry is None)
    _check_checkpoint(config, file, entry)
    like = entry or _weights_entry(enum, name, config.weights_like or "default")
    preset = like.transforms()
    if config.weights_like is not None and config.input_size is None:
        config = replace(config, input_size=_size_of(preset))
    side = None if config.input_size is None else config.input_size[0]
    preset = preset if side is None else _resized(preset, side)
    preprocess = changed_preprocess(preprocess_of(preset, name), config.transform)
    loading: Mapping[str, Any] = {}
    missing: tuple[str, ...] = ()
    if entry is not None:
        sha256 = config.checkpoint.sha256
        try:
            with seeded(seed), _own_downloads(name, file, sha256), _refused_args(config):
                module = models.get_model(name, weights=entry, **_all_args(config))
        except RuntimeError as error:  # from load_state_dict in the builder
            reason = one_line(error)
            raise WeightsError(f"{file or entry} does not fit this model: {reason}") from error
        weights = file or str(entry)
    elif file is not None:
        module, loading, missing = _loaded_from(file, config, seed)
        weights = file
    else:
        module, weights = untrained(config, seed), random_id(seed)
    return Backbone(
        module=module,
        name=f"torchvision/{name}",
        weights=weights,
        preprocess=preprocess,
        num_prefix_tokens=1 if name.startswith("vit_") else 0,
        classifier=missing[-1] if missing else classifier_of(module),
        classes=tuple(entry.meta.get("categories", ())) if entry is not None else (),
        reentrant=True,
        args=dict(config.args),
        checkpoint=loading,
        missing_heads=missing,
    )


def _size_of(preset: Any) -> list[int] | None:
    """Return [height, width] that the transform of some weights crops, or None for another kind."""
    side = getattr(preset, "crop_size", None)
    return None if side is None else [side[0], side[0]]


def _check_checkpoint(config: TorchvisionOptions, file: str | None, entry: Any) -> None:
    """Refuse options of checkpoints that would have no effect.

    torchvision loads its own downloads itself, of which only the checksum can be asked.

    Args:
        config: options of the model.
        file: file of the weights, or None.
        entry: enum member of the weights, also of a file that was downloaded from torchvision.

    Raises:
        ConfigError: an option would have no effect.
    """
    options = config.checkpoint
    if file is not None and entry is not None:
        options = replace(options, sha256=None)
    options.check_effect(has_file=file is not None and entry is None, is_converted=False)


def _loaded_from(
    file: str, config: TorchvisionOptions, seed: int
) -> tuple[torch.nn.Module, Mapping[str, Any], tuple[str, ...]]:
    """Build a model with the tensors of a file, and the classes that its head has.

    A head that the file lacks, or that does not fit, is replaced by the identity, unless model.args
    states the number of classes.

    Args:
        file: path of the file.
        config: options of the model.
        seed: seed of what the file replaces.

    Returns:
        The model, what the fingerprint says about the loading, and the names of the classifiers
        that were left out, that of the main one last.

    Raises:
        WeightsError: the file cannot be read or does not fit.
    """
    import torch

    from featx.models.checkpoint import load_match, log_missing_head, read_weights
    from featx.models.checkpoint_match import has_heads, match_checkpoint, num_classes

    state = read_weights(Path(file), config.checkpoint.sha256)
    module = _random(config, config.args, seed)
    heads = () if "num_classes" in config.args else heads_of(module, config.name)
    match = match_checkpoint(module, state, file, config.checkpoint, heads)
    missing: tuple[str, ...] = ()
    if heads and not has_heads(module.state_dict(), match):
        built = module
        if classes := num_classes(match):
            built = _random(config, {**config.args, "num_classes": classes}, seed)
        if not has_heads(built.state_dict(), match):
            built, missing = module, heads
            for head in heads:
                module.set_submodule(head, torch.nn.Identity())
            log_missing_head(file)
        module = built
    return module, load_match(module, match, file), missing


def heads_of(module: torch.nn.Module, name: str) -> tuple[str, ...]:
    """Return the names of the classifiers of a model with its usual classes, the main one last.

    Args:
        module: model of torchvision.
        name: its name.
    """
    import torch
    from torchvision import models

    classes = len(_default(models.get_model_weights(name)).meta.get("categories", ()))
    sizes = {
        part: layer.out_features if isinstance(layer, torch.nn.Linear) else layer.out_channels
        for part, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
    }
    heads = [part for part, size in sizes.items() if size == classes]
    main = classifier_of(module)
    return tuple(sorted(heads, key=lambda head: head == main))


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
    """The architecture with torchvision's initialisation, with the classes of a file."""
    from torchvision import models

    file = config.weights_file
    if file is None or _entry_of_file(models.get_model_weights(config.name), file) is not None:
        return _random(config, config.args, seed)
    loaded, _, missing = _loaded_from(file, config, seed)
    heads = heads_of(_random(config, config.args, seed), config.name)
    if missing or "num_classes" in config.args or not heads:
        return _random(config, config.args, seed)
    classes = len(loaded.get_parameter(f"{heads[-1]}.weight"))
    return _random(config, {**config.args, "num_classes": classes}, seed)


def _random(config: TorchvisionOptions, args: Mapping[str, Any], seed: int) -> torch.nn.Module:
    """Build a model with random weights of a seed.

    Args:
        config: name and input size.
        args: model.args, or others in their place.
        seed: seed of the weights.

    Raises:
        ModelError: the builder does not take these arguments.
    """
    from torchvision import models

    from featx.models.base import seeded

    with seeded(seed), _refused_args(config):
        return _without_weights(models, config.name, {**_all_args(config), **args})


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
def _own_downloads(name: str, file: str | None, sha256: str | None) -> Iterator[None]:
    """Let a builder of torchvision load weights by `fetch_weights` or from a local file.

    torchvision's loader unpickles arbitrary objects (weights_only=False) and reports a missing
    network as URLError only. This can be removed when torchvision loads tensors only.

    Args:
        name: name of the model, for messages.
        file: path of a local file, or None to download.
        sha256: digest that the local file must have, or None.
    """
    from torchvision.models import _api

    from featx.models.checkpoint import read_weights

    def fetch(url: str, *args: Any, **keywords: Any) -> Mapping[str, torch.Tensor]:
        return read_weights(Path(file), sha256) if file else fetch_weights(url, name)

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


def _weight_files(config: TorchvisionOptions) -> list[Path]:
    """Return the file of the weights; torchvision's own tags stand for one file each."""
    return [] if config.weights_file is None else [Path(config.weights_file)]


LIBRARIES.register(
    library_member(
        "torchvision",
        "Models of torchvision.",
        TorchvisionOptions,
        LibraryFunctions(
            build=build,
            untrained=untrained,
            names=lambda: registered_names("torchvision"),
            weight_files=_weight_files,
        ),
        auto_rank=1,
    )
)
