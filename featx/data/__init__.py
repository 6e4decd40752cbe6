"""Where images come from: one file per kind of data set, each of which only lists and reads."""

from __future__ import annotations

import importlib

from featx.options import DataConfig
from featx.types import Source

_HOME = {
    "folder": "folder",
    "webdataset": "webdataset",
    "table": "table",
    "hdf5": "hdf5",
    "torchvision": "torchvision",
    "huggingface": "huggingface",
    "textiles": "packaged",
    "sample": "sample",
    "python": "python",
}


def open_source(config: DataConfig) -> Source:
    """The data set a config asks for.

    Raises:
        DataError: it is not there.
        MissingExtraError: it comes with a package that is not installed.
    """
    module = importlib.import_module(f"featx.data.{_HOME[config.name]}")
    source: Source = module.open_source(config)
    return source


def source_of(given: object) -> Source:
    """A data set that Python gave as an object: a Source as it is, else a map-style one wrapped.

    Raises:
        DataError: it is neither.
    """
    source: Source = importlib.import_module("featx.data.python").source_of_object(given)
    return source
