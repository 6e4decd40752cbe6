"""A store in other forms: seven file formats, the HTML report, TensorBoard.

In: a `FeatureStore` and the options of `export` or `report`. Out: files in a folder of their own.
Names for others: `run.run_export`, `report.run.run_report`, `tensorboard.events.RunEvents`.
A format subclasses `base.Format`, which lists its `base.File` objects; `selection.Selection` gives
it the rows in blocks that fit in memory, and `run` does the bookkeeping.
"""
