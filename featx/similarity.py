"""Similarity of rows, layers and data sets of stores; their labels, and a table of stores."""

from featx.analysis import StoreComparison, compare_stores, search
from featx.analysis.probe import JudgedLabels, judge_labels
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
    "JudgedLabels",
    "LayerSimilarity",
    "Neighbours",
    "Outliers",
    "RowIndex",
    "StoreComparison",
    "compare_stores",
    "data_set_distance",
    "duplicate_groups",
    "find_outliers",
    "judge_labels",
    "layer_similarity",
    "linear_cka",
    "nearest_rows",
    "nearest_to",
    "procrustes_distance",
    "rsa",
    "search",
    "svcca",
]
