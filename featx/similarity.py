"""Similarity of rows, layers and data sets of stores, in blocks and on any device."""

from featx.analysis import search
from featx.analysis.similarity import (
    DataSetDistance,
    LayerSimilarity,
    Neighbours,
    Outliers,
    RowIndex,
    data_set_distance,
    duplicate_groups,
    find_outliers,
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
    "Outliers",
    "RowIndex",
    "data_set_distance",
    "duplicate_groups",
    "find_outliers",
    "layer_similarity",
    "linear_cka",
    "nearest_rows",
    "nearest_to",
    "procrustes_distance",
    "rsa",
    "search",
    "svcca",
]
