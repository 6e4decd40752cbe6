"""model=timm: backbones of timm, with their pretrained tags and data configs."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.config import LibraryModelConfig
from featx.errors import ConfigError, FeatxError, ModelError
from featx.models.libraries.registry import LIBRARIES, LibraryFunctions, library_member
from featx.models.model_names import registered_names
from featx.models.timm_weights import (
    LOCAL,
    check_folder,
    check_tag,
    download_errors,
    folder_errors,
    pretrained_cfg,
    whole_models,
)

if TYPE_CHECKING:
    import torch

    from featx.images import Preprocess
    from featx.models.base import Backbone, LibraryEmbedding

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


@dataclass
class TimmOptions(LibraryModelConfig):
    """Options of model=timm."""

    name: str = ""
    library: str = "timm"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_args(_REFUSED_ARGS)
        if self.args.get("in_chans", 3) != 3:
            raise ConfigError("model.args.in_chans: featx reads RGB images, which have 3 channels.")
        if "img_size" in self.args:
            raise ConfigError(
                "model.args.img_size cannot be given: model.input_size=[HEIGHT,WIDTH] sets the "
                "size of the model and of its images together."
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

    from featx.models.base import random_id, timm_classes
    from featx.models.preprocessing import changed_preprocess

    file = config.weights_file
    config.check_file(has_file=file is not None)
    config.checkpoint.check_effect(has_file=file is not None, is_converted=True)
    name, size = _tagged_name(config, file), _size_of(config)
    check_tag(timm, name)
    loading: Mapping[str, Any] = {}
    missing: tuple[str, ...] = ()
    if file is not None:
        module, loading, missing = _loaded_from(file, config, name, seed)
        origin = file
    elif config.weights is None:
        module, origin = _created_offline(name, config.args, size, seed), random_id(seed)
    else:
        module = _pretrained(timm, name, config, seed)
        origin = f"timm {module.pretrained_cfg.get('tag') or 'default'}"
    backbone = wrap(module, f"timm/{name}", origin, size)
    backbone.preprocess = changed_preprocess(backbone.preprocess, config.transform)
    is_pretrained = file is None and config.weights is not None
    backbone.classes = timm_classes(module) if is_pretrained and module.num_classes else ()
    backbone.args = dict(config.args)
    backbone.checkpoint, backbone.missing_heads = loading, missing
    return backbone


def _size_of(config: TimmOptions) -> tuple[int, int] | None:
    """Return (height, width) of the images in pixels, or None for the size of the weights."""
    return None if config.input_size is None else (config.input_size[0], config.input_size[1])


def _tagged_name(config: TimmOptions, file: str | None) -> str:
    """Return the name of a model with the tag of its weights, or of weights that a file is like.

    Raises:
        ConfigError: model.name and model.weights_like both have a tag.
    """
    name = _present_name(config.name)
    if config.weights_like is not None:
        if "." in name.split(":")[-1] or ":" in name:
            raise ConfigError(
                f"model.weights_like={config.weights_like}: model.name={name} says already which "
                "preprocessing the file has. Leave one of them out."
            )
        return f"{name}.{config.weights_like}"
    if config.weights in (None, "default") or file is not None:
        return name
    return f"{name.split('.', 1)[0]}.{config.weights}"


def _created_offline(
    name: str, args: Mapping[str, Any], size: tuple[int, int] | None, seed: int
) -> Any:
    """Create a model without weights; only a model that the hub alone knows is downloaded."""
    if name.startswith(LOCAL):
        check_folder(name)
    elif ":" in name:
        with download_errors(name, None):
            return _created(name, False, args, size, seed)
    return _created(name, False, args, size, seed)


def _pretrained(timm: Any, name: str, config: TimmOptions, seed: int) -> Any:
    """Create a model with weights of timm, the hub or a folder.

    Raises:
        WeightsError: they do not exist, or cannot be downloaded, read or loaded.
    """
    size = _size_of(config)
    cfg = pretrained_cfg(timm, name)
    if name.startswith(LOCAL):
        check_folder(name)
        errors = folder_errors(name)
    else:
        errors = download_errors(name, cfg)
    whole = whole_models(name) if config.args or size else None
    with errors, whole or contextlib.nullcontext():
        return _created(name, True, config.args, size, seed)


def _loaded_from(
    file: str, config: TimmOptions, name: str, seed: int
) -> tuple[Any, Mapping[str, Any], tuple[str, ...]]:
    """Create a model with the tensors of a file, and the classes that its head has.

    A head that the file lacks, or that does not fit, is left out, unless model.args states the
    number of classes.

    Args:
        file: path of the file.
        config: options of the model.
        name: name for timm.create_model.
        seed: seed of what the file replaces.

    Returns:
        The model, what the fingerprint says about the loading, and the names of the classifiers
        that were left out.

    Raises:
        WeightsError: the file cannot be read or does not fit.
    """
    from featx.models.checkpoint import load_match, log_missing_head, read_weights
    from featx.models.checkpoint_conversion import timm_conversion
    from featx.models.checkpoint_match import has_heads, match_checkpoint, num_classes

    size = _size_of(config)
    state = read_weights(Path(file), config.checkpoint.sha256)
    module = _created_offline(name, config.args, size, seed)
    heads = _classifiers_of(module)
    conversion = timm_conversion(module)
    if config.checkpoint.convert == "timm" and conversion is None:
        raise ConfigError(
            f"model.checkpoint.convert=timm: timm has no function that converts files of {name}. "
            "Leave the option out."
        )
    match = match_checkpoint(module, state, file, config.checkpoint, heads, conversion)
    missing: tuple[str, ...] = ()
    if "num_classes" not in config.args and heads:

        def with_classes(number: int) -> Any:
            if number == module.num_classes:
                return module
            return _created_offline(name, {**config.args, "num_classes": number}, size, seed)

        classes = num_classes(match)
        built = with_classes(classes)
        if classes and not has_heads(built.state_dict(), match):
            built = with_classes(0)
        if module.num_classes and not built.num_classes:
            missing = heads
            log_missing_head(file)
        module = built
    return module, load_match(module, match, file), missing


def _classifiers_of(module: Any) -> tuple[str, ...]:
    """Return the names of the classifiers of a model of timm."""
    names = (getattr(module, "pretrained_cfg", None) or {}).get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _created(
    name: str, pretrained: bool, args: Mapping[str, Any], size: tuple[int, int] | None, seed: int
) -> torch.nn.Module:
    """Create a model of timm.

    Args:
        name: name for timm.create_model.
        pretrained: whether timm loads the weights.
        args: model.args.
        size: (height, width) of the images, or None for that of the weights.
        seed: seed of random weights.

    Raises:
        ModelError: the model does not take these arguments or this size.
    """
    import timm

    from featx.models.base import seeded

    def create(**more: Any) -> Any:
        with seeded(seed):
            return timm.create_model(name, pretrained=pretrained, **{**args, **more})

    try:
        if size is None:
            return create()  # type: ignore[no-any-return]  # timm's models are modules
        try:
            module = create(img_size=size)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            module = create()  # a convolutional network, which takes images of any size
    except FeatxError:  # about the weights; some are a ValueError as well
        raise
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise ModelError(
            f"timm cannot build {name} with model.args={dict(args)}"
            f"{'' if size is None else f' and model.input_size={list(size)}'}: {error}."
        ) from error
    built = getattr(getattr(module, "patch_embed", None), "img_size", None)
    if built is not None and tuple(built) != size:
        raise ModelError(
            f"{name} was built for images of {tuple(built)} pixels, and model.input_size="
            f"{list(size)}; it takes no other size."
        )
    return module  # type: ignore[no-any-return]


def untrained(config: TimmOptions, seed: int) -> torch.nn.Module:
    """The architecture with timm's initialisation, and the classes of a file in `weights`."""
    file, args = config.weights_file, config.args
    name = _tagged_name(config, file)
    if file is not None and "num_classes" not in args:
        loaded, _, _ = _loaded_from(file, config, name, seed)
        args = {**args, "num_classes": loaded.num_classes}
    module: torch.nn.Module = _created_offline(name, args, _size_of(config), seed)
    return module


