"""Options of job=export that every format has."""

from __future__ import annotations

from featx.config.checks import options


@options("export")
class ExportConfig:
    """Files that job=export writes; a format with options of its own has them in a subclass."""

    format: str = "npy"
    """File format of the export."""
    ok_only: bool = False
    """Leave failed rows out. Otherwise they are exported with their status, and their features are
    NaN."""
    incomplete: bool = False
    """Export a store that is not complete, with NaN and status 255 in rows that are missing."""
