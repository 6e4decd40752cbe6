"""Similarity of rows, layers and data sets of stores, in blocks and on any device."""

from featx.analysis.similarity import (
    DataSetDistance,
    LayerSimilarity,
    Neighbours,
    RowIndex,
    data_set_distance,
    duplicate_groups,
    layer_similarity,
    linear_cka,
    nearest_rows,
    nearest_to,
    procrustes_distance,
    rsa,
    svcca,
)

__all__ = [
    "DataSetDistance",
    "LayerSimilarity",
    "Neighbours",
    "RowIndex",
    "data_set_distance",
    "duplicate_groups",
    "layer_similarity",
    "linear_cka",
    "nearest_rows",
    "nearest_to",
    "procrustes_distance",
    "rsa",
    "svcca",
]
