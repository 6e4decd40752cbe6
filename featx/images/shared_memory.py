"""Memory that the process of the model shares with its decoders: slots for the rows of batches.

A slot is a range of an anonymous file. A process maps it when it first sees it, so slots of any
size can be added after the decoders were forked.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_COLUMNS = 4
"""Number of columns of a slot with 8 bytes per row: rows, checksums, starts, stops."""


@dataclass(frozen=True)
class Slot:
    """Places of the rows of one batch.

    Attributes:
        offset: byte offset in the file, which names the slot.
        images: (B, C, H, W) images.
        rows: (B,) int64, row of each place.
        checksums: (B,) uint64, checksum of the encoded bytes of each place.
        starts: (B,) int64, offset of the encoded bytes of each place in their spool cell.
        stops: (B,) int64, the offset after their end.
    """

    offset: int
    images: npt.NDArray[Any]
    rows: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SlotLayout:
    """Shape of a slot.

    Attributes:
        num_rows: number B of places.
        shape: (C, H, W) of an image.
        dtype: dtype of an image.
    """

    num_rows: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def image_bytes(self) -> int:
        """Bytes of the images, up to a whole page."""
        pixels = self.num_rows * int(np.prod(self.shape, dtype=np.int64))
        return _whole_pages(pixels * self.dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slot, up to a whole page."""
        return self.image_bytes + _whole_pages(8 * _COLUMNS * self.num_rows)

    def map(self, file: int, offset: int) -> Slot:
        """Map a slot into this process."""
        memory = mmap.mmap(file, self.num_bytes, offset=offset)
        count = self.num_rows
        pixels = count * int(np.prod(self.shape, dtype=np.int64))
        images = np.frombuffer(memory, self.dtype, pixels).reshape(count, *self.shape)
        columns = np.frombuffer(memory, np.int64, _COLUMNS * count, self.image_bytes)
        rows, checksums, starts, stops = columns.reshape(_COLUMNS, count)
        return Slot(offset, images, rows, checksums.view(np.uint64), starts, stops)


def anonymous_file(name: str) -> int:
    """Create a file without a path and return its descriptor; its pages lie in memory on Linux.

    It does not count against the size of /dev/shm, which is 64 MiB in many containers.
    """
    if sys.platform.startswith("linux"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _whole_pages(num_bytes: int) -> int:
    """A number of bytes, rounded up to pages."""
    return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
