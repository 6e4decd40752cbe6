"""Linear, ridge and kNN probes: classifiers on stored features that predict labels (job=probe)."""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
