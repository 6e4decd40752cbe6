"""The inference loop: precision, compilation, replicas, devices and their proofs."""
