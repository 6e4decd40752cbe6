"""One forward pass seen from inside: trace it, select layers, attach hooks, reduce tensors.

In: a `torch.nn.Module` and names of layers. Out: the captured tensors, reduced and cast while the
pass runs; the module is left as it was found.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
