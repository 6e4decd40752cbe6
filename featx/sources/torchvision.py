"""Source data=torchvision: data sets that torchvision.datasets has downloaded before.

Nothing is downloaded here. torchvision unpickles the files of CIFAR only after it has verified
their checksums.
"""

from __future__ import annotations

import json
import os
import shlex
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from featx.config import options
from featx.errors import ConfigError, DataError, nearest
from featx.sources.base import FolderSource
from featx.sources.labels import Labels, from_numbers
from featx.sources.pixel_encoding import encode_pixels
from featx.sources.registry import SOURCES, LinkOptions, source_member
from featx.sources.row_keys import (
    numbered_keys,
    parse_numbered_key,
    sampled_content_tags,
    sorting_order,
)
from featx.types import UNTOLD, Listing, Source


class _Kind(NamedTuple):
    """A class of torchvision.datasets: its splits, and attributes of the files and labels.

    One without files holds its pixels, and takes a parameter `train` in place of `split`.
    """

    splits: tuple[str, ...] = ("train", "test")
    files: str | None = None
    labels: str = "targets"


KINDS = {
    "CIFAR10": _Kind(),
    "CIFAR100": _Kind(),
    "MNIST": _Kind(),
    "FashionMNIST": _Kind(),
    "Flowers102": _Kind(("train", "val", "test"), "_image_files", "_labels"),
    "Food101": _Kind(("train", "test"), "_image_files", "_labels"),
    "OxfordIIITPet": _Kind(("trainval", "test"), "_images", "_labels"),
}
"""Supported classes of torchvision.datasets other than ImageFolder."""
_FOLDER = "ImageFolder"
"""The class that is read as a plain folder, without torchvision."""


@options("data")
class TorchvisionOptions(LinkOptions):
    """Options of data=torchvision."""

    root_help: ClassVar[str] = "data.root=DIR, the folder that torchvision downloaded to"

    name: str = "torchvision"
    dataset: str | None = None
    """Name of the class, such as CIFAR10."""
    split: str | None = None
    """train, test, or another split of the data set; null takes the first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dataset:
            raise ConfigError("data=torchvision needs data.dataset=CIFAR10, the name of the class.")


def open_source(config: TorchvisionOptions) -> Source:
    """Open the split data.split of the data set data.dataset below data.root.

    Raises DataError if the data set is not supported or not there, or has no such split.
    """
    root, dataset_name = config.path, config.dataset or ""
    if dataset_name == _FOLDER:  # class folders of image files, which need no torchvision
        return FolderSource(root / (config.split or ""), config.follow_links)
    kind = KINDS.get(dataset_name)
    if kind is None:
        names = [*KINDS, _FOLDER]
        raise DataError(
            f"data.dataset={dataset_name}: expected one of {', '.join(names)}."
            f"{nearest(dataset_name, names)} From Python, featx.extract takes any of "
            "torchvision.datasets as its first argument."
        )
    split = config.split or kind.splits[0]
    if split not in kind.splits:
        raise DataError(f"data.split={split}: {dataset_name} has {' and '.join(kind.splits)}.")
    arguments = {"split": split} if kind.files else {"train": split == "train"}
    dataset = _construct(dataset_name, root, arguments)
    origin = f"{dataset_name} {split}"
    labels = np.asarray(getattr(dataset, kind.labels))
    labelled = from_numbers(labels, origin, names=getattr(dataset, "classes", None))
    if len(labels) != len(dataset):
        raise DataError(f"{origin} in {root} has {len(dataset)} images and {len(labels)} labels.")
    if kind.files is None:
        return _Pixels(np.asarray(dataset.data), labelled)
    paths = [os.fsencode(path) for path in getattr(dataset, kind.files)]
    return _Files(FolderSource(root, config.follow_links), paths, labelled)


def _construct(name: str, root: Path, arguments: Mapping[str, object]) -> Any:
    """Construct a data set of torchvision without downloading it."""
    from torchvision import datasets

    make: Callable[..., object] = getattr(datasets, name)
    try:
        return make(str(root), download=False, **arguments)
    except (RuntimeError, OSError, ValueError, LookupError, AssertionError) as error:
        texts = {"root": str(root), **arguments, "download": True}
        given = ", ".join(
            f"{key}={json.dumps(value) if isinstance(value, str) else value}"
            for key, value in texts.items()
        )
        code = f"from torchvision.datasets import {name}; {name}({given})"
        raise DataError(
            f"data.root={root} (taken from {Path.cwd()}) has no {name}, or not all of it. "
            f"Download it once with\n  python -c {shlex.quote(code)}"
        ) from error
    except ImportError as error:
        raise DataError(f"torchvision cannot open {name}: {error}.") from error


class _Pixels:
    """A data set that holds its pixels in memory; keys are row numbers."""

    def __init__(self, pixels: npt.NDArray[np.uint8], labels: Labels) -> None:
        self._pixels = pixels
        self._labels = labels

    def listing(self) -> Listing:
        """List all rows with content tags of a sample of the rows."""
        count = len(self._pixels)
        labels, classes, _ = self._labels
        content_tags = sampled_content_tags(count, lambda row: self._pixels[row].tobytes())
        return Listing(numbered_keys(count), labels, classes, {}, content_tags)

    def read(self, key: bytes) -> bytes:
        return encode_pixels(self._pixels[parse_numbered_key(key)])

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
        """Return states whose tag is the CRC-32 of the pixels of the row."""
        states = np.full(len(keys), UNTOLD)
        states["tag"] = [
            zlib.crc32(self._pixels[parse_numbered_key(key)].tobytes()) for key in keys.tolist()
        ]
        return states


class _Files:
    """A data set of image files; keys are their paths below data.root."""

    reads_in_decoders = True

    def __init__(self, folder: FolderSource, paths: list[bytes], labels: Labels) -> None:
        base = os.fsencode(folder.root)
        keys = np.array([os.path.relpath(path, base) for path in paths], dtype=np.bytes_)
        order = sorting_order(keys, f"{folder.root} names some files")
        self._keys, self._labels, self._classes = keys[order], labels.labels[order], labels.classes
        self._folder = folder
        self.states = folder.states

    def listing(self) -> Listing:
        return Listing(self._keys, self._labels, self._classes)

    def read(self, key: bytes) -> bytes:
        return self._folder.read_inside(key)


SOURCES.register(
    source_member(
        "torchvision",
        "A data set that torchvision.datasets has downloaded before.",
        TorchvisionOptions,
        open_source,
    )
)
