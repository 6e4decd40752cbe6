"""Similarity of rows, layers and data sets of stores; their labels, and a table of stores."""

from typing import TYPE_CHECKING, NoReturn

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
from featx.errors import nearest

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


if not TYPE_CHECKING:  # a type checker would take every name for one of this module

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}.{nearest(name, __all__)}"
        )
