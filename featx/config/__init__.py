"""The options: one dataclass for each group, with its defaults, checks and documentation.

In: options from YAML, the command line or Python. Out: a checked `run_config.Config`, which holds
one dataclass of each group. A default is written at its field and nowhere else; the options
of a member of a family, such as a source, are in the file of that member.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
