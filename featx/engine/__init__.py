"""The only inference loop: device, precision, compilation, replicas and their proofs.

In: a `Backbone` and batches of images, (B, 3, H, W) uint8 or normalised float32.
Out: a mapping from dataset name to the reduced values, (B, ...), in the dtype of the store.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
