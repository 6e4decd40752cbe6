"""Gradients in training: clipping by value or norm, alarms, and a log by layer."""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
