"""Memory that decoders share with the process of the model: rings of batches, spooled files."""

from __future__ import annotations

import mmap
import os
import queue
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NO_BUFFER = -1
"""Spool buffer of a group whose rows the decoder reads."""

BUFFER_SHIFT = 36
"""Logarithm of the distance of two spool buffers in their file, which has holes."""


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
    """Number B of places, and (C, H, W) and dtype of an image."""

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


class Spool:
    """A few buffers in an anonymous file, each with the encoded images of a group.

    Their number limits how far images are read ahead.
    """

    def __init__(self, num_buffers: int) -> None:
        self.file = anonymous_file("featx-spool")
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._num_users: Counter[int] = Counter()
        for buffer in range(num_buffers):
            self._free.put(buffer)

    def write(self, images: Iterable[bytes]) -> int:
        """Wait for a free buffer, write encoded images into it, and return its number.

        After `end_waiting` nothing is written, and the number is NO_BUFFER.
        """
        buffer = self._free.get()
        if buffer == NO_BUFFER:
            return buffer
        self._num_users[buffer] = 1
        offset = buffer << BUFFER_SHIFT
        for data in images:
            view = memoryview(data)
            while view:  # a write ends early after 2 GiB
                written = os.pwrite(self.file, view, offset)
                offset, view = offset + written, view[written:]
        return buffer

    def share(self, buffer: int, num_groups: int) -> None:
        """Let further groups use a buffer, so that it is released that many times more."""
        self._num_users[buffer] += num_groups

    def release(self, buffer: int) -> None:
        """Let a buffer be used again when all of its groups are done."""
        self._num_users[buffer] -= 1
        if not self._num_users[buffer]:
            self._free.put(buffer)

    def end_waiting(self, num_threads: int) -> None:
        """Wake threads that wait for a free buffer, when their groups are no longer needed."""
        for _ in range(num_threads):
            self._free.put(NO_BUFFER)