def wrap(
    module: torch.nn.Module, name: str, weights: str, size: tuple[int, int] | None = None
) -> Backbone:
    """Make a backbone of a timm model, with its preprocessing, embedding and stages.

    Args:
        module: model of timm.
        name: library and model.
        weights: description of the weights.
        size: as for `preprocess_of`.
    """
    from featx.models.base import Backbone, timm_stages

    return Backbone(
        module=module,
        name=name,
        weights=weights,
        preprocess=preprocess_of(module, size),
        num_prefix_tokens=int(getattr(module, "num_prefix_tokens", 0)),
        has_class_token=any(
            name.rpartition(".")[2] == "cls_token" for name, _ in module.named_parameters()
        ),
        embedding=embedding_of(module),
        stages=timm_stages(module),
        reentrant=True,
    )


def preprocess_of(module: torch.nn.Module, size: tuple[int, int] | None = None) -> Preprocess:
    """timm's evaluation transform for the weights of a module.

    Args:
        module: model of timm.
        size: (height, width) of the images in pixels, with the share of the centre that the weights
            ask for; None takes the size of the weights.

    Raises:
        ModelError: the model does not take three channels.
    """
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    from featx.images import Preprocess

    asked = {} if size is None else {"input_size": (3, *size)}
    data: dict[str, Any] = resolve_model_data_config(module, asked)  # type: ignore[no-untyped-call]
    channels, height, width = data["input_size"]
    if channels != 3:
        raise ModelError(f"this model takes {channels} channels; featx reads RGB images.")
    # timm resizes in four ways, and the fast path follows two of them. Borders, and sizes that are
    # not square but keep the proportions of the image, are left to timm.
    scaled = math.floor(height / data["crop_pct"]), math.floor(width / data["crop_pct"])
    resize: int | tuple[int, int] | None = None
    if data["crop_mode"] == "squash":
        resize = scaled
    elif data["crop_mode"] == "center" and scaled[0] == scaled[1]:
        resize = scaled[0]
    return Preprocess(
        reference=create_transform(**data, is_training=False),
        crop=(height, width),
        resize=resize,
        interpolation=data["interpolation"],
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
    )


