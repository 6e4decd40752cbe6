"""Loading of images: encoded bytes become batches, in processes that an image may crash or hang.

In: a `Source`, its `Listing`, and `Preprocess`, the preprocessing of the weights.
Out: `Batch` objects, (B, 3, H, W), in the order of the listing, with the failures of their rows.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
