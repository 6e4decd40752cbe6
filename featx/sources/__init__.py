"""Sources: one module for each kind of data set, which lists and reads images.

In: a `DataConfig`. Out: a `Source`: its `listing()` gives keys, labels and columns of all rows, its
`read(key)` the encoded bytes of one image.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
