"""data=folder: the images below a folder of the user's own."""

from __future__ import annotations

from pathlib import Path

from featx.data.base import FolderSource
from featx.options import DataConfig
from featx.types import Source


def open_source(config: DataConfig) -> Source:
    """The folder data.root, as the user's shell sees it."""
    assert config.root is not None
    return FolderSource(Path(config.root).expanduser(), config.follow_links)
