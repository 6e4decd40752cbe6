"""Helpers without reference to features: machine limits, devices, console, processes, text.

In: numbers, texts, paths and tensors. Out: the same; messages go to stderr, results to stdout.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
