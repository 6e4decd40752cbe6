"""Nearest neighbours, near-duplicates and similarity of layers: in blocks, on any device.

In: rows of a layer as vectors, read from one store or from two.
Out: nearest rows of each row, groups of near-duplicates, retrieval metrics of the classes, scores
of pairs of layers (CKA, RSA, SVCCA, Procrustes), and distances of data sets (KID, Fréchet).
Names for others: those in `__init__.pyi`.
The search for neighbours is exact. Only `RowIndex`, an index of faiss, is approximate: it misses
some of the nearest rows.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
