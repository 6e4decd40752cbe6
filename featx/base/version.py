"""The version of featx, for the package index, `--version` and every store."""

from __future__ import annotations

__version__ = "0.1.0"