def embedding_of(module: Any) -> LibraryEmbedding:
    """timm's own embedding: the pre-logits, or the output of a model without a classifier."""
    from featx.models.base import LibraryEmbedding

    def compute(x: torch.Tensor) -> Any:
        # The encoder of MobileNetV5 lacks the argument that all other models of timm have.
        if "pre_logits" not in inspect.signature(module.forward_head).parameters:
            return module(x)
        try:
            return module.forward_head(module.forward_features(x), pre_logits=True)
        except NotImplementedError:  # an encoder without a classifier
            return module(x)

    return LibraryEmbedding(compute, lambda: _expose_pre_logits(module))


def _expose_pre_logits(module: Any) -> None:
    """Add a module `pre_logits` to a model; each forward pass calls it with the pre-logits.

    The class of the model becomes a subclass, instead of a method of the object being replaced, so
    that deep copies of the model work.
    """
    import torch

    base: Any = type(module)

    class WithPreLogits(base):  # type: ignore[misc]
        def forward_head(self, x: Any, *args: Any, **keywords: Any) -> Any:
            logits = super().forward_head(x, *args, **keywords)
            if not keywords.get("pre_logits"):
                self.pre_logits(super().forward_head(x, pre_logits=True))
            return logits

    WithPreLogits.__name__, WithPreLogits.__qualname__ = base.__name__, base.__qualname__
    module.add_module("pre_logits", torch.nn.Identity())
    module.__class__ = WithPreLogits


def _present_name(name: str) -> str:
    """The present name of a model whose name is deprecated; create_model would warn."""
    from timm.models._registry import _deprecated_models

    return str(_deprecated_models.get(name) or name)


def knows(name: str) -> bool:
    """Whether timm has a model: by its name, by name.tag, or where only timm can look, such as
    hf-hub:owner/model."""
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
