"""One run, from its config to its committed parts, in this process or in many.

In: a checked `Config` and an `EngineSpec`, which says which engine computes the rows.
Out: parts of a store or of statistics, committed; the summary of the run.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
