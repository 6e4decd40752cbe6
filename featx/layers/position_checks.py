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
from featx.layers.trace import CapturePoint

ToMap = Callable[[torch.Tensor], torch.Tensor]
"""Function from a layer's tensor, (B, ...), to a map (B, C, rows, columns)."""

_NUM_SEPARATE, _NUM_CELLS = 9, 16
"""Number of changed cells that are not adjacent to each other, and number of all changed cells."""

_BALANCING_ROUNDS = 20
"""Number of rounds of Sinkhorn balancing."""


def check_positions(
    module: nn.Module, maps: Sequence[tuple[CapturePoint, ToMap]], image: torch.Tensor
) -> None:
    """Check that the positions of every map lie as in the image.

    Args:
        module: model in eval mode.
        maps: pairs of a capture point and the function that makes its tensor a map.
        image: (1, 3, H, W) normalised noise.

    Raises:
        ReduceError: positions are in another order, or their order cannot be determined.
    """
    height, width = image.shape[2:]
    for point, to_map in maps:
        # A gradient has the positions of its tensor, so the tensor is checked without a backward
        # pass.
        forward = replace(point, capture=point.capture.removeprefix("grad_"))
        with torch.no_grad(), CaptureHooks(module, [forward], clone_captured) as hooks:
            first = to_map(hooks.forward(image.clone())[point.name].float())
            rows, columns = first.shape[2:]
            separate_cells, cells = _cells(rows, columns)
            changes = []
            for row, column in cells:
                top, bottom = row * height // rows, (row + 1) * height // rows
                left, right = column * width // columns, (column + 1) * width // columns
                changed_image = image.clone()
                changed_image[:, :, top:bottom, left:right] *= -2
                changed = to_map(hooks.forward(changed_image)[point.name].float())
                # MPS has no float64.
                changes.append((changed - first)[0].cpu().double().norm(dim=0))
            responses = torch.stack(changes)  # of all positions to each cell
        if not (
            _own_position_responds_most(responses, separate_cells)
            and _near_position_responds_most(responses, cells)
        ):
            raise ReduceError(
                f"{point.name}: its {rows} x {columns} positions are not in the row-major order "
                "of the image: when single cells of an image were changed, other positions "
                "changed most. Some models (Hiera) keep tokens in another order, which would "
                "scramble a grid or heat map. Use another reduction (avg, max, none), or choose "
                "another layer."
            )


def _cells(rows: int, columns: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Cells of a map to change: some that are not adjacent, corners first; the same and more."""
    corners = {(row, column) for row in (0, rows - 1) for column in (0, columns - 1)}
    separate_cells, more = sorted(corners), []
    generator = torch.Generator().manual_seed(0)
    for index in torch.randperm(rows * columns, generator=generator).tolist():
        cell = divmod(index, columns)
        is_near = any(max(abs(cell[0] - a), abs(cell[1] - b)) < 2 for a, b in separate_cells)
        if len(separate_cells) < _NUM_SEPARATE and not is_near:
            separate_cells.append(cell)
        elif cell not in corners:
            more.append(cell)
    return separate_cells, [*separate_cells, *more[: _NUM_CELLS - len(separate_cells)]]


def _own_position_responds_most(responses: torch.Tensor, cells: Sequence[tuple[int, int]]) -> bool:
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


def _near_position_responds_most(responses: torch.Tensor, cells: Sequence[tuple[int, int]]) -> bool:
    """Return whether each cell changes a position at most one step from its own the most.

    One step is allowed because strided convolutions before the tokens shift by half a cell.
    """
    relative = responses / (responses.mean(0, keepdim=True) + 1e-9 * responses.max())
    places = [divmod(int(each.argmax()), responses.shape[2]) for each in relative]
    return all(
        max(abs(row - a), abs(column - b)) <= 1
        for (row, column), (a, b) in zip(cells, places, strict=True)
    )
