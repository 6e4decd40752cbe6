"""Nearest neighbours, near-duplicates and layer similarity: exact and in blocks, on any device.

Only `RowIndex`, an index of faiss, is approximate: it misses some of the nearest rows.

row_vectors.py                rows of a layer as vectors on a device
nearest_neighbours.py         nearest rows by exact search
faiss_index.py                nearest rows by an index, with a measured recall and in less time
retrieval.py                  recall@k and mean average precision of the classes
duplicates.py                 groups of near-duplicates
representation_similarity.py  linear CKA and RSA between layers
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
