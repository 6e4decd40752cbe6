"""Check that positions of a layer lie as in the image, by changing parts of the image.

A transformer may hold its patch tokens in any order; Hiera orders them by mask units. The shape of
a tensor does not show the order. So before tokens become a map, single cells of an image are
changed, and each position must respond to its own cell more than to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from featx.errors import ReduceError
from featx.layers.capture_hooks import CaptureHooks, clone_captured
from featx.layers.layer_names import CapturePoint

ToMap = Callable[[torch.Tensor], torch.Tensor]
"""Function from a layer's tensor, (B, ...), to a map (B, C, rows, columns)."""

Maps = Sequence[tuple[CapturePoint, ToMap]]
"""Pairs of a capture point and the function that makes its tensor a map."""

Cells = list[tuple[int, int]]
"""(row, column) of cells of a map."""

_NUM_SEPARATE, _NUM_CELLS = 9, 16
"""Number of changed cells that are not adjacent to each other, and number of all changed cells."""

_FEW_CELLS = 5
"""Number of changed cells where positions are only recorded."""

_BATCH = 3
"""Number of images in a pass; some models fail for a single one."""

_CLEARLY = 2.0
"""A position is another one if it responds so many times as much as those near the changed cell."""

_BALANCING_ROUNDS = 20
"""Number of rounds of Sinkhorn balancing."""


def check_positions(module: nn.Module, maps: Maps, image: torch.Tensor) -> None:
    """Check that the positions of every map lie as in the image.

    Args:
        module: model in eval mode.
        maps: the maps.
        image: (1, 3, H, W) normalised noise.

    Raises:
        ReduceError: positions are in another order, or their order cannot be determined.
    """
    for name, responses, separate_cells, cells in _responses(module, maps, image, _NUM_CELLS):
        if not (
            _own_position_responds_most(responses, separate_cells)
            and _near_position_responds_most(responses, cells)
        ):
            raise ReduceError(
                f"{name}: its {responses.shape[1]} x {responses.shape[2]} positions are not in the "
                "row-major order of the image: when single cells of an image were changed, other "
                "positions changed most. Some models (Hiera) keep tokens in another order, which "
                "would scramble a grid or heat map.",
                "Use another reduction (avg, max, none), or choose another layer.",
            )


def misplaced_maps(module: nn.Module, maps: Maps, image: torch.Tensor) -> frozenset[str]:
    """Find the maps whose positions clearly do not lie as in the image; arguments are as for
    `check_positions`. Returns the names of the captures.
    """
    return frozenset(
        name
        for name, responses, _, cells in _responses(module, maps, image, _FEW_CELLS)
        if _another_position_responds(responses, cells)
    )


def _responses(
    module: nn.Module, maps: Maps, image: torch.Tensor, num_cells: int
) -> list[tuple[str, torch.Tensor, Cells, Cells]]:
    """Return the name of each capture, the (cells, rows, columns) responses of all positions to
    changes of single cells, the cells that are not adjacent, and all cells. Maps of one size share
    the forward passes. Rows must not depend on other images of their batch.
    """
    found: list[tuple[str, torch.Tensor, Cells, Cells]] = []
    if not maps:
        return found
    # A gradient has the positions of its tensor, so the tensor is checked without a backward pass.
    points = [replace(p, capture=p.capture.removeprefix("grad_")) for p, _ in maps]
    with torch.no_grad(), CaptureHooks(module, points, clone_captured) as hooks:

        def maps_of(x: torch.Tensor) -> dict[str, torch.Tensor]:
            tensors = hooks.forward(x)
            return {point.name: to_map(tensors[point.name].float()) for point, to_map in maps}

        first = maps_of(image.repeat(_BATCH, 1, 1, 1))
        for rows, columns in dict.fromkeys(tuple(x.shape[2:]) for x in first.values()):
            names = [name for name, x in first.items() if x.shape[2:] == (rows, columns)]
            separate_cells, cells = _cells(rows, columns, num_cells)
            responses: dict[str, list[torch.Tensor]] = {name: [] for name in names}
            for start in range(0, len(cells), _BATCH):
                part = cells[start : start + _BATCH]
                images = [_with_changed_cell(image, cell, rows, columns) for cell in part]
                changed = maps_of(torch.cat([*images, *[image] * _BATCH])[:_BATCH])
                for name in names:
                    # MPS has no float64.
                    change = (changed[name] - first[name])[: len(part)].cpu().double()
                    responses[name] += change.norm(dim=1)
            found += [(n, torch.stack(responses[n]), separate_cells, cells) for n in names]
    return found


