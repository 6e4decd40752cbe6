"""Writes samples.h5: in memory if it is small, otherwise straight to the disk."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.storage import AtomicFolder, UnfinishedFile, disk_mismatch_error, is_url
from featx.store import layout
from featx.store.listing import make_groups, row_values, write_classes
from featx.store.part_files import STREAMED_BYTES
from featx.store.streamed_part import SparseImage
from featx.types import Listing

_PIECE_BYTES = 8 << 20
"""Bytes that are written, or read back, at once."""


def listing_file(listing: Listing) -> memoryview:
    """Content of samples.h5: /key, /label, /classes and /columns of all rows, with checksums."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=layout.LIBVER) as file:
        _fill(file, listing, file.__setitem__)
    return buffer.getbuffer()


def write_listing(
    disk: AtomicFolder,
    path: Path,
    listing: Listing,
    replace: bool = True,
    streamed_bytes: int = STREAMED_BYTES,
) -> None:
    """Write a listing as samples.h5.

    A large one on a disk is written as a streamed part is: HDF5 lays out the file in a
    `SparseImage`, and the values go from their arrays to the disk, so that they exist once in
    memory. The bytes are those of `listing_file`.

    Args:
        disk: performs the write.
        path: final name; its folder exists.
        listing: all rows.
        replace: replace an existing file; otherwise an existing file is kept.
        streamed_bytes: least size of a listing that is not built in memory.

    Raises:
        RunError: the disk is full or fails, or the file reads back differently.
    """
    num_bytes = sum(values.nbytes for values in row_values(listing).values())
    if not len(listing) or num_bytes < streamed_bytes or is_url(disk.root):
        write = disk.replace if replace else disk.publish
        write(path, listing_file(listing))
        return
    file = disk.begin_file(path, replace)
    try:
        content = _StreamedListing(listing)
        for address, data in content.pieces():
            file.write(data, address)
        file.publish(lambda: content.compare(file))
    finally:
        file.discard()


def _fill(
    file: h5py.File, listing: Listing, write: Callable[[str, npt.NDArray[Any]], None]
) -> None:
    """Write all of samples.h5."""
    file.attrs["featx_format"] = layout.FORMAT
    make_groups(file, listing)
    for path, values in row_values(listing).items():
        write(path, values)
        checksum = layout.checksum(np.ascontiguousarray(values))
        file[f"{layout.CHECKSUMS}/{path}"] = np.array([checksum], np.uint64)
    write_classes(file, listing.classes)


class _StreamedListing:
    """Content of samples.h5 as pieces: values from their arrays, all else from a sparse image."""

    def __init__(self, listing: Listing) -> None:
        self._values = row_values(listing)
        self._image = SparseImage()
        with h5py.File(self._image, "w", libver=layout.LIBVER) as file:

            def reserve_dataset(path: str, values: npt.NDArray[Any]) -> None:
                # HDF5 allocates a dataset when the first value is written, and the rest of it takes
                # no memory. The name comes after that, as in `listing_file`.
                dataset = file.create_dataset(None, values.shape, values.dtype)
                dataset[:1] = values[:1]
                file[path] = dataset

            _fill(file, listing, reserve_dataset)
        with h5py.File(self._image, "r") as file:
            self._paths_by_address = {file[path].id.get_offset(): path for path in self._values}

    def pieces(self) -> Iterator[tuple[int, bytes | memoryview]]:
        """Address and bytes of all pieces, in order."""
        stop = 0
        for address in sorted(self._paths_by_address):
            yield from self._image_pieces(stop, address)
            values = self._values[self._paths_by_address[address]]
            step = max(1, _PIECE_BYTES // values.itemsize)
            for start in range(0, len(values), step):
                rows = np.ascontiguousarray(values[start : start + step])
                yield address + start * values.itemsize, rows.view(np.uint8).data
            stop = address + values.nbytes
        yield from self._image_pieces(stop, self._image.size)

    def _image_pieces(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Address and bytes of the pieces of the image between two addresses."""
        for address in range(start, stop, _PIECE_BYTES):
            yield address, self._image.pread(min(_PIECE_BYTES, stop - address), address)

    def compare(self, file: UnfinishedFile) -> None:
        """Read a file back and compare it with all pieces; raises RunError if it differs."""
        buffer = memoryview(bytearray(_PIECE_BYTES))
        for address, data in self.pieces():
            found = buffer[: len(data)]
            if file.read_into(found, address) != len(data) or found != data:
                raise disk_mismatch_error(file.path, f"the listing at byte {address}")
