"""Linear, ridge and kNN probes: classifiers on stored features that predict labels (job=probe)."""
