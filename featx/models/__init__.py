"""Backbones: a module together with its preprocessing and the identity of its weights.

In: a `ModelConfig` and a seed. Out: a frozen `Backbone` in eval mode, on the CPU.
`model=NAME` needs no YAML: the packaged names come first, then torchvision's, then timm's.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
