"""The version of featx, which the package index, `--version` and every store name."""

__version__ = "0.1.0"
