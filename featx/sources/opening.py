"""Opens the data set that a config or a Python program gives."""

from __future__ import annotations

import importlib
from pathlib import Path

from featx.config import DataConfig
from featx.sources.registry import SOURCES
from featx.types import BoxReader, Source


def open_source(config: DataConfig) -> Source:
    """Open the data set that the option group `data` describes.

    Args:
        config: options of the group; `name` selects the kind, `boxes` adds a table of boxes.

    Raises:
        ConfigError: there is no source of this name.
        DataError: the data set does not exist or cannot be read.
        MissingExtraError: the kind needs a package that is not installed.
    """
    return with_boxes(SOURCES.get(config.name).open(config), config)


def with_boxes(source: Source, config: DataConfig) -> Source:
    """Apply the option data.boxes to a source.

    Returns:
        a `BoxedSource`, or a `ReadBoxes` if the source reads boxes itself, with one row per box; or
        `source` itself if data.boxes is not set.
    """
    if config.boxes is None:
        return source
    from featx.sources.boxes import BoxedSource, ReadBoxes

    boxed = BoxedSource(source, Path(config.boxes).expanduser())
    return ReadBoxes(boxed, source) if isinstance(source, BoxReader) else boxed


def source_of(data: object) -> Source:
    """Turn a data set object of a Python program into a Source.

    Args:
        data: a Source, which is checked but otherwise used as it is, or a map-style data set
            (`__len__` and `__getitem__`), which is wrapped.

    Raises:
        DataError: the object is neither.
    """
    source: Source = importlib.import_module("featx.sources.python").source_of_object(data)
    return source
