"""Similarity of rows and of layers of a store: exact and in blocks, on any device."""

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
