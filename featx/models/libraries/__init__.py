"""Model libraries: each is one module that registers itself and builds the backbones of its models.

The modules are imported for `--help` and for every config, so that they import torch and the
library itself inside their functions only.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
