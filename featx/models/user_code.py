"""Code of the user (model=custom, model=hub): what its modules say, its arguments and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featx.config import CheckpointConfig, is_secret
from featx.errors import WeightsError
from featx.models.checkpoint import read_weights


def has_class_token(module: nn.Module) -> bool:
    """Return whether a module has a class token, from its `has_class_token` or timm's `cls_token`.

    Without either attribute it is assumed to have one. The answer matters only if
    `num_prefix_tokens` is above 0.
    """
    attribute = getattr(module, "has_class_token", None)
    if isinstance(attribute, bool):
        return attribute
    return getattr(module, "cls_token", module) is not None


def read_own_weights(weights: str, options: CheckpointConfig) -> dict[str, torch.Tensor]:
    """Read the file that `model.weights` names for a module of the user's code.

    Args:
        weights: value of `model.weights`.
        options: options `model.checkpoint`, with the SHA-256 that the file must have.

    Raises:
        WeightsError: it is a URL, or the file cannot be read.
    """
    if weights.startswith(("http:", "https:")):
        raise WeightsError(f"model.weights={weights}: download the file and give its path.")
    return read_weights(Path(weights), options.sha256)


def args_of_values(args: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return the entries of `model.args` that are part of the fingerprint.

    A scale or a threshold changes values and no weight; a pause or the path of a file does not. The
    store keeps the result, so secrets are left out, and texts and other objects, which may come
    from the environment, are hashed.

    Args:
        args: keyword arguments of the user's function.
        without: names of those that have no effect on values.
    """
    return {
        name: value if value is None or isinstance(value, bool | int | float) else _hash(value)
        for name, value in args.items()
        if name not in without and not is_secret(name)
    }


def _hash(value: Any) -> str:
    """Short hash of a value of a config."""
    text = json.dumps(value, sort_keys=True, default=str)
    return "sha256 " + hashlib.sha256(text.encode()).hexdigest()[:16]
