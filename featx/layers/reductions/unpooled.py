"""Reductions none and flatten, which keep every value."""

from __future__ import annotations

from featx.layers.reductions.registry import REDUCTIONS, reduction_member

REDUCTIONS.register(
    reduction_member(
        "none", "The tensor as the layer gave it.", lambda config, rows: lambda x: x, is_view=True
    )
)
REDUCTIONS.register(
    reduction_member(
        "flatten",
        "All values of the tensor as one vector.",
        lambda config, rows: lambda x: x.reshape(len(x), -1),
        is_view=True,
    )
)
