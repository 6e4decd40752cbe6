"""Statistics of a layer over a data set: their computation, files, PCA and Fréchet distance."""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
