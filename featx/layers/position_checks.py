"""Whether the positions of a layer's map lie as the image does, found by changing the image.

A transformer may keep its patch tokens in any order; Hiera keeps them by mask units. The shape of a
tensor does not tell, so before a map is made of tokens, single cells of an image are changed, and
each position has to notice the change of its own cell more than changes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from featx.errors import ReduceError
from featx.layers.capture_hooks import CaptureHooks
from featx.layers.trace import CapturePoint

ToMap = Callable[[torch.Tensor], torch.Tensor]
"""A layer's tensor (B, ...) -> (B, C, rows, columns)."""

_NUM_APART, _NUM_CELLS = 9, 16
"""Cells of the image that are changed: some with room between them, and so many in all."""

_BALANCING_ROUNDS = 20


def check_positions(
    module: nn.Module, maps: Sequence[tuple[CapturePoint, ToMap]], image: torch.Tensor
) -> None:
    """Raise unless the positions of every map lie as the image does.

    Args:
        module: in eval mode.
        maps: taps, each with what makes a map of its tensor.
        image: (1, 3, H, W) of noise, normalised.

    Raises:
        ReduceError: they lie in another order, or what they show cannot be told.
    """
    for tap, to_map in maps:
        forward = replace(tap, capture=tap.capture.removeprefix("grad_"))
        with torch.no_grad(), CaptureHooks(module, [forward], _clone) as hooks:
            first = to_map(hooks.forward(image.clone())[tap.name].float())
            apart, cells = _cells(first.shape[2], first.shape[3])
            changes = [_noticed(hooks, tap, to_map, image, first, cell) for cell in cells]
            noticed = torch.stack(changes)
        if not (_are_apart(noticed, apart) and _are_near(noticed, cells)):
            rows, columns = first.shape[2:]
            raise ReduceError(
                f"{tap.name}: its positions cannot be shown to lie as the image does. Cells of an "
                f"image were changed one by one, and of {rows} x {columns} positions in row-major "
                "order others than theirs changed most. Some models keep tokens in an order of "
                "their own (Hiera), and a grid or heat map of these is scrambled. Reduce the layer "
                "in another way (avg, max, none), or choose another one."
            )


def _cells(rows: int, columns: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The corners and some cells between them, no two side by side; these and some more cells."""
    corners = {(row, column) for row in (0, rows - 1) for column in (0, columns - 1)}
    apart, more = sorted(corners), []
    generator = torch.Generator().manual_seed(0)
    for index in torch.randperm(rows * columns, generator=generator).tolist():
        cell = divmod(index, columns)
        is_near = any(max(abs(cell[0] - a), abs(cell[1] - b)) < 2 for a, b in apart)
        if len(apart) < _NUM_APART and not is_near:
            apart.append(cell)
        elif cell not in corners:
            more.append(cell)
    return apart, [*apart, *more[: _NUM_CELLS - len(apart)]]


def _noticed(
    hooks: CaptureHooks,
    tap: CapturePoint,
    to_map: ToMap,
    image: torch.Tensor,
    first: torch.Tensor,
    cell: tuple[int, int],
) -> torch.Tensor:
    """(rows, columns) by how much each position changes where one cell of the image does."""
    (row, column), (rows, columns) = cell, first.shape[2:]
    height, width = image.shape[2:]
    top, bottom = row * height // rows, (row + 1) * height // rows
    left, right = column * width // columns, (column + 1) * width // columns
    other = image.clone()
    other[:, :, top:bottom, left:right] *= -2
    found = to_map(hooks.forward(other)[tap.name].float())
    changes: torch.Tensor = (found - first)[0].double().norm(dim=0)
    return changes


def _are_apart(noticed: torch.Tensor, cells: Sequence[tuple[int, int]]) -> bool:
    """Whether among cells that lie apart each is noticed most at its own position.

    Some positions change by more than others whatever is changed, and so do some cells; rows and
    columns are brought to the same sum in turn (R. Sinkhorn, A relationship between arbitrary
    positive matrices and doubly stochastic matrices, Annals of Mathematical Statistics 35, 1964).

    Args:
        noticed: (n, rows, columns) changes, one map for each cell that was changed.
        cells: the first of them, no two side by side.
    """
    if len(cells) < 2:
        return True  # one position shows the whole image
    balanced = torch.stack([noticed[: len(cells), row, column] for row, column in cells], 1)
    if not torch.isfinite(balanced).all() or not (balanced.diag() > 0).all():
        return False
    balanced = balanced + 1e-9 * balanced.max()
    for _ in range(_BALANCING_ROUNDS):
        balanced = balanced / balanced.sum(0, keepdim=True)
        balanced = balanced / balanced.sum(1, keepdim=True)
    own = torch.arange(len(balanced), device=balanced.device)
    return torch.equal(balanced.argmax(0), own) and torch.equal(balanced.argmax(1), own)


def _are_near(noticed: torch.Tensor, cells: Sequence[tuple[int, int]]) -> bool:
    """Whether each cell is noticed most within one position of its own, of all positions.

    One beside is near enough: strided convolutions in front of tokens shift by half a cell.
    """
    relative = noticed / (noticed.mean(0, keepdim=True) + 1e-9 * noticed.max())
    places = [divmod(int(each.argmax()), noticed.shape[2]) for each in relative]
    return all(
        max(abs(row - a), abs(column - b)) <= 1
        for (row, column), (a, b) in zip(cells, places, strict=True)
    )


def _clone(tap: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
