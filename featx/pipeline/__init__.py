"""One run, from its config to its committed parts, in this process or in many.

In: a checked `Config` and an `EngineSpec`, which says which engine computes the rows.
Out: parts of a store or of statistics, committed; the summary of the run.
Names for others: `extraction.run_extraction`, `run_context.build_run_context`, `loop.run_parts`
with its protocol `BatchSink`, `run_target`, `run_observer.RunObserver`, `executors`.
"""
