"""The options: one dataclass for each group, with its defaults, checks and documentation.

In: options from YAML, the command line or Python. Out: a checked `run_config.Config`, which holds
one dataclass of each group. A default stands at its field and nowhere else; members of families,
such as sources, have their own options beside them.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
