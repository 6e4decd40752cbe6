"""Which rows of a store are alike, and which layers: exact, block by block, on any device."""

from featx.analysis.similarity import (
    LayerSimilarity,
    Neighbours,
    RowIndex,
    duplicate_groups,
    layer_similarity,
    linear_cka,
    nearest_rows,
    rsa,
)

__all__ = [
    "LayerSimilarity",
    "Neighbours",
    "RowIndex",
    "duplicate_groups",
    "layer_similarity",
    "linear_cka",
    "nearest_rows",
    "rsa",
]
