"""Source data=hdf5: images in a dataset of an HDF5 file, as pixels or as encoded bytes.

The file may come from an untrusted origin: as for stores, links to other places, virtual and
external datasets, and datasets that claim more data than the file holds are rejected before
anything is read.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import numpy.typing as npt

from featx.config import DataConfig
from featx.errors import ConfigError, DataError, StoreError
from featx.sources.base import MAX_FILE_BYTES, state_of_files
from featx.sources.labels import Labels, from_names, from_numbers
from featx.sources.pixel_encoding import encode_numbers, encode_pixels
from featx.sources.registry import SOURCES, source_member
from featx.sources.row_keys import numbered_keys, parse_numbered_key, sampled_content_tags
from featx.store import codecs, layout, open_hdf5, open_plain_dataset
from featx.types import ImageFault, Listing, Source, Status

_CACHE_BYTES = 64 << 20
"""Size of the HDF5 chunk cache in bytes. A chunk that holds many images is then decompressed once
when rows are read in order."""


@dataclass
class Hdf5Options(DataConfig):
    """Options of data=hdf5."""

    root_help: ClassVar[str] = "data.root=FILE, the HDF5 file"

    name: str = "hdf5"
    dataset: str | None = None
    """Dataset that holds the images, such as /images."""
    labels: str | None = None
    """Dataset that holds the labels; null takes none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dataset:
            raise ConfigError("data=hdf5 needs data.dataset=/images, the dataset of the images.")


def open_source(config: Hdf5Options) -> Source:
    """Open the dataset data.dataset of the file data.root."""
    return Hdf5Source(config.path, config.dataset or "", config.labels)


class Hdf5Source:
    """Rows of an HDF5 dataset; keys are row numbers.

    Args:
        file: HDF5 file.
        dataset: name of a dataset: (N, H, W, 3|1), (N, 3|1, H, W) or (N, H, W) uint8 pixels; other
            numbers or channels (N, H, W), (N, H, W, C) or (N, C, H, W), for model.transform.scale;
            or (N,) encoded images, as variable-length uint8 or as fixed-length bytes padded with
            zeros.
        labels: name of a dataset (N,) of whole numbers or text, or None for no labels.
    """

    def __init__(self, file: Path, dataset: str, labels: str | None) -> None:
        self._path = file
        self._name = dataset.strip("/")
        self._label_name = labels.strip("/") if labels else None
        self._images: Any = None
        self._first_channels = False
        self._lock = threading.RLock()

    def listing(self) -> Listing:
        """Check the datasets and list all rows.

        Raises:
            DataError: the file or a dataset cannot be read, or has an unexpected layout.
        """
        file = self._open()
        self._images = self._plain(file, self._name)
        self._first_channels = _channels_come_first(self._images, f"{self._path}: /{self._name}")
        count = len(self._images)
        if not count:
            raise DataError(f"{self._path}: /{self._name} has no rows.")
        labels, classes = self._labels(file, count)
        content_tags = sampled_content_tags(count, self._content_tag)
        return Listing(numbered_keys(count), labels, classes, {}, content_tags)

    def read(self, key: bytes) -> bytes:
        """Read one row as an encoded image; pixels become a PPM or PGM, or a file of numpy.save.

        Raises:
            ImageFault: the row is damaged or empty.
            OSError: the file cannot be read at the moment.
        """
        with self._lock:
            if self._images is None:
                self.listing()
        row = parse_numbered_key(key)
        try:
            value = self._images[row : row + 1]
        except layout.UNREADABLE as error:
            if not layout.is_damage(error):
                raise
            raise ImageFault(
                Status.DECODE_ERROR,
                f"row {row} cannot be read: {str(error)[:150]}",
                type(error).__name__,
            ) from error
        if self._images.ndim > 1:
            if not _is_rgb(self._images):
                return encode_numbers(value[0])
            pixels = value[0].transpose(1, 2, 0) if self._first_channels else value[0]
            return encode_pixels(pixels)
        # Fixed-length bytes are read as uint8: numpy strips trailing zeros of an 'S' value, which
        # may belong to the image.
        whole = value[0] if value.dtype == object else value.view(np.uint8)
        if not len(whole) or not whole.any():
            raise ImageFault(Status.EMPTY, f"row {row} has no bytes")
        return np.asarray(whole, dtype=np.uint8).tobytes()

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
        """Return the state of the file for every row."""
        return state_of_files([self._path], len(keys))

    def _content_tag(self, row: int) -> bytes:
        """Return the bytes to hash for a content tag; an error message for an unreadable row."""
        try:
            return self.read(b"%d" % row)
        except ImageFault as fault:
            return str(fault).encode()

    def _open(self) -> h5py.File:
        """Open the file for reading.

        Raises:
            DataError: it is missing, or not a valid HDF5 file.
        """
        try:
            with self._path.open("rb"):
                pass
            file = open_hdf5(self._path, rdcc_nbytes=_CACHE_BYTES)
        except StoreError as error:
            raise DataError(str(error)) from error
        except OSError as error:
            raise DataError(
                f"data.root={self._path} cannot be read as HDF5: {error.strerror or error} (taken "
                f"from {Path.cwd()})."
            ) from error
        codecs.load_plugin()
        return file

    def _plain(self, file: h5py.File, name: str) -> h5py.Dataset:
        """Return a dataset that is stored in this file.

        Raises:
            DataError: there is no such dataset, or it refers to other files.
        """
        try:
            return open_plain_dataset(file, name)
        except StoreError as error:
            names = ", ".join(f"/{key}" for key in list(file)[:20])
            raise DataError(f"{error} At the top of the file: {names or 'nothing'}.") from error

    def _labels(self, file: h5py.File, count: int) -> Labels:
        """Read the labels of `count` rows.

        Raises:
            DataError: the dataset of labels has another length or type.
        """
        if self._label_name is None:
            return np.full(count, -1, dtype=np.int64), ()
        origin = f"{self._path}: /{self._label_name}"
        dataset = self._plain(file, self._label_name)
        if dataset.shape != (count,):
            raise DataError(
                f"{origin} is {dataset.shape}; expected ({count},), one for each image."
            )
        values = dataset[:]
        if values.dtype.kind in "iu":
            return from_numbers(values, origin)
        if values.dtype.kind == "S" or h5py.check_string_dtype(dataset.dtype) is not None:
            return from_names(os.fsdecode(value) for value in values.tolist())
        raise DataError(f"{origin} is {values.dtype}; expected whole numbers or text.")


