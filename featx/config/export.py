"""Options of job=export that every format has."""

from __future__ import annotations

import re

from featx.config.checks import options
from featx.errors import ConfigError

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


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
    push: str | None = None
    """Data set repository of the Hugging Face Hub, owner/name, to which the complete export is
    uploaded (extra huggingface, token as of `hf auth login`). A new one is private."""

    def __post_init__(self) -> None:
        if self.push is not None and not _REPOSITORY.fullmatch(self.push):
            raise ConfigError(
                f"export.push={self.push}: expected the name of a repository, such as me/photos."
            )
