"""data=sample: a few small pictures of several formats that travel with featx itself."""

from __future__ import annotations

from featx.base.paths import shipped
from featx.config import DataConfig
from featx.sources.base import FolderSource
from featx.types import Source


def open_source(config: DataConfig) -> Source:
    """The pictures in data/sample, made by scripts/make_sample_images."""
    return FolderSource(shipped("data") / "sample")
