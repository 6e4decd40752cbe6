"""Source data=hdf5: images in a dataset of an HDF5 file, as pixels or as encoded bytes.

The file may come from an untrusted origin: as for stores, links to other places, virtual and
external datasets, and datasets that claim more data than the file holds are rejected before
anything is read.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import h5py
import numpy as np
import numpy.typing as npt

from featx.base import name_text
from featx.config import MAY_BE_EMPTY, DataConfig, options
from featx.errors import ConfigError, DataError, MissingExtraError, StoreError, counted
from featx.sources.base import MAX_FILE_BYTES, state_of_files
from featx.sources.labels import Labels, from_names, from_numbers, looks_like_labels
from featx.sources.pixel_encoding import encode_numbers, encode_pixels
from featx.sources.registry import SOURCES, source_member
from featx.sources.row_keys import numbered_keys, parse_numbered_key, sampled_content_tags
from featx.store import codecs, layout, open_hdf5, open_plain_dataset
from featx.types import ImageFault, Listing, Source, Status

_CACHE_BYTES = 64 << 20
"""Size of the HDF5 chunk cache in bytes. A chunk that holds many images is then decompressed once
when rows are read in order."""

_MAX_NAMES = 100
"""Number of names at the top of a file that are searched for labels."""


@options("data")
class Hdf5Options(DataConfig):
    """Options of data=hdf5."""

    root_help: ClassVar[str] = "data.root=FILE, the HDF5 file"

    name: str = "hdf5"
    dataset: str | None = None
    """Dataset that holds the images, such as /images."""
    label_column: Annotated[str | None, MAY_BE_EMPTY] = None
    """Dataset that holds the labels; null takes none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dataset:
            raise ConfigError("data=hdf5 needs data.dataset=/images, the dataset of the images.")


def open_source(config: Hdf5Options) -> Source:
    """Open the dataset data.dataset of the file data.root."""
    return Hdf5Source(config.path, config.dataset or "", config.label_column)


class Hdf5Source:
    """Rows of an HDF5 dataset; keys are row numbers."""

    def __init__(self, file: Path, dataset: str, labels: str | None) -> None:
        self._path = file
        self._name = dataset.strip("/")
        self._label_name = labels.strip("/") if labels else None
        self._images: Any = None
        self._pixels: _PixelLayout | None = None
        self._unwritten = np.zeros(0, dtype=np.bool_)
        self._lock = threading.RLock()

    def listing(self) -> Listing:
        """Check the datasets and list all rows."""
        file = self._open()
        images = self._open_dataset(file, self._name)
        self._pixels = _pixel_layout(images, f"{self._path}: /{self._name}")
        count = len(images)
        if not count:
            raise DataError(f"{self._path}: /{self._name} has no rows.")
        self._unwritten = _unwritten_rows(images)
        self._images = images
        labels, classes, warnings = self._labels(file, count)
        return Listing(
            numbered_keys(count),
            labels,
            classes,
            content_tags=sampled_content_tags(count, self._content_tag),
            warnings=warnings,
            label_note="" if self._label_name else _label_note(file, count),
        )

    def read(self, key: bytes) -> bytes:
        """Read one row as an encoded image; pixels become a PPM or PGM, or a file of numpy.save."""
        with self._lock:
            if self._images is None:
                self.listing()
        row = parse_numbered_key(key)
        if self._unwritten[row]:
            raise ImageFault(
                Status.MISSING, f"row {row} was never written: HDF5 has no storage for its chunk"
            )
        try:
            value = self._images[row : row + 1]
        except layout.UNREADABLE as error:
            if not layout.is_damage(error):
                raise
            raise ImageFault.of(error, what=f"row {row} cannot be read: ") from error
        if self._pixels is not None:
            pixels = value[0].transpose(self._pixels.axes)
            return encode_pixels(pixels) if self._pixels.is_rgb else encode_numbers(pixels)
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
        return file

    def _open_dataset(self, file: h5py.File, name: str) -> h5py.Dataset:
        """Return a dataset that is stored in this file and whose filters are available."""
        try:
            dataset = open_plain_dataset(file, name, may_be_partial=True)
        except StoreError as error:
            names = ", ".join(f"/{key}" for key in list(file)[:20])
            raise DataError(f"{error} At the top of the file: {names or 'nothing'}.") from error
        _load_filters(dataset, f"{self._path}: /{name}")
        return dataset

    def _labels(self, file: h5py.File, count: int) -> Labels:
        if self._label_name is None:
            return Labels.none(count)
        origin = f"{self._path}: /{self._label_name}"
        dataset = self._open_dataset(file, self._label_name)
        # A vector of MATLAB is a matrix of one row or column.
        if dataset.size != count or max(dataset.shape, default=0) != count:
            raise DataError(
                f"{origin} is {dataset.shape}; expected ({count},), one for each image."
            )
        values = dataset[()].reshape(count)
        is_text = values.dtype.kind == "S" or h5py.check_string_dtype(dataset.dtype) is not None
        if dataset.attrs.get("MATLAB_class") in (b"char", "char") or not (
            is_text or values.dtype.kind in "biuf"
        ):
            raise DataError(f"{origin} is no dataset of whole numbers or text, but {values.dtype}.")
        unwritten = _unwritten_rows(dataset)
        if len(unwritten) < count:  # (1, N)
            unwritten = np.full(count, bool(unwritten.all()))
        if is_text:
            texts = zip(values.tolist(), unwritten.tolist(), strict=True)
            labels = from_names(None if absent else name_text(text) for text, absent in texts)
        else:
            labels = from_numbers(values, origin, unwritten)
        if not unwritten.any():
            return labels
        num_rows = counted(int(unwritten.sum()), "label was", "labels were")
        warning = f"{origin}: {num_rows} never written, so these rows have none"
        return labels._replace(warnings=(*labels.warnings, warning))


