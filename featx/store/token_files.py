"""Open files of a layer whose tokens are read, and the comparison of its chunks."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.storage import RangeFile, RawFile, S3File, S3Path
from featx.store import layout
from featx.store.chunk_check import repair_hint
from featx.store.hdf5_files import max_open_files
from featx.store.layer_chunks import LayerChunks, file_state

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class TokenFiles:
    """Open files of a layer; the least recently used ones are closed first.

    Args:
        chunks: chunks of the layer.
        read_method: as for TokenReader.

    Attributes:
        chunks: as above.
    """

    def __init__(self, chunks: LayerChunks, read_method: str) -> None:
        self.chunks = chunks
        self._read_method = read_method
        self._lock = threading.Lock()
        self._open: OrderedDict[int, RawFile | RangeFile | S3File] = OrderedDict()
        self._max_open = max_open_files()

    def locate(self, chunk: int) -> tuple[int, int, int]:
        """Number of the file, address and size of a chunk."""
        chunks = self.chunks
        return chunks.file_of(chunk), int(chunks.address[chunk]), int(chunks.size[chunk])

    def mapped_file(self, number: int) -> RawFile:
        """Mapped file."""
        file = self._file(number)
        assert isinstance(file, RawFile)
        if file.current_size() < file.size:
            path = self.chunks.files[number].segment.path
            raise StoreError(f"{path}: the file had {file.size} bytes when it was opened.")
        return file

    def all_mapped(self) -> tuple[Rows, list[RawFile]]:
        """Address of the map of each file, and the files, which must be kept while it is used."""
        mapped = [self.mapped_file(number) for number in range(len(self.chunks.files))]
        return np.array([file.address for file in mapped], np.int64), mapped

    def read_range(self, number: int, address: int, size: int) -> Bytes:
        """Read a range of a file; valid until the next call from this thread."""
        data, offset = self.read_ranges(number, np.array([address]), np.array([size]))
        return data[int(offset[0]) : int(offset[0]) + size]

    def read_ranges(self, number: int, addresses: Rows, sizes: Rows) -> tuple[Bytes, Rows]:
        """Read several ranges of a file into one buffer.

        Args:
            number: number of the file.
            addresses: (n,) int64 address of the first byte of each range.
            sizes: (n,) int64 number of bytes of each.

        Returns:
            the buffer, valid until the next call from this thread; (n,) int64 offset of each range
            in it.
        """
        file = self._file(number)
        if isinstance(file, RangeFile):
            return file.read_ranges(addresses, sizes)
        assert isinstance(file, S3File)
        stop = np.cumsum(sizes)
        offset: Rows = stop - sizes
        data = np.empty(int(stop[-1]), np.uint8)
        label = str(self.chunks.files[number].segment.path)
        for address, low, high in zip(
            addresses.tolist(), offset.tolist(), stop.tolist(), strict=True
        ):
            file.read_into(data[low:high], address, label)
        return data, offset

    def compare_chunks(self, numbers: Rows, data: Bytes, shifts: Rows) -> None:
        """Compare uncompressed chunks in a buffer with their checksums.

        Args:
            numbers: (n,) numbers of the chunks.
            data: buffer with the bytes of all of them.
            shifts: (n,) address of each chunk in the buffer less that in its file.

        Raises:
            StoreError: a chunk differs from its checksum.
        """
        for chunk, shift in zip(numbers.tolist(), shifts.tolist(), strict=True):
            _, address, size = self.locate(chunk)
            self.compare(chunk, data[address + shift : address + shift + size])

    def compare(self, chunk: int, data: Bytes) -> None:
        """Compare a decoded chunk with its checksum; raises StoreError if it differs."""
        chunks = self.chunks
        start, count = chunks.rows_of(chunk)
        if layout.checksum(data[: count * chunks.row_bytes]) != int(chunks.sums[chunk]):
            path = chunks.files[chunks.file_of(chunk)].segment.path
            raise StoreError(
                f"{path}: /{chunks.path}, rows {start} to {start + count - 1} differ from their "
                f"checksum. {repair_hint(path)}"
            )
        chunks.is_compared[chunk] = True

    def _file(self, number: int) -> RawFile | RangeFile | S3File:
        """Open a file, checked to be the one whose chunk table was read."""
        with self._lock:
            if (file := self._open.get(number)) is not None:
                self._open.move_to_end(number)
                return file
        known = self.chunks.files[number]
        path = known.segment.path
        if isinstance(path, S3Path):
            opened: RawFile | RangeFile | S3File = S3File(path)
        else:
            opened = RangeFile(path, self._read_method == "direct")
            if file_state(opened.fileno()) != known.state:
                raise FileNotFoundError(errno.ENOENT, "replaced by another file", str(path))
            if self._read_method == "map":
                opened = RawFile(opened.fileno(), may_map=True)
        with self._lock:
            self._open[number] = opened
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)
        return opened
