"""model=torchvision: backbones of torchvision, with its weight enums and their transforms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.config import LibraryModelConfig, check_weights_like, options
from featx.errors import ConfigError, ModelError
from featx.models.libraries.registry import LIBRARIES, LibraryFunctions, library_member
from featx.models.model_names import registered_names
from featx.models.torchvision.creation import (
    classifier_of,
    create_from_entry,
    create_from_file,
    create_random,
    heads_of,
)
from featx.models.torchvision.transforms import crop_size, preprocess_of, resize_preset
from featx.models.torchvision.weights import entry_of_file, weights_entry

if TYPE_CHECKING:
    import torch

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

    from featx.models.base import Backbone, random_id
    from featx.models.preprocessing import change_preprocess

    name = config.name
    if name.startswith("quantized_"):
        raise ModelError(
            f"{name} is the float model built for quantisation; name the plain one: "
            f"{name.removeprefix('quantized_')}."
        )
    enum = models.get_model_weights(name)
    file = config.weights_file
    entry = entry_of_file(enum, file) if file else weights_entry(enum, name, config.weights)
    check_weights_like(config.weights_like, has_file=file is not None and entry is None)
    _check_checkpoint(config, file, entry)
    like = entry or weights_entry(enum, name, config.weights_like or "default")
    preset = like.transforms()
    if config.weights_like is not None and config.input_size is None:
        config = replace(config, input_size=crop_size(preset))
    side = None if config.input_size is None else config.input_size[0]
    preset = preset if side is None else resize_preset(preset, side)
    preprocess = change_preprocess(preprocess_of(preset, name), config.transform)
    loading: Mapping[str, Any] = {}
    missing: tuple[str, ...] = ()
    if entry is not None:
        module = create_from_entry(entry, file, config, seed)
        weights = file or str(entry)
    elif file is not None:
        module, loading, missing = create_from_file(file, config, seed)
        weights = file
    else:
        module, weights = untrained(config, seed), random_id(seed)
    classes = tuple(entry.meta.get("categories", ())) if entry is not None else ()
    return Backbone(
        module=module,
        name=f"torchvision/{name}",
        weights=weights,
        preprocess=preprocess,
        num_prefix_tokens=1 if name.startswith("vit_") else 0,
        classifier=missing[-1] if missing else classifier_of(module),
        classes=classes,
        class_ids=_imagenet_ids() if len(classes) == _IMAGENET_CLASSES else (),
        reentrant=True,
        args=dict(config.args),
        checkpoint=loading,
        missing_heads=missing,
    )


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


def _imagenet_ids() -> tuple[str, ...]:
    """WordNet identifiers of the classes of ImageNet, in the order of torchvision and timm."""
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    return tuple(info.index_to_label_name(i) for i in range(_IMAGENET_CLASSES))


def untrained(config: TorchvisionOptions, seed: int) -> torch.nn.Module:
    """The architecture with torchvision's initialisation, with the classes of a file."""
    from torchvision import models

    file = config.weights_file
    if file is None or entry_of_file(models.get_model_weights(config.name), file) is not None:
        return create_random(config, config.args, seed)
    loaded, _, missing = create_from_file(file, config, seed)
    heads = heads_of(create_random(config, config.args, seed), config.name)
    if missing or "num_classes" in config.args or not heads:
        return create_random(config, config.args, seed)
    classes = len(loaded.get_parameter(f"{heads[-1]}.weight"))
    return create_random(config, {**config.args, "num_classes": classes}, seed)


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
