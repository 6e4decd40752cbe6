"""Code of the user (model=custom, model=hub): its modules, their weights and their arguments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import nn

from featx.config import CheckpointConfig, is_secret
from featx.errors import ModelError, WeightsError, counted
from featx.models.base import tensor_digest
from featx.models.checkpoint import load_weights, read_weights


def refuse_other_objects(module: object, what: str) -> None:
    """Refuse a result of the user's code that is no module; `what` describes the code."""
    if not isinstance(module, nn.Module):
        raise ModelError(f"{what} returned a {type(module).__name__}, expected a torch.nn.Module.")


def build_twice(
    build: Callable[[int], nn.Module], seed: int
) -> tuple[nn.Module, list[str], list[str]]:
    """Return a module with the names of its random and of its trained parameters.

    It is built with two seeds. Parameters of one repeated value, such as zeros and ones, do not
    depend on a seed in any untrained model, and are neither.
    """
    # Digests, so that two models of some GB are not in memory together.
    others = {name: tensor_digest(x) for name, x in build(seed + 1).named_parameters()}
    module = build(seed)
    random, trained = [], []
    for name, x in module.named_parameters():
        digest = tensor_digest(x)
        if digest != others.get(name):
            random.append(name)
        elif digest and bool((x != x.flatten()[:1]).any()):
            trained.append(name)
    return module, random, trained


def build_untrained(
    build: Callable[[int], nn.Module], seed: int, what: str, advice: str
) -> nn.Module:
    """Return the module with random parameters, and refuse code that loads trained ones."""
    module, _, trained = build_twice(build, seed)
    if trained:
        raise ModelError(
            f"{what} gives {names_text(trained)} the same values whatever the seed, so it loads "
            f"trained weights. It has to make an untrained model: {advice}"
        )
    return module


def names_text(names: list[str]) -> str:
    """Return number and first names of parameters."""
    more = ", ..." if names[3:] else ""
    return f"{counted(len(names), 'parameter')} ({', '.join(names[:3])}{more})"


def load_own_weights(
    module: nn.Module, weights: str, options: CheckpointConfig
) -> dict[str, object]:
    """Load the file that `model.weights` names, as `load_weights` does."""
    if weights.startswith(("http:", "https:")):
        raise WeightsError(f"model.weights={weights}: download the file and give its path.")
    state = read_weights(Path(weights), options.sha256)
    return load_weights(module, state, weights, options.prefix)


def has_class_token(module: nn.Module) -> bool:
    """Return whether a module has a class token, from its `has_class_token` or timm's `cls_token`.

    Without either attribute it is assumed to have one. The answer matters only if
    `num_prefix_tokens` is above 0.
    """
    attribute = getattr(module, "has_class_token", None)
    if isinstance(attribute, bool):
        return attribute
    return getattr(module, "cls_token", module) is not None


def args_of_values(args: Mapping[str, object], without: Collection[str] = ()) -> dict[str, object]:
    """Return the entries of `model.args` that are part of the fingerprint.

    A scale or a threshold changes values and no weight; a pause or the path of a file, which the
    code names in `without`, does not. The store keeps the result, so secrets are left out, and
    texts and other objects, which may come from the environment, are hashed.
    """
    return {
        name: value if value is None or isinstance(value, bool | int | float) else _hash(value)
        for name, value in args.items()
        if name not in without and not is_secret(name)
    }


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return "sha256 " + hashlib.sha256(text.encode()).hexdigest()[:16]
