"""One run from its config to its store: prepared, resolved, computed part by part, finished."""
