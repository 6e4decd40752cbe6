"""Answers from features: statistics, attributions, probes, predictions, neighbours, similarity.

In: a finished store, or a config whose run is computed by `featx.pipeline`.
Out: files next to the store (`stats.h5`, `probe.json`, heads, heat maps) and result objects.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
