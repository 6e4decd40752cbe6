"""Reading of byte ranges of a file, past the page cache where the file system allows it.

Blocks of a large store come back once an epoch, so that the page cache only costs: it copies each
byte once more, and its read-ahead is tuned for files that are read in order. O_DIRECT reads into
aligned buffers and needs aligned addresses, so a range is read with what surrounds it.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]

_ALIGN = 4096
"""Alignment of addresses, lengths and buffers; no common disk has larger blocks."""

_buffers = threading.local()
"""Aligned buffer of each thread, which grows to its longest range."""


class RangeFile:
    """File from which ranges of bytes are read by system calls, in any number of threads.

    The descriptor is closed with the last reference, so no reader can meet another file.

    Args:
        path: path of the file.
        direct: read past the page cache.

    Attributes:
        size: size of the file in bytes when it was opened.

    Raises:
        OSError: the file cannot be opened; with `direct`, EINVAL if its file system refuses it.
    """

    def __init__(self, path: Path, direct: bool = False) -> None:
        self._label = str(path)
        self._direct = direct
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._descriptor = os.open(path, flags)
        self.size = os.fstat(self._descriptor).st_size

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `os` may already be gone at the end of the interpreter, so the function is an argument.
        if hasattr(self, "_descriptor"):
            close(self._descriptor)

    def fileno(self) -> int:
        """File descriptor."""
        return self._descriptor

    def read(self, address: int, size: int) -> Bytes:
        """Read a range of bytes.

        Args:
            address: address of the first byte.
            size: number of bytes.

        Returns:
            (size,) uint8 in a buffer of this thread: valid until the next call from it.

        Raises:
            StoreError: the file ends before the range does.
            OSError: the file cannot be read now.
        """
        data, offset = self.read_ranges(np.array([address]), np.array([size]))
        return data[int(offset[0]) : int(offset[0]) + size]

    def read_ranges(self, addresses: Rows, sizes: Rows) -> tuple[Bytes, Rows]:
        """Read several ranges of bytes, one after the other, into one buffer.

        Args:
            addresses: (n,) int64 address of the first byte of each range.
            sizes: (n,) int64 number of bytes of each.

        Returns:
            a buffer of this thread, valid until the next call from it; (n,) int64 offset of each
            range in it.

        Raises:
            StoreError: the file ends before a range does.
            OSError: the file cannot be read now.
        """
        align = _ALIGN if self._direct else 1
        start = addresses // align * align
        length = -(-(addresses + sizes) // align) * align - start
        stop = np.cumsum(length)
        begin = stop - length
        buffer = _buffer(int(stop[-1]) if len(stop) else 0)
        view = buffer.data
        needed = addresses + sizes - start
        for address, low, high, least in zip(
            start.tolist(), begin.tolist(), stop.tolist(), needed.tolist(), strict=True
        ):
            done = 0
            while done < least:
                count = os.preadv(self._descriptor, [view[low + done : high]], address + done)
                if count == 0:
                    raise StoreError(f"{self._label}: the file ends before byte {address + least}")
                done += count
        offset: Rows = begin + addresses - start
        return buffer, offset


def supports_direct_io(path: Path) -> bool:
    """Return whether a file can be read past the page cache, by a test read."""
    if not hasattr(os, "O_DIRECT"):  # not on macOS
        return False
    try:
        file = RangeFile(path, direct=True)
        file.read(0, min(_ALIGN, file.size))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _buffer(size: int) -> Bytes:
    """Aligned buffer of this thread with at least `size` bytes."""
    buffer: Bytes | None = getattr(_buffers, "bytes", None)
    if buffer is None or len(buffer) < size:
        pages = mmap.mmap(-1, max(1, -(-size // _ALIGN)) * _ALIGN)
        buffer = _buffers.bytes = np.frombuffer(pages, np.uint8)
    return buffer
