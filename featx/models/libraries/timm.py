"""model=timm: backbones of timm, with their pretrained tags and data configs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.config import LibraryModelConfig, check_weights_like, options
from featx.errors import ConfigError
from featx.models.libraries.registry import LIBRARIES, LibraryFunctions, library_member
from featx.models.model_names import registered_names
from featx.models.timm.creation import (
    create_from_file,
    create_offline,
    create_pretrained,
    image_size,
    tagged_name,
)
from featx.models.timm.weights import LOCAL, check_tag

if TYPE_CHECKING:
    import torch

    from featx.models.base import Backbone

_SCHEMES = ("hf-hub:", "hf_hub:", "timm:", LOCAL)
"""Beginnings of names that say where timm finds a model."""


_REFUSED_ARGS = {
    "pretrained": "model.weights says which weights are loaded",
    "pretrained_cfg": "name the weights in model.weights or model.name",
    "pretrained_cfg_overlay": "name the weights in model.weights or model.name",
    "pretrained_strict": "featx loads whole models only",
    "checkpoint_path": "give the file as model.weights=PATH",
    "cache_dir": "set HF_HUB_CACHE",
    "features_only": "name the layers in the option layers",
    "out_indices": "name the layers in the option layers",
    "scriptable": "it changes no values",
    "exportable": "it changes no values",
}
"""Arguments of timm.create_model -> what to do instead."""


@options("model")
class TimmOptions(LibraryModelConfig):
    """Options of model=timm."""

    name: str = ""
    library: str = "timm"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_args(_REFUSED_ARGS)
        self._check_channels()
        if "img_size" in self.args:
            raise ConfigError(
                "model.args.img_size cannot be given: model.input_size=[HEIGHT,WIDTH] sets the "
                "size of the model and of its images together."
            )

    def _check_channels(self) -> None:
        """Check that the transform makes images of the channels that the model takes.

        Raises:
            ConfigError: it does not.
        """
        num = self.args.get("in_chans", 3)
        if num == 3:
            return
        mean, std = self.transform.mean or (), self.transform.std or ()
        if self.transform.scale is None or not len(mean) == len(std) == num:
            values = ",".join(["0.5"] * num) if type(num) is int else "..."
            raise ConfigError(
                f"model.args.in_chans={num}: images are RGB of 8 bits, unless the options say how "
                "their numbers become those of the model. Give model.transform.scale, such as "
                "65535, and mean and standard deviation of each channel, of values after the "
                f"division: 'model.transform.mean=[{values}]' 'model.transform.std=[{values}]'."
            )


def build(config: TimmOptions, seed: int) -> Backbone:
    """Build a timm model: `name`, `name.tag`, or `hf-hub:owner/model`.

    Args:
        config: name and weights.
        seed: seed of random weights.

    Raises:
        ModelError: the model does not take three channels.
        WeightsError: the weights do not exist, or cannot be downloaded, read or loaded.
    """
    import timm

    from featx.models.base import random_id
    from featx.models.preprocessing import change_preprocess
    from featx.models.timm.backbone import timm_classes, wrap

    file = config.weights_file
    check_weights_like(config.weights_like, has_file=file is not None)
    config.checkpoint.check_effect(has_file=file is not None, is_converted=True)
    name, size = tagged_name(config, file), image_size(config)
    check_tag(timm, name)
    loading: Mapping[str, Any] = {}
    missing: tuple[str, ...] = ()
    if file is not None:
        module, loading, missing = create_from_file(file, config, name, seed)
        origin = file
    elif config.weights is None:
        module, origin = create_offline(name, config.args, size, seed), random_id(seed)
    else:
        module = create_pretrained(timm, name, config, seed)
        origin = f"timm {module.pretrained_cfg.get('tag') or 'default'}"
    is_rgb = config.transform.scale is None
    backbone = wrap(module, f"timm/{name}", origin, size, is_rgb)
    backbone.preprocess = change_preprocess(backbone.preprocess, config.transform)
    is_pretrained = file is None and config.weights is not None
    if is_pretrained and module.num_classes:
        backbone.classes, backbone.class_ids = timm_classes(module)
    backbone.args = dict(config.args)
    backbone.checkpoint, backbone.missing_heads = loading, missing
    return backbone


def untrained(config: TimmOptions, seed: int) -> torch.nn.Module:
    """The architecture with timm's initialisation, and the classes of a file in `weights`."""
    file, args = config.weights_file, config.args
    name = tagged_name(config, file)
    if file is not None and "num_classes" not in args:
        loaded, _, _ = create_from_file(file, config, name, seed)
        args = {**args, "num_classes": loaded.num_classes}
    module: torch.nn.Module = create_offline(name, args, image_size(config), seed)
    return module


def knows(name: str) -> bool:
    """Return whether timm has a model.

    Args:
        name: NAME, NAME.TAG, or a place where only timm can look, such as hf-hub:owner/model.
    """
    return name.startswith(_SCHEMES) or name.split(".", 1)[0] in registered_names("timm")


def _weight_files(config: TimmOptions) -> list[Path] | None:
    """Return the file of the weights; a tag may be another file of the hub tomorrow."""
    if config.name.startswith(_SCHEMES):
        return None
    if config.weights_file is not None:
        return [Path(config.weights_file)]
    return [] if config.weights is None else None


LIBRARIES.register(
    library_member(
        "timm",
        "Models of timm, also of the Hugging Face Hub (hf-hub:owner/model).",
        TimmOptions,
        LibraryFunctions(
            build=build,
            untrained=untrained,
            names=lambda: registered_names("timm"),
            knows=knows,
            weight_files=_weight_files,
        ),
        auto_rank=2,
    )
)
