"""Nested values, such as the tuple that a module returns: their tensors and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Path = tuple[str | int, ...]


def elements(value: Any) -> dict[Path, torch.Tensor]:
    """Every tensor in a nested value, by its way in; () for a plain tensor."""
    if isinstance(value, torch.Tensor):
        return {(): value}
    if isinstance(value, Mapping):
        items: list[tuple[str | int, Any]] = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    else:
        return {}
    return {(step, *way): x for step, part in items for way, x in elements(part).items()}


def shapes_of(value: Any) -> dict[Path, tuple[int, ...]]:
    """The shape of every tensor in a nested value, by its way in."""
    return {path: tuple(x.shape) for path, x in elements(value).items()}
