"""Creation of models of timm: random, with weights of the library, or with those of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.base import log_message
from featx.config import LibraryModelConfig
from featx.errors import ConfigError, FeatxError, ModelError
from featx.models.timm.weights import (
    LOCAL,
    check_folder,
    check_whole,
    download_errors,
    folder_errors,
    load_errors,
    pretrained_cfg,
)

if TYPE_CHECKING:
    import torch


def image_size(config: LibraryModelConfig) -> tuple[int, int] | None:
    """Return (height, width) of the images in pixels, or None for the size of the weights."""
    return None if config.input_size is None else (config.input_size[0], config.input_size[1])


def tagged_name(config: LibraryModelConfig, file: str | None) -> str:
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


def create_offline(
    name: str, args: Mapping[str, Any], size: tuple[int, int] | None, seed: int
) -> Any:
    """Create a model without weights; only a model that the hub alone knows is downloaded."""
    if name.startswith(LOCAL):
        check_folder(name)
    elif ":" in name:
        with download_errors(name, None):
            return _create(name, False, args, size, seed)
    return _create(name, False, args, size, seed)


def create_pretrained(timm: Any, name: str, config: LibraryModelConfig, seed: int) -> Any:
    """Create a model with weights of timm, the hub or a folder.

    Raises:
        WeightsError: they do not exist, or cannot be downloaded, read or loaded.
    """
    size = image_size(config)
    cfg = pretrained_cfg(timm, name)
    if name.startswith(LOCAL):
        check_folder(name)
        errors = folder_errors(name)
    else:
        errors = download_errors(name, cfg)
    with errors, load_errors(name):
        module = _create(name, True, config.args, size, seed)
        if config.args or size:
            check_whole(
                name,
                module,
                lambda: _create(name, False, config.args, size, seed),
                lambda: _create(name, True, {}, None, seed),
            )
    return module


def create_from_file(
    file: str, config: LibraryModelConfig, name: str, seed: int
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

    size = image_size(config)
    state = read_weights(Path(file), config.checkpoint.sha256)
    module = create_offline(name, config.args, size, seed)
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
            return create_offline(name, {**config.args, "num_classes": number}, size, seed)

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


def _create(
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


def _present_name(name: str) -> str:
    """Present name of a model; a message names it if the given one is deprecated."""
    from timm.models._registry import _deprecated_models

    present = str(_deprecated_models.get(name) or name)
    if present != name:
        text = f"model.name={name} is a deprecated name of timm, which loads {present} for it"
        log_message(text, level="warning")
    return present
