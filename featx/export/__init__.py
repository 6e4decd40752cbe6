"""A store in other forms: file formats, the HTML report, TensorBoard.

In: a `FeatureStore` and the options of `export` or `report`. Out: files in a folder of their own.
Names for others: those in `__init__.pyi`.
A format subclasses `base.Format` and writes its files into a `base.ExportFolder`;
`selection.ExportSelection` gives it the rows in blocks that fit in memory, and `run` does the
bookkeeping.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