def _label_note(file: h5py.File, count: int) -> str:
    """Return which datasets at the top of a file could be labels of `count` images."""
    found = []
    for name in list(file)[:_MAX_NAMES]:
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.HardLink) and isinstance(entry := file[name], h5py.Dataset):
            is_vector = entry.size == count == max(entry.shape, default=0)
            if is_vector and looks_like_labels(name):
                found.append(f"/{name}")
    looks = f"; {', '.join(found)} looks like labels: data.label_column={found[0]}" if found else ""
    return f"data.label_column names no dataset{looks}"


@dataclass(frozen=True)
class _PixelLayout:
    """Order of the axes of rows that hold pixels."""

    is_rgb: bool
    axes: tuple[int, ...]


def _pixel_layout(images: h5py.Dataset, origin: str) -> _PixelLayout | None:
    """Check shape and dtype of the images and return the order of their axes.

    Returns the layout, or None for encoded images.
    """
    shape, dtype = images.shape, images.dtype
    if images.ndim == 1 and (
        h5py.check_vlen_dtype(dtype) == np.uint8
        or (dtype.kind == "V" and dtype.fields is None)
        or dtype.kind == "S"
    ):
        return None
    expected = (
        "(N, H, W, 3|1), (N, 3|1, H, W) or (N, H, W) uint8, or (N,) encoded bytes as uint8 of "
        "variable length or as fixed-length bytes; with model.transform.scale any numbers "
        "(N, H, W), (N, H, W, C) or (N, C, H, W)"
    )
    # MATLAB (save -v7.3) and Octave (save -hdf5) give HDF5 the axes of their arrays in reversed
    # order, as these are column-major.
    is_reversed = "MATLAB_class" in images.attrs or "OCTAVE_NEW_FORMAT" in images.parent.attrs
    if is_reversed:
        expected = (
            "of a file of MATLAB or Octave an array H x W x 3|1 x N or H x W x N of uint8, or with "
            "model.transform.scale of any numbers (permute brings the axes into this order)"
        )
    if images.ndim not in (3, 4) or dtype.kind not in "biuf" or 0 in shape[1:]:
        raise DataError(f"{origin} is {shape} {dtype}; expected {expected}.")
    if math.prod(shape[1:]) * dtype.itemsize > MAX_FILE_BYTES:
        raise DataError(f"{origin} is {shape}: over {MAX_FILE_BYTES} bytes an image.")
    axes = tuple(range(images.ndim - 1))
    axes = axes[::-1] if is_reversed else axes
    if images.ndim == 3 and shape[2] in (3, 4) and not is_reversed:
        raise DataError(
            f"{origin} is {shape}, which looks like one image; expected {expected}. "
            "Grey images of this width are (N, H, W, 1)."
        )
    if images.ndim == 3:
        return _PixelLayout(dtype == np.uint8, axes)
    row_shape = [shape[1 + axis] for axis in axes]
    first, last = row_shape[0] in (1, 3), row_shape[2] in (1, 3)
    if dtype != np.uint8 or not (first or last):
        return _PixelLayout(False, axes)
    if first and last:
        why = "the channels may come first or last"
        raise DataError(f"{origin} is {shape}: {why}; expected {expected}.")
    return _PixelLayout(True, (axes[1], axes[2], axes[0]) if first else axes)


def _unwritten_rows(dataset: h5py.Dataset) -> npt.NDArray[np.bool_]:
    """Return which rows lie, at least in part, in chunks that HDF5 has no storage for, (N,).

    HDF5 reads such a chunk as fill values, so a row of it would be a black image.
    """
    unwritten = np.zeros(len(dataset), dtype=np.bool_)
    if dataset.chunks is None:
        return unwritten
    per_axis = [-(-n // chunk) for n, chunk in zip(dataset.shape, dataset.chunks, strict=True)]
    if dataset.id.get_num_chunks() == math.prod(per_axis):
        return unwritten
    num_written = np.zeros(per_axis[0], dtype=np.int64)
    for chunk in _stored_chunks(dataset):
        num_written[chunk.chunk_offset[0] // dataset.chunks[0]] += 1
    is_partial = num_written < math.prod(per_axis[1:])
    return np.repeat(is_partial, dataset.chunks[0])[: len(dataset)]


def _stored_chunks(dataset: h5py.Dataset) -> list[h5py.h5d.StoreInfo]:
    """Return offset, filter mask and address of every chunk that HDF5 has storage for."""
    if not hasattr(dataset.id, "chunk_iter"):  # HDF5 before 1.12.3; each call walks the index
        return [dataset.id.get_chunk_info(i) for i in range(dataset.id.get_num_chunks())]
    chunks: list[h5py.h5d.StoreInfo] = []
    dataset.id.chunk_iter(chunks.append)
    return chunks


def _load_filters(dataset: h5py.Dataset, origin: str) -> None:
    """Load the HDF5 filters with which the chunks of a dataset were written."""
    settings = dataset.id.get_create_plist()
    numbers = [settings.get_filter(i)[0] for i in range(settings.get_nfilters())]
    try:
        codecs.require_filters(numbers)
    except MissingExtraError as error:
        # An optional filter may have been left out when a chunk was written; its bit is set then.
        masks = [chunk.filter_mask for chunk in _stored_chunks(dataset)]
        missing = [i for i, n in enumerate(numbers) if not h5py.h5z.filter_avail(n)]
        if any(not mask >> i & 1 for mask in masks for i in missing):
            raise DataError(f"{origin}: {error}") from error


SOURCES.register(
    source_member(
        "hdf5",
        "Images in a dataset of an HDF5 file, as pixels or encoded.",
        Hdf5Options,
        open_source,
    )
)