def _channels_come_first(images: h5py.Dataset, origin: str) -> bool:
    """Check the layout of the images and return whether it is (N, C, H, W).

    Raises:
        DataError: the shape or dtype is not supported, or the channel axis is ambiguous.
    """
    shape, dtype = images.shape, images.dtype
    if images.ndim == 1 and (
        h5py.check_vlen_dtype(dtype) == np.uint8
        or (dtype.kind == "V" and dtype.fields is None)
        or dtype.kind == "S"
    ):
        return False
    expected = (
        "(N, H, W, 3|1), (N, 3|1, H, W) or (N, H, W) uint8, or (N,) encoded bytes as uint8 of "
        "variable length or as fixed-length bytes; with model.transform.scale any numbers "
        "(N, H, W), (N, H, W, C) or (N, C, H, W)"
    )
    if images.ndim not in (3, 4) or dtype.kind not in "biuf":
        raise DataError(f"{origin} is {shape} {dtype}; expected {expected}.")
    if int(np.prod(shape[1:])) > MAX_FILE_BYTES:
        raise DataError(f"{origin} is {shape}: over {MAX_FILE_BYTES} bytes an image.")
    if images.ndim == 3 or not _is_rgb(images):
        return False
    last, first = shape[3] in (1, 3), shape[1] in (1, 3)
    if last and first:
        why = "the channels may come first or last"
        raise DataError(f"{origin} is {shape}: {why}; expected {expected}.")
    return first


def _is_rgb(images: h5py.Dataset) -> bool:
    """Return whether rows are images of 8 bits with 1 or 3 channels; others are read as numbers."""
    if images.dtype != np.uint8:
        return False
    return images.ndim == 3 or images.shape[3] in (1, 3) or images.shape[1] in (1, 3)


SOURCES.register(
    source_member(
        "hdf5",
        "Images in a dataset of an HDF5 file, as pixels or encoded.",
        Hdf5Options,
        open_source,
    )
)
