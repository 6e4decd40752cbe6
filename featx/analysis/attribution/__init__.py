"""Attribution: heat maps of the pixels that a prediction depends on, and contact sheets of them."""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
