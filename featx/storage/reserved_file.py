"""A file whose bytes are written at their places before it gets its name."""

from __future__ import annotations

import errno
import io
import os
from typing import Any

from featx.storage.durability import write_all


class ReservedFile(io.RawIOBase):
    """A file object for h5py over space that is already reserved, so no write can run out of it.

    HDF5 sees the logical size; the file on disk is as long as what was reserved until `finish`.
    Nor does it see a write that fails, for it crashes on that when it closes the file: the first
    such error is kept, no more is written, and `finish` raises it.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._reserved = size
        self._size = 0
        self._position = 0
        self._failure: OSError | None = None
        if hasattr(os, "posix_fallocate"):  # macOS has none; a full disk then shows on writing
            os.posix_fallocate(descriptor, 0, max(1, size))

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._position))
        data = os.pread(self._descriptor, wanted, self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def pread(self, size: int, address: int) -> bytes:
        """The bytes from an address on."""
        return os.pread(self._descriptor, size, address)

    def write(self, data: Any) -> int:
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
        self._size = max(self._size, end)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self._size = self._position if size is None else size
        return self._size

    def raise_failure(self) -> None:
        """Raise the error of the first write that failed, if there was one."""
        # Not kept: its traceback leads to HDF5's hold on this object, a cycle that Python cannot
        # see, and h5py crashes at exit on what is left of one.
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Give back what was not used and make the contents durable."""
        self.raise_failure()
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)
