"""Executors: where the parts of a run are computed; one module per executor.

Workers form no process group: each computes whole parts with the choices of the driver and commits
them itself. They share nothing but the folder of the run. Without workers, which executor=local
does by default, the process of the command computes all parts and no executor is asked.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
