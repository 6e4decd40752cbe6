"""Base of the file objects that HDF5 reads and writes: a size, a position, and seeking."""

from __future__ import annotations

import io
import os


class PositionedFile(io.RawIOBase):
    """File object with a position, from which a subclass reads, and at which it may write.

    Attributes:
        size: logical size in bytes.
    """

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position
