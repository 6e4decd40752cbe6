"""job=probe: what the features of a store can tell of its labels."""
