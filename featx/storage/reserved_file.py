"""File object for h5py over disk space that is reserved before the first write."""

from __future__ import annotations

import errno
import os
from typing import Any

from featx.storage.durability import write_all
from featx.storage.positioned_file import PositionedFile


class ReservedFile(PositionedFile):
    """File object for h5py over reserved space, so that writes cannot run out of it.

    HDF5 sees the logical size, while the file on disk keeps the reserved size until `finish`. HDF5
    never sees a failed write, since it crashes on that when it closes the file: the first error is
    kept, further writes are dropped, and `finish` raises it.

    Args:
        descriptor: file descriptor of an empty file, open for reading and writing.
        size: bytes to reserve.

    Raises:
        OSError: the disk has less free space.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._reserved = size
        self._failure: OSError | None = None  # first error of a write, raised by `raise_failure`
        if hasattr(os, "posix_fallocate"):  # not on macOS, where a full disk shows on writing
            os.posix_fallocate(descriptor, 0, max(1, size))

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self.size - self._position))
        data = os.pread(self._descriptor, wanted, self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def pread(self, size: int, address: int) -> bytes:
        """Read bytes at an address without moving the position."""
        return os.pread(self._descriptor, size, address)

    def write(self, data: Any) -> int:
        """Write at the position; after a failed write, pretend to succeed and write nothing."""
        view = memoryview(data).cast("B")
        end = self._position + len(view)
        if self._failure is None:
            try:
                if end > self._reserved:
                    text = f"{self._reserved} bytes were reserved, {end} are needed"
                    raise OSError(errno.ENOSPC, text)
                write_all(self._descriptor, view, self._position)
            except OSError as error:
                self._failure = error
        self._position = end
        self.size = max(self.size, end)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def raise_failure(self) -> None:
        """Raise the error of the first failed write, if any."""
        # The reference is dropped here: the traceback leads to HDF5's hold on this object, a cycle
        # that the garbage collector cannot see, and h5py crashes at exit on what is left of one.
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Release unused space and sync the content."""
        self.raise_failure()
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)
