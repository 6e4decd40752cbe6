"""data=sample: a few small pictures of several formats that travel with featx itself."""

from __future__ import annotations

from featx.config import shipped
from featx.data.base import FolderSource
from featx.options import DataConfig
from featx.types import Source


def open_source(config: DataConfig) -> Source:
    """The pictures in data/sample, made by scripts/make_sample_images."""
    return FolderSource(shipped("data") / "sample")
