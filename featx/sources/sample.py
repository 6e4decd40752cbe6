"""Source data=sample: a few small images in several formats that are part of the featx package."""

from __future__ import annotations

from featx.base import shipped_folder
from featx.config import DataConfig
from featx.sources.base import FolderSource
from featx.sources.registry import SOURCES, source_member
from featx.types import Source


def open_source(config: DataConfig) -> Source:
    """Open the folder data/sample."""
    return FolderSource(shipped_folder("data") / "sample")


SOURCES.register(
    source_member(
        "sample",
        "A few small images in several formats that come with featx.",
        DataConfig,
        open_source,
    )
)
