"""Which rows of a store are alike, and which layers: exact, block by block, on any device.

An index of faiss, which misses some nearest rows, only where it is asked for.

vectors.py          the ok rows of a layer as vectors on a device
neighbours.py       nearest rows
index.py            nearest rows by an index: a measured share of them, in less time
duplicates.py       groups of rows that are nearly the same
representation.py   linear CKA and RSA between layers
"""

from __future__ import annotations

from featx.similarity.duplicates import duplicate_groups
from featx.similarity.index import RowIndex
from featx.similarity.neighbours import Neighbours, nearest_rows
from featx.similarity.representation import LayerLikeness, layer_likeness, linear_cka, rsa

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
