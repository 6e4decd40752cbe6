"""Comparison of tensors; tensors and shapes in nested values, such as a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

ElementPath = tuple[str | int, ...]
"""Keys and indices that lead to an element of a nested value; () for the value itself."""


def elements(value: object) -> dict[ElementPath, torch.Tensor]:
    """Path -> tensor for every tensor in nested mappings, tuples, lists and dataclasses."""
    if isinstance(value, torch.Tensor):
        return {(): value}
    if isinstance(value, Mapping):
        items: list[tuple[str | int, object]] = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    else:
        return {}
    return {(step, *way): x for step, part in items for way, x in elements(part).items()}


def shapes_of(value: object) -> dict[ElementPath, tuple[int, ...]]:
    """Path -> shape for every tensor in a nested value."""
    return {path: shape_of(x) for path, x in elements(value).items()}


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of a tensor; -1 for all but the first dimension of a nested one of strided layout."""
    if tensor.is_nested and tensor.layout == torch.strided:
        return tensor.size(0), *[-1] * (tensor.dim() - 1)
    return tuple(tensor.shape)


def are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal shapes and elements; NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
