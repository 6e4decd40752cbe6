"""Open files of a layer whose tokens are read, and the comparison of its chunks."""

from __future__ import annotations

import errno
import resource
import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.storage import RawFile, S3File, S3Path, SpanFile
from featx.store import layout
from featx.store.chunk_check import repair_hint
from featx.store.chunk_places import ChunkPlaces, file_state

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_MAX_FILES = 128
_SHARE_OF_LIMIT = 8
"""Limits on the number of open files: _MAX_FILES, and 1/_SHARE_OF_LIMIT of that of the process."""


class TokenFiles:
    """Open files of a layer; the least recently used ones are closed first.

    Args:
        places: addresses of the chunks.
        way: as for TokenReader.

    Attributes:
        places: as above.
    """

    def __init__(self, places: ChunkPlaces, way: str) -> None:
        self.places = places
        self._way = way
        self._lock = threading.Lock()
        self._open: OrderedDict[int, RawFile | SpanFile | S3File] = OrderedDict()
        self._most = most_files()

    def place_of(self, chunk: int) -> tuple[int, int, int]:
        """Number of the file, address and size of a chunk."""
        places = self.places
        return places.file_of(chunk), int(places.address[chunk]), int(places.size[chunk])

    def mapped(self, number: int) -> RawFile:
        """Mapped file."""
        file = self._file(number)
        assert isinstance(file, RawFile)
        if file.size_now() < file.size:
            path = self.places.files[number].segment.path
            raise StoreError(f"{path}: the file had {file.size} bytes when it was opened.")
        return file

    def all_mapped(self) -> tuple[Rows, list[RawFile]]:
        """Address of the map of each file, and the files, which must be kept while it is used."""
        mapped = [self.mapped(number) for number in range(len(self.places.files))]
        return np.array([file.address for file in mapped], np.int64), mapped

    def span(self, number: int, at: int, size: int) -> Bytes:
        """Read a range of a file; valid until the next call from this thread."""
        data, offset = self.ranges(number, np.array([at]), np.array([size]))
        return data[int(offset[0]) : int(offset[0]) + size]

    def ranges(self, number: int, at: Rows, size: Rows) -> tuple[Bytes, Rows]:
        """Read several ranges of a file into one buffer.

        Args:
            number: number of the file.
            at: (n,) int64 address of the first byte of each range.
            size: (n,) int64 number of bytes of each.

        Returns:
            the buffer, valid until the next call from this thread; (n,) int64 offset of each range
            in it.
        """
        file = self._file(number)
        if isinstance(file, SpanFile):
            return file.read_ranges(at, size)
        assert isinstance(file, S3File)
        stop = np.cumsum(size)
        offset: Rows = stop - size
        data = np.empty(int(stop[-1]), np.uint8)
        label = str(self.places.files[number].segment.path)
        for address, low, high in zip(at.tolist(), offset.tolist(), stop.tolist(), strict=True):
            file.read_into(data[low:high], address, label)
        return data, offset

    def compare_all(self, chunks: Rows, data: Bytes, shift: Rows) -> None:
        """Compare uncompressed chunks in a buffer with their checksums.

        Args:
            chunks: (n,) chunks.
            data: buffer with the bytes of all of them.
            shift: (n,) address of each chunk in the buffer less that in its file.

        Raises:
            StoreError: a chunk differs from its checksum.
        """
        for chunk, ahead in zip(chunks.tolist(), shift.tolist(), strict=True):
            _, address, size = self.place_of(chunk)
            self.compare(chunk, data[address + ahead : address + ahead + size])

    def compare(self, chunk: int, data: Bytes) -> None:
        """Compare a decoded chunk with its checksum; raises StoreError if it differs."""
        places = self.places
        start, count = places.rows_of(chunk)
        if layout.checksum(data[: count * places.row_bytes]) != int(places.sums[chunk]):
            path = places.files[places.file_of(chunk)].segment.path
            raise StoreError(
                f"{path}: /{places.path}, rows {start} to {start + count - 1} differ from their "
                f"checksum. {repair_hint(path)}"
            )
        places.compared[chunk] = True

    def _file(self, number: int) -> RawFile | SpanFile | S3File:
        """Open file, checked to be the one whose addresses are known."""
        with self._lock:
            if (file := self._open.get(number)) is not None:
                self._open.move_to_end(number)
                return file
        known = self.places.files[number]
        path = known.segment.path
        if isinstance(path, S3Path):
            opened: RawFile | SpanFile | S3File = S3File(path)
        else:
            spans = SpanFile(path, self._way == "direct")
            if file_state(spans.fileno()) != known.state:
                raise FileNotFoundError(errno.ENOENT, "replaced by another file", str(path))
            opened = RawFile(spans.fileno(), may_map=True) if self._way == "map" else spans
        with self._lock:
            self._open[number] = opened
            while len(self._open) > self._most:
                self._open.popitem(last=False)
        return opened


def most_files() -> int:
    """Number of files of a layer that a process keeps open."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(4, min(_MAX_FILES, allowed // _SHARE_OF_LIMIT))
