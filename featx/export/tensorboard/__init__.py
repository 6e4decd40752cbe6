"""TensorBoard output of a run: events, histograms, graph and embedding projector."""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
