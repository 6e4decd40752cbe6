"""The only inference loop: device, precision, compilation, replicas and their proofs.

In: a `Backbone` and batches of images, (B, 3, H, W) uint8 or normalised float32.
Out: a mapping from dataset name to the reduced values, (B, ...), in the dtype of the store.
Names for others: `engine.Engine` and `engine.Compute`, `auto_settings.AutoSettings`,
`batch_parallelism.BatchParallelism`, `row_checks`, `batch_independence`.
"""
