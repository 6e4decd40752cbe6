"""Elements of nested outputs by their paths, such as `layer[0]` or `layer.name`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from featx.base import ElementPath, elements, shapes_of
from featx.errors import LayerError
from featx.layers.trace import CapturePoint, element_name


def pick_path(
    request: str, elements: Mapping[ElementPath, tuple[int, ...]], path: ElementPath
) -> ElementPath:
    """Path to the one tensor that is meant; () means the only tensor there is."""
    if path in elements:
        return path
    if path == () and len(elements) == 1:
        return next(iter(elements))
    listed = ", ".join(f"{element_name(p)} {s}" for p, s in elements.items())
    name, colon, capture = request.partition(":")
    plain = name.removesuffix(element_name(path)) or "the model"
    gives = "takes" if colon else "gives"
    first = element_name(next(iter(elements), ()))
    example = name.removesuffix(element_name(path)) + first + colon + capture
    if list(elements) == [()]:
        raise LayerError(f"{request}: {plain} gives one tensor {elements[()]}, without elements.")
    raise LayerError(
        f"{plain} {gives} {len(elements)} tensors ({listed or 'none'}); "
        + (f"name one of them, such as {example!r}." if elements else "choose another layer.")
    )


def path_to(value: Any, point: CapturePoint) -> ElementPath:
    """Path to the tensor of a nested value that a capture point means.

    Raises:
        LayerError: it does not exist, or the capture point is ambiguous.
    """
    return pick_path(point.name, shapes_of(value), point.path)


def pick(value: Any, point: CapturePoint) -> torch.Tensor:
    """The tensor of a nested value that a capture point means.

    Raises:
        LayerError: as for `path_to`.
    """
    if isinstance(value, torch.Tensor) and point.path == ():
        return value
    return elements(value)[path_to(value, point)]


def with_element(value: Any, path: ElementPath, new: torch.Tensor) -> Any:
    """A nested value with one tensor replaced; the containers around it are copied."""
    if not path:
        return new
    step, *rest = path
    if isinstance(value, Mapping):
        key = next(key for key in value if str(key) == str(step))
        kind: Any = type(value)
        return kind({**value, key: with_element(value[key], tuple(rest), new)})
    items = list(value)
    items[int(step)] = with_element(items[int(step)], tuple(rest), new)
    named = hasattr(value, "_fields")  # named tuples take items as arguments
    return type(value)(*items) if named else type(value)(items)
