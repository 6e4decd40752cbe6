"""Creation of models of torchvision: random, or with the tensors of a file; their classifiers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.config import LibraryModelConfig
from featx.errors import FeatxError, ModelError, WeightsError, one_line
from featx.models.torchvision.weights import default_entry, readable_entry

if TYPE_CHECKING:
    import torch


def create_from_file(
    file: str, config: LibraryModelConfig, seed: int
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
    module = create_random(config, config.args, seed)
    heads = () if "num_classes" in config.args else heads_of(module, config.name)
    match = match_checkpoint(module, state, file, config.checkpoint, heads)
    missing: tuple[str, ...] = ()
    if heads and not has_heads(module.state_dict(), match):
        built = module
        if classes := num_classes(match):
            built = create_random(config, {**config.args, "num_classes": classes}, seed)
        if not has_heads(built.state_dict(), match):
            built, missing = module, heads
            for head in heads:
                module.set_submodule(head, torch.nn.Identity())
            log_missing_head(file)
        module = built
    return module, load_match(module, match, file), missing


def create_from_entry(
    entry: Any, file: str | None, config: LibraryModelConfig, seed: int
) -> torch.nn.Module:
    """Build a model with weights of torchvision, by its own builder.

    Args:
        entry: enum member of the weights.
        file: local file with these weights, or None for torchvision's cache or a download.
        config: options of the model.
        seed: seed of what the weights replace.

    Raises:
        WeightsError: the weights cannot be had, or do not fit.
        ModelError: the builder does not take the arguments.
    """
    from torchvision import models

    from featx.models.base import seeded

    weights = readable_entry(entry, config.name, file, config.checkpoint.sha256)
    try:
        with seeded(seed), _refused_args(config):
            module: torch.nn.Module = models.get_model(
                config.name, weights=weights, **_all_args(config)
            )
    except RuntimeError as error:  # from load_state_dict in the builder
        raise WeightsError(f"{file or entry} does not fit this model: {one_line(error)}") from error
    return module


def heads_of(module: torch.nn.Module, name: str) -> tuple[str, ...]:
    """Return the names of the classifiers of a model with its usual classes, the main one last.

    Args:
        module: model of torchvision.
        name: its name.
    """
    import torch
    from torchvision import models

    classes = len(default_entry(models.get_model_weights(name)).meta.get("categories", ()))
    sizes = {
        part: layer.out_features if isinstance(layer, torch.nn.Linear) else layer.out_channels
        for part, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
    }
    heads = [part for part, size in sizes.items() if size == classes]
    main = classifier_of(module)
    return tuple(sorted(heads, key=lambda head: head == main))


def _all_args(config: LibraryModelConfig) -> dict[str, Any]:
    """Return model.args with the input size, for the builders that take it."""
    side = None if config.input_size is None else config.input_size[0]
    if side is not None and config.name.startswith("vit_"):
        return {**config.args, "image_size": side}
    if side is not None and config.name.startswith("maxvit"):
        return {**config.args, "input_size": (side, side)}
    return dict(config.args)


@contextlib.contextmanager
def _refused_args(config: LibraryModelConfig) -> Iterator[None]:
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


def create_random(
    config: LibraryModelConfig, args: Mapping[str, Any], seed: int
) -> torch.nn.Module:
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
