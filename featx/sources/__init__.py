"""Where images come from: one module for each kind of data set, which lists and reads.

In: a `DataConfig`. Out: a `Source`: its `listing()` gives keys, labels and columns of all rows, its
`read(key)` the encoded bytes of one image.
Names for others: `open_source`, `source_of` (an object from Python), `with_boxes`,
`base.FolderSource`, `key_forms`.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from featx.config import DataConfig
from featx.types import Source

_HOME = {
    "folder": "folder",
    "webdataset": "webdataset",
    "table": "table",
    "hdf5": "hdf5",
    "torchvision": "torchvision",
    "huggingface": "huggingface",
    "video": "video",
    "textiles": "textiles",
    "sample": "sample",
    "python": "python",
}


def open_source(config: DataConfig) -> Source:
    """The data set a config asks for.

    Raises:
        DataError: it is not there.
        MissingExtraError: it comes with a package that is not installed.
    """
    module = importlib.import_module(f"featx.sources.{_HOME[config.name]}")
    source: Source = module.open_source(config)
    return with_boxes(source, config)


def with_boxes(source: Source, config: DataConfig) -> Source:
    """A data set's regions as data.boxes names them, or the data set itself."""
    if config.boxes is None:
        return source
    from featx.sources.boxes import BoxedSource

    return BoxedSource(source, Path(config.boxes).expanduser())


def source_of(given: object) -> Source:
    """A data set that Python gave as an object: a Source as it is, else a map-style one wrapped.

    Raises:
        DataError: it is neither.
    """
    source: Source = importlib.import_module("featx.sources.python").source_of_object(given)
    return source
