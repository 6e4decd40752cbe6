"""Answers from features: statistics, attributions, probes, predictions, neighbours, similarity.

In: a finished store, or a config whose run is computed by `featx.pipeline`.
Out: files next to the store (`stats.h5`, `probe.json`, heads, heat maps) and result objects.
Names for others: `probe.run`, `statistics.run`, `prediction.predict`,
`attribution.attributor.Attributor`, all of `gradients` and `similarity`,
`reproducibility.recheck_rows`, and `engine_specs`, which says which engine computes what.
"""
