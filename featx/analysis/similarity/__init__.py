"""Which rows of a store are alike, and which layers: exact, block by block, on any device.

An index of faiss, which misses some nearest rows, only where it is asked for.

row_vectors.py                the ok rows of a layer as vectors on a device
nearest_neighbours.py         nearest rows
faiss_index.py                nearest rows by an index: a measured share of them, in less time
duplicates.py                 groups of rows that are nearly the same
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
