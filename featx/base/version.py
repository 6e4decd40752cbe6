"""The version of featx, for the package index, `--version` and every store."""

__version__ = "0.1.0"
