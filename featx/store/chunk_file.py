"""HDF5 file that is being written: parts, packed files and listings."""

from __future__ import annotations

import functools
import io
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from featx.base import num_cpus
from featx.errors import require
from featx.storage import PositionedFile, UnfinishedFile, disk_mismatch_error, memory_mismatch_error
from featx.store import layout
from featx.store.chunk_table import WrittenChunks, chunks_of
from featx.store.filter_pipeline import Pipeline
from featx.store.hdf5_files import check_texts, seal_texts, write_values
from featx.types import Array

STREAMED_BYTES = 64 << 20
"""Least size of rows that are written to the disk as they come. Smaller files are built in memory,
so that a write that fails can be repeated."""

_PIECE_BYTES = 8 << 20
"""Bytes of a dataset without chunks that are written, or read back, at once."""

_PAGE_BYTES = 1 << 16
_ZEROS = bytes(_PAGE_BYTES)


class SparseImage(PositionedFile):
    """File object for h5py whose pages of zeros take no memory."""

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
            # A file that grows again has zeros here.
            self._pages[last][end:] = bytes(_PAGE_BYTES - end)
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


def _split_by_pages(start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide `count` bytes from `start` on by pages."""
    offset = 0
    while offset < count:
        page, begin = divmod(start + offset, _PAGE_BYTES)
        length = min(_PAGE_BYTES - begin, count - offset)
        yield offset, page, begin, length
        offset += length


class ChunkFile:
    """HDF5 file from its creation until it has its name; a context manager that discards it.

    HDF5 writes into memory only, so that a disk that fails never meets HDF5. In a file on a disk,
    chunks go to their addresses as they come, and HDF5 has zeros in their place, which take no
    memory; what HDF5 has laid out around them is written in the end. The bytes of a file that is
    built in memory are the same.

    The rows of a dataset have to arrive in order. `path` is the final name, for messages; without
    a temporary file as `target`, the file is built in memory. `chunked` are the datasets in chunks
    by their paths.
    """

    def __init__(self, path: Path, target: UnfinishedFile | None = None) -> None:
        self._path, self._target = path, target
        self._image = io.BytesIO() if target is None else SparseImage()
        self.hdf5 = h5py.File(self._image, "w", libver=layout.LIBVER)
        self.chunked: dict[str, WrittenChunks] = {}
        self._extents: dict[int, tuple[int, int, str]] = {}  # address -> size, checksum, dataset
        # HDF5 must not find this file open at the end of the interpreter.
        self.discard = weakref.finalize(self, _discard, self.hdf5, target)

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def create(
        self, path: str, shape: tuple[int, ...], dtype: Any, chunk_rows: int, max_rows: int,
        **options: object,
    ) -> h5py.Dataset:  # fmt: skip
        """Create a dataset in chunks of whole rows, which can be resized to `max_rows`."""
        dataset = self.hdf5.create_dataset(
            path,
            shape=shape,
            dtype=dtype,
            chunks=(chunk_rows, *shape[1:]),
            maxshape=(max_rows, *shape[1:]),
            **options,
        )
        num_chunks = -(-shape[0] // chunk_rows)
        self.chunked[path] = WrittenChunks(
            dataset,
            Pipeline.of(dataset),
            shape,
            chunk_rows,
            sums=np.zeros(num_chunks, np.uint64),
            addresses=np.zeros(num_chunks, np.uint64),
        )
        return dataset

    def seal(self) -> None:
        """Record the checksums of all texts: the datasets are created, and no rows have come yet.

        Chunks on a disk get their addresses, except compressed ones, whose sizes are unknown.
        """
        seal_texts(self.hdf5, self._image)
        for chunks in self.chunked.values():
            if self._target is not None and not chunks.pipeline.filters:
                zeros = bytes(chunks.pipeline.chunk_bytes)
                for number in range(len(chunks.sums)):
                    chunks.dataset.id.write_direct_chunk(chunks.offset(number), zeros)
                chunks.addresses = chunks_of(chunks.dataset)["address"]

    def append(self, path: str, first: int, rows: Array) -> None:
        """Add the next rows of a dataset, as stored; several threads encode them.

        Rows of an incomplete chunk are copied.
        """
        chunks = self.chunked[path]
        require(first == chunks.stop, "the rows of a file have to arrive in order")
        number = first // chunks.step
        encode = functools.partial(self._encode, path, chunks.pipeline)
        if chunks.pipeline.filters and len(rows) > chunks.step:
            # h5py compresses under one lock; without it, two threads write half as fast again.
            with ThreadPoolExecutor(num_cpus()) as threads:
                encoded = iter(list(threads.map(encode, chunks.complete(rows))))
        else:
            encoded = map(encode, chunks.complete(rows))
        for data in encoded:
            self._write(path, number, data)
            number += 1

    def append_chunk(self, path: str, first: int, data: bytes, mask: int = 0) -> None:
        """Add the next chunk of a dataset as it is stored; it is whole, or the last one."""
        chunks = self.chunked[path]
        is_next = first == chunks.stop and not first % chunks.step
        require(is_next, "the chunks of a file have to arrive in order")
        chunks.stop = min(first + chunks.step, chunks.shape[0])
        self._write(path, first // chunks.step, data, mask)

    def write_array(self, path: str, values: Array) -> None:
        """Write a dataset without chunks, and its checksum."""
        # HDF5 allocates a dataset when the first value is written. The name comes after that, so
        # that the bytes are the same in memory and on a disk.
        dataset = self.hdf5.create_dataset(None, values.shape, values.dtype)
        first = slice(None if self._target is None else 1)
        dataset[first] = values[first]
        self.hdf5[path] = dataset
        if self._target is not None and len(values):
            step, address = max(1, _PIECE_BYTES // values.itemsize), dataset.id.get_offset()
            for start in range(0, len(values), step):
                rows = np.ascontiguousarray(values[start : start + step]).view(np.uint8).data
                rows_address, checksum = address + start * values.itemsize, layout.checksum(rows)
                self._target.write(rows, rows_address)
                self._extents[rows_address] = len(rows), checksum, path
        checksum = layout.checksum(np.ascontiguousarray(values))
        write_values(self.hdf5, f"{layout.CHECKSUMS}/{path}", np.array([checksum], np.uint64))

    def content(self) -> bytes:
        """Bytes of a file that is built in memory; raises RunError if it reads back differently."""
        self._close()
        assert isinstance(self._image, io.BytesIO)
        return self._image.getvalue()  # which copies nothing

    def save(self) -> bool:
        """Sync a file on a disk, read it back, and give it its name; see `UnfinishedFile.finish`.

        Raises RunError if the disk is full or fails, or the file reads back differently.
        """
        self._close()
        target = self._target
        assert target is not None

        # Address and end of the areas that HDF5 has written between the rows.
        gaps, stop = [], 0
        for address, (size, *_) in sorted(self._extents.items()):
            if address > stop:
                gaps.append((stop, address))
            stop = address + size
        if (end := self._image.seek(0, io.SEEK_END)) > stop:
            gaps.append((stop, end))

        for start, stop in gaps:
            target.write(self._pread(stop - start, start), start)
        return target.finish(functools.partial(self._compare, target, gaps))

    def _encode(self, path: str, pipeline: Pipeline, chunk: Array) -> bytes | memoryview:
        """Bytes of a chunk as they are stored; those of a codec are decoded again and compared."""
        data = chunk.reshape(-1).view(np.uint8)
        if not pipeline.filters:
            return data.data
        encoded = pipeline.encode(data)
        if not np.array_equal(pipeline.decode(encoded), data):
            raise memory_mismatch_error(self._path, path)
        return encoded

    def _write(self, path: str, number: int, data: bytes | memoryview, mask: int = 0) -> None:
        chunks = self.chunked[path]
        chunks.sums[number] = checksum = layout.checksum(data)
        if self._target is None:
            chunks.dataset.id.write_direct_chunk(chunks.offset(number), data, mask)
            return
        if not chunks.addresses[number]:
            offset = chunks.offset(number)
            chunks.dataset.id.write_direct_chunk(offset, bytes(len(data)), mask)
            info = chunks.dataset.id.get_chunk_info_by_coord(offset)
            chunks.addresses[number] = info.byte_offset
        address = int(chunks.addresses[number])
        self._target.write(data, address)
        self._extents[address] = len(data), checksum, path

    def _close(self) -> None:
        """Let HDF5 write its last bytes, and compare what it reads with what was written."""
        self.hdf5.close()
        with h5py.File(self._image, "r") as file:
            check_texts(file, self._pread)
            for path, chunks in self.chunked.items():
                # The low-level interface takes a third of the time for parts of few rows.
                dataset = h5py.h5d.open(file.id, path.encode())
                checksums = h5py.h5d.open(file.id, f"{layout.CHECKSUMS}/{path}".encode())
                sums = np.empty(checksums.shape, checksums.dtype)
                checksums.read(h5py.h5s.ALL, h5py.h5s.ALL, sums)
                if self._target is not None:
                    addresses = chunks_of(h5py.Dataset(dataset))["address"]
                    is_same = np.array_equal(addresses, chunks.addresses)
                else:
                    offsets = map(chunks.offset, range(len(sums)))
                    stored = (dataset.read_direct_chunk(offset)[1] for offset in offsets)
                    is_same = all(map(layout.agrees, chunks.sums, stored))
                if not is_same or not np.array_equal(sums, chunks.sums):
                    raise memory_mismatch_error(self._path, path)

    def _pread(self, size: int, address: int) -> bytes:
        self._image.seek(address)
        return self._image.read(size) or b""

    def _compare(self, target: UnfinishedFile, gaps: list[tuple[int, int]]) -> None:
        """Read the temporary file, and compare it with what was written."""
        sizes = [stop - start for start, stop in gaps]
        sizes += [size for size, *_ in self._extents.values()]
        buffer = memoryview(bytearray(max(sizes)))
        for start, stop in gaps:
            count = target.read_into(buffer[: stop - start], start)
            if bytes(buffer[:count]) != self._pread(stop - start, start):
                raise disk_mismatch_error(self._path, "the description of its datasets")
        for address, (size, checksum, path) in sorted(self._extents.items()):
            count = target.read_into(buffer[:size], address)
            if layout.checksum(buffer[:count]) != checksum:
                raise disk_mismatch_error(self._path, f"/{path}")


def _discard(hdf5: h5py.File, target: UnfinishedFile | None) -> None:
    """Close a file that is not needed any more, and delete its temporary file."""
    try:
        hdf5.close()
    finally:
        if target is not None:
            target.discard()
