"""Which rows of a store are alike, and which layers: exact, block by block, on any device."""

from featx.analysis.similarity import (
    LayerLikeness,
    Neighbours,
    RowIndex,
    duplicate_groups,
    layer_likeness,
    linear_cka,
    nearest_rows,
    rsa,
)

__all__ = [
    "LayerLikeness",
    "Neighbours",
    "RowIndex",
    "duplicate_groups",
    "layer_likeness",
    "linear_cka",
    "nearest_rows",
    "rsa",
]
