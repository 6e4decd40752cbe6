"""HDF5 file in memory that holds everything but large areas of zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from featx.storage import PositionedFile

_PAGE_BYTES = 1 << 16


class SparseImage(PositionedFile):
    """File object for h5py whose pages of zeros take no memory.

    The rows of a large part are written to it as zeros, so that HDF5 lays out the file, while the
    real rows are on the disk already.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pages: dict[int, bytearray] = {}

    def writable(self) -> bool:
        return True

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        last, end = divmod(self.size, _PAGE_BYTES)
        for page in [page for page in self._pages if page > last or (page == last and not end)]:
            del self._pages[page]
        if last in self._pages:
            self._pages[last][end:] = bytes(
                _PAGE_BYTES - end
            )  # a file that grows again has zeros here
        return self.size

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.size - self._position))
        for offset, page, begin, length in _split_by_pages(self._position, count):
            content = self._pages.get(page)
            view[offset : offset + length] = (
                bytes(length) if content is None else memoryview(content)[begin : begin + length]
            )
        self._position += count
        return count

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for offset, page, begin, length in _split_by_pages(self._position, len(view)):
            piece = view[offset : offset + length]
            if page not in self._pages:
                if piece.tobytes() == _ZEROS[:length]:
                    continue
                self._pages[page] = bytearray(_PAGE_BYTES)
            self._pages[page][begin : begin + length] = piece
        self._position += len(view)
        self.size = max(self.size, self._position)
        return len(view)

    def pread(self, size: int, address: int) -> bytes:
        """Read bytes at an address; fewer at the end of the file."""
        self.seek(address)
        return self.read(size) or b""


_ZEROS = bytes(_PAGE_BYTES)


def _split_by_pages(start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide `count` bytes from `start` on by pages."""
    offset = 0
    while offset < count:
        page, begin = divmod(start + offset, _PAGE_BYTES)
        length = min(_PAGE_BYTES - begin, count - offset)
        yield offset, page, begin, length
        offset += length
