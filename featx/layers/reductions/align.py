"""Reduction align: maps of several layers on one grid, as PatchCore and others combine them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from featx.config import Count, ReduceConfig, options
from featx.errors import ConfigError
from featx.layers.reductions.registry import REDUCTIONS, reduction_member
from featx.layers.reductions.row_layout import Reduction, RowLayout, map_view

if TYPE_CHECKING:
    import torch


@options("reduce")
class AlignOptions(ReduceConfig):
    """Options of reduce=align."""

    name: str = "align"
    rows: Count = 28
    """Number of rows of the common grid."""
    columns: Count = 28
    """Number of columns of the common grid."""
    pool: Count = 1
    """Side of the window that is averaged around each position before the map is resized; 3 for
    PatchCore."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ConfigError(f"reduce.pool={self.pool}: expected an odd number above 0.")

    @property
    def args(self) -> dict[str, float | str]:
        """Grid and window."""
        return {"rows": self.rows, "columns": self.columns, "pool": self.pool}


def _align(config: AlignOptions, rows: RowLayout) -> Reduction:
    """Return the map or patch tokens, averaged and resized, (B, C, rows, columns).

    The average is that of nn.AvgPool2d(pool, 1, pool // 2), in which zeros beyond the border count;
    the resize is bilinear with pixel centres (align_corners=False) and without antialiasing. This
    is the combination of K. Roth et al., Towards Total Recall in Industrial Anomaly Detection, CVPR
    2022, section 3.1, as anomalib computes it; anomalib takes the grid of the first layer, here it
    is given, so that each layer is stored by itself and any of them can be concatenated.
    """
    import torch.nn.functional as F

    to_map, size, pool = map_view("align", rows), (config.rows, config.columns), config.pool

    def align(x: torch.Tensor) -> torch.Tensor:
        values = to_map(x).float()
        if pool > 1:
            values = F.avg_pool2d(values, pool, stride=1, padding=pool // 2)
        if tuple(values.shape[2:]) == size:
            return values
        return F.interpolate(values, size, mode="bilinear", align_corners=False)

    return align


REDUCTIONS.register(
    reduction_member(
        "align",
        "A map or patch tokens, resized to one grid for all layers.",
        _align,
        AlignOptions,
        reads_positions=True,
        gives_map=True,
    )
)
