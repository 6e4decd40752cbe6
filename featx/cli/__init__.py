"""The command line: overrides are composed to a config, and layers are printed as a table.

In: the arguments of `python -m featx` and the YAML files of conf/.
Out: the composed config, the help text, and tables as text.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
