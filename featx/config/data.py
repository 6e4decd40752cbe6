"""The key `data`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated

from featx.config.checks import MAY_BE_EMPTY, check_choice, column_name_problem
from featx.errors import ConfigError

PACKAGED_DATA = ("textiles", "sample")
DATA_KINDS = (
    "folder",
    "webdataset",
    "table",
    "hdf5",
    "torchvision",
    "huggingface",
    "video",
    *PACKAGED_DATA,
    "python",
)
_ROOTS = {
    "folder": "data.root=DIR, the folder of your images",
    "webdataset": "data.root=SHARDS: a folder of tars, one tar, or a pattern such as "
    "'data.root=\"train-{000..012}.tar\"'",
    "table": "data.root=FILES: a .csv or .parquet file, a folder of them, or a pattern such as "
    "'data.root=\"train-*.parquet\"'",
    "hdf5": "data.root=FILE, the HDF5 file",
    "torchvision": "data.root=DIR, the folder that torchvision downloaded to",
    "huggingface": "data.root=DIR, the folder that save_to_disk wrote",
    "video": "data.root=DIR, the folder of your videos, or one of them",
}
_OF_DATA = {
    "root": tuple(_ROOTS),
    "follow_links": ("folder", "webdataset", "table", "torchvision", "huggingface", "video"),
    "extensions": ("folder", "webdataset", "video"),
    "depth": ("folder",),
    "classes": ("folder",),
    "image_root": ("table",),
    "path_column": ("table", "huggingface"),
    "label_column": ("table", "huggingface"),
    "columns": ("table",),
    "dataset": ("hdf5", "torchvision"),
    "labels": ("hdf5",),
    "split": ("torchvision", "huggingface"),
    "every_s": ("video",),
}
"""Keys of some kinds of data only."""


@dataclass
class DataConfig:
    """The images and the policy for odd ones."""

    name: str = "textiles"
    """Taken from the key `data` itself."""
    root: str | None = None
    """Where the images are: a folder, tar shards or their URLs, tables, an HDF5 file."""
    follow_links: bool = False
    """Follow symbolic links that lead out of data.root, and paths of a table that do."""
    extensions: list[str] | None = None
    """Endings of the names that count as images, such as [jpg,png], for data=folder and
    data=webdataset, or as videos, for data=video; null takes every format that featx reads."""
    depth: int | None = None
    """Folders between data.root and an image at the most, for data=folder: 0 takes images in
    data.root itself, 1 also those in class folders; null takes every depth."""
    classes: str | None = None
    """A JSON or CSV file, folder name -> class name or number, for data=folder."""
    image_root: str | None = None
    """The folder that paths of data=table start from; null is the folder of the table, of several
    the one that data.root names or its pattern begins with."""
    path_column: str | None = None
    """The column of paths or of image bytes, for data=table and data=huggingface; null takes the
    column path, else the column image."""
    label_column: Annotated[str | None, MAY_BE_EMPTY] = None
    """The column of labels, for data=table and data=huggingface; null takes the column label where
    there is one, an empty name takes none."""
    columns: list[str] | None = None
    """Further columns of data=table, such as [patient,slide], that the store carries row for row;
    null takes none."""
    dataset: str | None = None
    """For data=hdf5 the dataset that holds the images, such as /images; for data=torchvision the
    name of the class, such as CIFAR10."""
    labels: str | None = None
    """The dataset that holds the labels, for data=hdf5."""
    split: str | None = None
    """For data=torchvision train, test, or another part that the data set has; for
    data=huggingface one that was saved. null takes the first."""
    every_s: float = 1.0
    """Seconds from one frame of a video to the next, for data=video."""
    boxes: str | None = None
    """A CSV file with the columns path, x, y, width, height and, for labels, label: each line makes
    a row of that region of a picture (tiles, detections)."""
    exif: str = "apply"
    """apply turns a picture upright as its EXIF orientation asks, ignore leaves it."""
    background: str = "white"
    """The colour under transparent pixels: a name or #rrggbb."""
    max_pixels: int = 89_478_485
    """A picture of more pixels is a recorded failure (too large), found before it is decoded."""
    timeout_s: float | None = 30
    """Seconds that decoding a picture may take; where it takes longer, also in a process of its
    own, it is a recorded failure (timeout). null waits for ever."""
    limit: int | None = None
    """Only the first rows of the listing."""

    def __post_init__(self) -> None:
        check_choice("data", self.name, DATA_KINDS)
        check_choice("data.exif", self.exif, ("apply", "ignore"))
        if self.name in _ROOTS and not self.root:
            raise ConfigError(f"data={self.name} needs {_ROOTS[self.name]}.")
        defaults = {f.name: f.default for f in fields(self)}
        for key, owners in _OF_DATA.items():
            if getattr(self, key) != defaults[key] and self.name not in owners:
                names = " or ".join(f"data={owner}" for owner in owners)
                first = "; add data=folder" if key == "root" else ""
                raise ConfigError(
                    f"data.{key} has an effect with {names} only{first} (now data={self.name})."
                )
        if self.name == "hdf5" and not self.dataset:
            raise ConfigError("data=hdf5 needs data.dataset=/images, the dataset of the images.")
        if self.name == "torchvision" and not self.dataset:
            raise ConfigError("data=torchvision needs data.dataset=CIFAR10, the name of the class.")
        if self.columns is not None and (problem := column_name_problem(self.columns)):
            raise ConfigError(f"data.columns: {problem}")
        if self.extensions is not None and not self.extensions:
            raise ConfigError("data.extensions is empty: no name would count as an image.")
        if self.depth is not None and self.depth < 0:
            raise ConfigError(f"data.depth={self.depth}: expected a whole number of at least 0.")
        if not 0.001 <= self.every_s < math.inf:
            raise ConfigError(f"data.every_s={self.every_s}: expected seconds, 0.001 or more.")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(
                f"data.timeout_s={self.timeout_s}: expected seconds above 0, or null for no limit."
            )
        for key in ("max_pixels", "limit"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"data.{key}={value}: expected a whole number of at least 1.")
