"""Longer measurements of scripts/benchmark, a file each, and the peers they run."""
