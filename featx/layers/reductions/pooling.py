"""Reductions avg, max and gem, which pool over the positions of tokens or of a map."""

from __future__ import annotations

from featx.config import Positive, ReduceConfig, options
from featx.errors import ReduceError
from featx.layers.reductions.registry import REDUCTIONS, reduction_member
from featx.layers.reductions.row_layout import Reduction, RowLayout, channels_last, mean

_GEM_FLOOR = 1e-6
"""Smallest value that gem uses; smaller ones are raised to it."""


@options("reduce")
class GemOptions(ReduceConfig):
    """Options of reduce=gem."""

    name: str = "gem"
    p: Positive = 3.0
    """Exponent: 1 is the mean, a large number comes near the maximum."""

    @property
    def args(self) -> dict[str, float | str]:
        """The exponent."""
        return {"p": self.p}


def _avg(config: ReduceConfig, rows: RowLayout) -> Reduction:
    """Return the mean over positions."""
    axes = _pooled_axes("avg", rows)
    return lambda x: mean(x, axes)


def _max(config: ReduceConfig, rows: RowLayout) -> Reduction:
    """Return the maximum over positions."""
    axes = _pooled_axes("max", rows)
    return lambda x: x.amax(axes)


def _gem(config: GemOptions, rows: RowLayout) -> Reduction:
    """Return the generalised mean over positions: (1/n sum max(x, 1e-6)^p)^(1/p).

    F. Radenovic, G. Tolias, O. Chum, Fine-tuning CNN Image Retrieval with No Human Annotation, IEEE
    TPAMI 41(7), 2019, equation 6. Here p is given, not learned.
    """
    axes, p = _pooled_axes("gem", rows), config.p
    return lambda x: x.float().clamp(min=_GEM_FLOOR).pow(p).mean(axes).pow(1 / p)


def _pooled_axes(name: str, rows: RowLayout) -> tuple[int, ...]:
    """Return the axes of (B, *shape) that pooling removes.

    Raises:
        ReduceError: rows are neither tokens nor a map.
    """
    if len(rows.shape) == 2:
        return (1,)
    if len(rows.shape) == 3:
        return (1, 2) if channels_last(f"reduce={name}", rows) else (2, 3)
    raise ReduceError(
        f"reduce={name} does not fit {rows.layer}: its rows have shape {rows.shape}, expected "
        "tokens (T, C) or a map (C, H, W). Use none or flatten for this layer, for example "
        f"layers={{{rows.layer}: none}}."
    )


REDUCTIONS.register(reduction_member("avg", "Mean over all positions.", _avg))
REDUCTIONS.register(reduction_member("max", "Maximum over all positions.", _max))
REDUCTIONS.register(
    reduction_member("gem", "Generalised mean over all positions.", _gem, GemOptions)
)
