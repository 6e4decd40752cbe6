"""Nearest neighbours, near-duplicates and layer similarity: exact and in blocks, on any device.

Only `RowIndex`, an index of faiss, is approximate: it misses some of the nearest rows.

row_vectors.py                rows of a layer as vectors on a device
nearest_neighbours.py         nearest rows by exact search
faiss_index.py                nearest rows by an index, with a measured recall and in less time
duplicates.py                 groups of near-duplicates
representation_similarity.py  linear CKA and RSA between layers
"""

from __future__ import annotations

from featx.analysis.similarity.duplicates import duplicate_groups
from featx.analysis.similarity.faiss_index import RowIndex
from featx.analysis.similarity.nearest_neighbours import Neighbours, nearest_rows
from featx.analysis.similarity.representation_similarity import (
    LayerSimilarity,
    layer_similarity,
    linear_cka,
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
