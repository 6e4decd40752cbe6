"""Reduction grid: means over the cells of a small grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from featx.config import Count, ReduceConfig, options
from featx.errors import ReduceError
from featx.layers.reductions.registry import REDUCTIONS, reduction_member
from featx.layers.reductions.row_layout import Reduction, RowLayout, map_view

if TYPE_CHECKING:
    import torch


@options("reduce")
class GridOptions(ReduceConfig):
    """Options of reduce=grid."""

    name: str = "grid"
    size: Count = 2
    """Number of cells per side."""

    @property
    def args(self) -> dict[str, float | str]:
        """The number of cells per side."""
        return {"size": self.size}


def _grid(config: GridOptions, rows: RowLayout) -> Reduction:
    """Return means over size x size cells of a map or of patch tokens, (B, C, size, size)."""
    import torch
    import torch.nn.functional as F

    size, to_map = config.size, map_view("grid", rows)
    # A meta tensor has a shape but no memory.
    num_rows, num_columns = to_map(torch.empty(1, *rows.shape, device="meta")).shape[2:]
    if min(num_rows, num_columns) < size:
        raise ReduceError(
            f"reduce=grid does not fit {rows.layer}: {size} x {size} cells are more than its "
            f"{num_rows} x {num_columns} positions. Give a smaller reduce.size."
        )

    def grid(x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(to_map(x).float(), size)

    return grid


REDUCTIONS.register(
    reduction_member(
        "grid",
        "Means over the cells of a grid of a map or of patch tokens.",
        _grid,
        GridOptions,
        reads_positions=True,
        gives_map=True,
    )
)
