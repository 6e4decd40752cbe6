"""A store as a torch Dataset: rows, tokens, and orders of both that suit a disk.

In: a store. Out: rows in float32 unless `dtype` says otherwise (`FeatureDataset`), and batches of
tokens in the dtype of the store (`TokenDataset`).
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