def _with_changed_cell(
    image: torch.Tensor, cell: tuple[int, int], rows: int, columns: int
) -> torch.Tensor:
    (row, column), (height, width) = cell, image.shape[2:]
    top, bottom = row * height // rows, (row + 1) * height // rows
    left, right = column * width // columns, (column + 1) * width // columns
    changed = image.clone()
    changed[:, :, top:bottom, left:right] *= -2
    return changed


def _cells(rows: int, columns: int, count: int) -> tuple[Cells, Cells]:
    """Cells of a map to change: some that are not adjacent, corners first; the same and more."""
    corners = {(row, column) for row in (0, rows - 1) for column in (0, columns - 1)}
    separate_cells, more = sorted(corners), []
    generator = torch.Generator().manual_seed(0)
    for index in torch.randperm(rows * columns, generator=generator).tolist():
        cell = divmod(index, columns)
        is_near = any(max(abs(cell[0] - a), abs(cell[1] - b)) < 2 for a, b in separate_cells)
        if len(separate_cells) < min(_NUM_SEPARATE, count) and not is_near:
            separate_cells.append(cell)
        elif cell not in corners:
            more.append(cell)
    return separate_cells, [*separate_cells, *more[: count - len(separate_cells)]]


def _own_position_responds_most(responses: torch.Tensor, cells: Cells) -> bool:
    """Return whether each of several separate cells changes its own position most.

    Some positions respond more than others to any change, and some cells have more effect. Rows and
    columns are therefore normalised to the same sum in turn (R. Sinkhorn, A relationship between
    arbitrary positive matrices and doubly stochastic matrices, Annals of Mathematical Statistics
    35, 1964).
    """
    if len(cells) < 2:
        return True  # a single position shows the whole image
    balanced = torch.stack([responses[: len(cells), row, column] for row, column in cells], 1)
    if not torch.isfinite(balanced).all() or not (balanced.diag() > 0).all():
        return False
    balanced = balanced + 1e-9 * balanced.max()
    for _ in range(_BALANCING_ROUNDS):
        balanced = balanced / balanced.sum(0, keepdim=True)
        balanced = balanced / balanced.sum(1, keepdim=True)
    diagonal = torch.arange(len(balanced), device=balanced.device)
    return torch.equal(balanced.argmax(0), diagonal) and torch.equal(balanced.argmax(1), diagonal)


def _near_position_responds_most(responses: torch.Tensor, cells: Cells) -> bool:
    """Return whether each cell changes a position at most one step from its own the most.

    One step is allowed because strided convolutions before the tokens shift by half a cell.
    """
    places = [divmod(int(each.argmax()), responses.shape[2]) for each in _relative(responses)]
    return all(
        max(abs(row - a), abs(column - b)) <= 1
        for (row, column), (a, b) in zip(cells, places, strict=True)
    )


def _another_position_responds(responses: torch.Tensor, cells: Cells) -> bool:
    """Return whether a cell clearly changes a position more than one step from its own the most.

    In the output of an attention, without the sum around it, no position may stand out.
    """
    return any(
        bool(
            each.max()
            > _CLEARLY * each[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2].max()
        )
        for (row, column), each in zip(cells, _relative(responses), strict=True)
    )


def _relative(responses: torch.Tensor) -> torch.Tensor:
    """Responses of each position as multiples of its mean, as some respond more to any change."""
    return responses / (responses.mean(0, keepdim=True) + 1e-9 * responses.max())
