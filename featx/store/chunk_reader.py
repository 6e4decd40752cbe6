"""Rows of a chunked dataset, read directly from its file by any number of threads, and compared.

HDF5 gives the addresses of the chunks; their bytes are then read from the file itself. A chunk that
is compared with its checksum, or that has filters, is read as a whole; other rows are copied from
their addresses, several times as fast as by a call of HDF5 for each. Datasets whose chunks are not
whole rows, and files that are open for writing, are left to h5py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias, TypeGuard

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import ConfigError, StoreError, require
from featx.storage import RawFile, S3File
from featx.store import dtypes, layout
from featx.store.chunk_cache import CACHE_BYTES, decode_pool
from featx.store.filter_pipeline import Pipeline
from featx.types import Array

Rows: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Mask: TypeAlias = npt.NDArray[np.bool_]

Verify: TypeAlias = Literal["chunks", "rows", False]
"""Choice of the chunks that a reader compares with their checksums.

'chunks': chunks of which one read takes a quarter or more (half in an object store), and all
chunks of compressed layers. 'rows': all chunks of which a row is read. False: none.
"""

_GATHER_BYTES = 16 << 10
"""Larger rows are copied one by one, as the loop then costs little compared with the copies."""

_INLINE_BYTES = 64 << 10
"""Bytes of rows of one decoded chunk up to which they are copied without a thread."""

_GAP_BYTES = 64 << 10
"""Largest gap between two pieces that are read together: as long to read as a call takes."""

_PIECE_BYTES = 16 << 20
"""Bytes that are read at a time where rows are widened to float32, or pieces are near."""

_COMPARED_SHARE, _COMPARED_SHARE_REMOTE = 4, 2
"""Inverse of the share of a chunk that a read must take for the chunk to be compared, which means
to read all of it: more expensive in an object store."""


def check_verify(verify: object) -> None:
    """Raise ConfigError unless `verify` is 'chunks', 'rows' or False."""
    if verify is not False and verify not in ("chunks", "rows"):
        raise ConfigError(f"verify={verify!r}: expected 'chunks', 'rows' or False.")


def repair_hint(path: Path) -> str:
    """Advice for a damaged file of a store, the end of a message."""
    repair = layout.repair_command(layout.store_root(path))
    return (
        f"Bits of the file have changed since it was written. {repair} extracts these rows again "
        "and leaves all others."
    )


class ChunkReader:
    """Rows of one dataset, for any number of threads of the process that created it.

    A chunk is compared once: bits flip on the disk, and later reads come from memory.

    The file of the dataset stays open until `close`. Readers may share `file`, that of h5py for one
    in an object store; None opens the file once more. With `all_rows`, each chunk of which a row is
    read is compared with `sums`, not only those of larger reads. `first_row` is that of the dataset
    in the store, for messages. `read_method` is "map" or "file" (no filters), "decode" (whole
    chunks with filters) or "h5py".
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        path: Path,
        file: RawFile | S3File | None = None,
        sums: npt.NDArray[np.uint64] | None = None,
        all_rows: bool = False,
        first_row: int = 0,
    ) -> None:
        self._dtype_name = dtypes.dtype_name(dataset)
        self.dtype = dtypes.memory_dtype(self._dtype_name)
        self._label, self._path, self._first_row = f"{path}: {dataset.name}", path, first_row
        self._dataset: h5py.Dataset | None = dataset
        self._row_shape: tuple[int, ...] = dataset.shape[1:]
        self._num_rows = int(dataset.shape[0])
        self._chunk_rows = int(dataset.chunks[0]) if dataset.chunks else max(1, self._num_rows)
        item_bytes = dtypes.raw_dtype(self._dtype_name).itemsize
        self._row_bytes = int(np.prod(self._row_shape, dtype=np.int64)) * item_bytes
        num_chunks = -(-self._num_rows // self._chunk_rows)
        if sums is not None and (sums.shape != (num_chunks,) or sums.dtype.kind != "u"):
            raise StoreError(
                f"{path}: {dataset.name} has {num_chunks} chunks, and its checksums are "
                f"{sums.shape} {sums.dtype}. {repair_hint(path)}"
            )
        self._sums = sums
        # Without checksums nothing is due, and a damaged shape takes no memory.
        nothing_due = np.broadcast_to(np.True_, num_chunks)
        self._is_compared = nothing_due if sums is None else np.zeros(num_chunks, np.bool_)
        is_remote = isinstance(file, S3File)
        share = _COMPARED_SHARE_REMOTE if is_remote else _COMPARED_SHARE
        every_row = all_rows or self._chunk_rows == 1
        self._least_rows = 1 if every_row else max(2, -(-self._chunk_rows // share))
        self._cache_key = object()
        self._listing = threading.Lock()
        self._address: Rows | None = None
        self._file: RawFile | S3File | None = None
        self._pipeline = Pipeline.of(dataset) if dataset.chunks else Pipeline([], 0)
        self.read_method = "h5py"
        if not _is_readable_directly(dataset, "fileobj" if is_remote else "sec2"):
            return
        has_filters = bool(self._pipeline.filters) or not self._pipeline.is_supported
        if file is None:
            file = RawFile(dataset.file.id.get_vfd_handle(), may_map=not has_filters)
        if num_chunks * (1 if has_filters else self._pipeline.chunk_bytes) > file.size:
            raise StoreError(
                f"{self._label} claims {num_chunks} chunks; the file has {file.size} bytes, "
                "refused."
            )
        self._file = file
        self.read_method = "decode" if has_filters else "map" if file.mapped is not None else "file"

    def take(self, rows: Rows) -> Array:
        """Read rows in any order, with repeats: (n, *row shape)."""
        if len(rows) == 1:
            return self.take_range(int(rows[0]), 1)
        if (gathered := self._gather(rows)) is not None:
            return gathered
        out = np.empty((len(rows), *self._row_shape), self.dtype)
        order = np.argsort(rows, kind="stable")
        self.read(rows[order], out, order)
        return out

    def _gather(self, rows: Rows) -> Array | None:
        """Rows of a mapped file in one copy; None unless all of their chunks were compared."""
        is_plain = self._row_bytes <= _GATHER_BYTES and self._dtype_name != "bfloat16"
        if self.read_method != "map" or not is_plain or self._address is None or not len(rows):
            return None
        if rows.min() < 0 or rows.max() >= self._num_rows:
            return None
        chunks = rows // self._chunk_rows
        file = self._open_file() if self._is_compared[chunks].all() else None
        if not _is_mapped(file):
            return None
        values = file.items(self._row_bytes)[self._addresses_of(file, rows, chunks)]
        return values.view(self.dtype).reshape(len(rows), *self._row_shape)

    def take_range(self, first: int, count: int) -> Array:
        """Read consecutive rows: (count, *row shape)."""
        chunk, row = divmod(first, self._chunk_rows)
        # A single row of a known chunk takes a tenth of the time of `read`.
        if count == 1 and self.read_method == "map" and self._address is not None:
            is_known = 0 <= first < self._num_rows and self._address[chunk] >= 0
            if is_known and self._dtype_name != "bfloat16" and not self._may_be_due(chunk):
                file = self._open_file()
                if _is_mapped(file) and file.mapped is not None:
                    begin = int(self._address[chunk]) + row * self._row_bytes
                    copied = file.mapped[begin : begin + self._row_bytes].copy()
                    return copied.view(self.dtype).reshape(1, *self._row_shape)
        is_inside = 0 <= first < self._num_rows and row + count <= self._chunk_rows
        if is_inside and self._dtype_name != "bfloat16" and not self.closed:
            decoded = self._decoded(chunk)
            if decoded is not None and count and first + count <= self._num_rows:
                begin, size = row * self._row_bytes, count * self._row_bytes
                copied = decoded[begin : begin + size].copy()
                return copied.view(self.dtype).reshape(count, *self._row_shape)
        out = np.empty((count, *self._row_shape), self.dtype)
        self.read(np.arange(first, first + count), out, np.arange(count))
        return out

    def read(self, rows: Rows, out: Array, out_indices: Rows) -> None:
        """Read row rows[i] into out[out_indices[i]]."""
        fits = (out.dtype, out.shape[1:]) == (self.dtype, self._row_shape)
        require(fits and out.flags.c_contiguous, "rows are read into an array of another kind")
        require(len(rows) == len(out_indices), "rows are read to other places")
        if not len(rows):
            return
        is_falling = bool((rows[1:] < rows[:-1]).any())
        if is_falling or out_indices.min() < 0 or out_indices.max() >= len(out):
            raise IndexError("rows must increase, and `out_indices` must be indices into `out`")
        if rows[0] < 0 or rows[-1] >= self._num_rows:
            raise IndexError(
                f"{self._label} has {self._num_rows} rows, not {rows[0]} to {rows[-1]}"
            )
        if self._dtype_name != "bfloat16":
            self._read_bits(rows, out, out_indices)
            return
        step = max(1, _PIECE_BYTES // max(1, self._row_bytes))
        for i in range(0, len(rows), step):
            some = rows[i : i + step]
            raw = np.empty((len(some), *self._row_shape), dtypes.raw_dtype(self._dtype_name))
            self._read_bits(some, raw, np.arange(len(some)))
            out[out_indices[i : i + step]] = dtypes.from_raw(raw, self._dtype_name)

    def read_items(
        self, rows: Rows, offsets: Rows, out: Bytes, out_indices: Rows, mapped: bool
    ) -> None:
        """Read pieces of ascending rows of a dataset without filters, such as tokens."""
        file, width = self._open_file(), out.shape[1]
        if file is None:
            raise ValueError(f"{self._label} has filters: its rows are read as a whole")
        chunks = rows // self._chunk_rows
        for chunk in np.unique(chunks[self._is_due(chunks)]).tolist():
            self._compare(chunk, self._stored_chunk(file, chunk, mapped))
        addresses = self._addresses_of(file, rows, chunks) + offsets
        items = out.reshape(-1).view(f"V{width}")
        if mapped and _is_mapped(file):
            items[out_indices] = file.items(width)[addresses]
            return
        is_near = addresses[1:] - addresses[:-1] <= width + _GAP_BYTES
        for low, high in consecutive_ranges(is_near):
            while low < high:
                start = int(addresses[low])
                stop = low + int(np.searchsorted(addresses[low:high], start + _PIECE_BYTES))
                data = np.empty(int(addresses[stop - 1]) + width - start, np.uint8)
                file.pread_into(data, start, self._label)
                near = np.ndarray((len(data) - width + 1,), f"V{width}", data.data, strides=(1,))
                items[out_indices[low:stop]] = near[addresses[low:stop] - start]
                low = stop

    def reads_without_hdf5(self) -> bool:
        """Return whether reads need no more of HDF5, whose file another thread may close during
        one. The chunks are listed for that.
        """
        if self.read_method == "h5py" or not self._pipeline.is_supported:
            return False
        if (file := self._open_file()) is not None:
            self._addresses(file)
        return True

    @property
    def closed(self) -> bool:
        """Whether `close` was called; rows cannot be read any more."""
        return self._dataset is None

    def close(self) -> None:
        """Release the file; reads in progress in other threads still succeed."""
        self._dataset = self._file = None
        decode_pool().chunks.drop(lambda key: key[0] is self._cache_key)

    def _read_bits(self, rows: Rows, out: Array, out_indices: Rows) -> None:
        """Read stored bits: whole chunks where they are decoded or compared, otherwise rows."""
        file, chunks = self._open_file(), rows // self._chunk_rows
        is_whole = self._is_due(chunks)
        if self.read_method == "decode":
            is_whole = np.ones(len(rows), np.bool_)
        if is_whole.any():
            self._read_chunks(file, chunks[is_whole], rows[is_whole], out, out_indices[is_whole])
            rows, out_indices, chunks = rows[~is_whole], out_indices[~is_whole], chunks[~is_whole]
        if not len(rows):
            return
        if file is None:
            for low, high in consecutive_ranges(rows[1:] - rows[:-1] <= 1):
                block = self._rows_by_hdf5(int(rows[low]), int(rows[high - 1]) + 1)
                out[out_indices[low:high]] = block[rows[low:high] - rows[low]]
            return
        width, addresses = self._row_bytes, self._addresses_of(file, rows, chunks)
        target = out.reshape(len(out), -1).view(np.uint8)
        is_joined = (np.diff(addresses) == width) & (np.diff(out_indices) == 1)
        num_ranges = len(addresses) - int(np.count_nonzero(is_joined))
        if num_ranges > 4 and width <= _GATHER_BYTES and _is_mapped(file):
            target.view(f"V{width}").reshape(-1)[out_indices] = file.items(width)[addresses]
            return
        flat = target.reshape(-1)
        ranges = (
            (flat[begin : begin + (high - low) * width], int(addresses[low]))
            for low, high in consecutive_ranges(is_joined)
            for begin in (int(out_indices[low]) * width,)
        )
        file.read_ranges_into(ranges, self._label)

    def _read_chunks(
        self,
        file: RawFile | S3File | None,
        chunks: Rows,
        rows: Rows,
        out: Array,
        out_indices: Rows,
    ) -> None:
        """Read rows of chunks that are read as a whole, in a few threads."""
        numbers = np.unique(chunks)
        fetched: dict[int, Bytes] = {}
        if self.read_method == "file" and file is not None:
            # Chunks without filters that lie near each other come by one request.
            buffers = np.empty((len(numbers), self._pipeline.chunk_bytes), np.uint8)
            addresses = self._addresses(file)[numbers].tolist()
            self._check_known(numbers, np.array(addresses))
            file.read_ranges_into(zip(buffers, addresses, strict=True), self._label)
            fetched = dict(zip(numbers.tolist(), buffers, strict=True))

        def copy(span: tuple[int, int], data: Bytes) -> None:
            low, high = span
            chunk = int(chunks[low])
            values = data.view(out.dtype).reshape(-1, *self._row_shape)
            first, target = chunk * self._chunk_rows, out_indices[low:high]
            inside = rows[low:high] - first
            # Rows may repeat, so that their number alone does not say that they are consecutive.
            if bool((np.diff(inside) == 1).all() and (np.diff(target) == 1).all()):
                out[target[0] : target[-1] + 1] = values[inside[0] : inside[-1] + 1]
            else:
                out[target] = values[inside]

        def fill(span: tuple[int, int]) -> None:
            chunk = int(chunks[span[0]])
            copy(span, self._chunk(file, chunk, fetched.get(chunk)))

        pool, waiting = decode_pool(), []
        for span in consecutive_ranges(chunks[1:] == chunks[:-1]):
            # A few rows of a decoded chunk are copied in less time than a thread takes to start.
            is_small = (span[1] - span[0]) * self._row_bytes <= _INLINE_BYTES
            decoded = self._decoded(int(chunks[span[0]])) if is_small else None
            if decoded is None:
                waiting.append(span)
            else:
                copy(span, decoded)
        pool.for_each(fill, waiting)

    def _decoded(self, chunk: int) -> Bytes | None:
        """Bytes of the rows of a chunk if they are in the cache."""
        if self.read_method != "decode":
            return None
        return decode_pool().chunks.get((self._cache_key, chunk))

    def _chunk(self, file: RawFile | S3File | None, chunk: int, data: Bytes | None = None) -> Bytes:
        """Bytes of the rows of a chunk, decoded and compared; decoded ones are cached."""
        is_decoded = self.read_method == "decode"
        if (cached := self._decoded(chunk)) is not None:
            return cached
        first, stop = self._rows_of(chunk)
        if file is None:
            self._compare_by_hdf5(chunk)
            return self._rows_by_hdf5(first, stop).reshape(-1).view(np.uint8)
        if data is None:
            data = self._stored_chunk(file, chunk, mapped=True)
        self._compare(chunk, data)
        if is_decoded and self._pipeline.is_supported:
            try:
                data = self._pipeline.decode(data, int(self._mask[chunk]))
            except StoreError as error:
                raise self._unreadable(first, stop, error) from error
        elif is_decoded:
            data = self._rows_by_hdf5(first, stop).reshape(-1).view(np.uint8)
        data = data[: (stop - first) * self._row_bytes]
        if is_decoded and self._file is not None and len(data) <= CACHE_BYTES:
            decode_pool().chunks.put((self._cache_key, chunk), data)
        return data

    def _stored_chunk(self, file: RawFile | S3File, chunk: int, mapped: bool) -> Bytes:
        address = self._addresses(file)[chunk : chunk + 1]
        self._check_known(np.array([chunk]), address)
        begin, size = int(address[0]), int(self._size[chunk])
        if mapped and _is_mapped(file) and file.mapped is not None:
            return file.mapped[begin : begin + size]
        stored = np.empty(size, np.uint8)
        file.pread_into(stored, begin, self._label)
        return stored

    # Checksums

    def _may_be_due(self, chunk: int) -> bool:
        """Return whether a read of one row of a chunk may have to compare the chunk."""
        is_short = (chunk + 1) * self._chunk_rows > self._num_rows
        return not self._is_compared[chunk] and (self._least_rows == 1 or is_short)

    def _is_due(self, chunks: Rows) -> Mask:
        """(n,) whether the chunk of each of some ascending rows is compared before it is used."""
        is_open: Mask = ~self._is_compared[chunks]
        # So few rows take a large share of the last chunk only, which may be short.
        is_small = len(chunks) < self._least_rows and chunks[-1] != len(self._is_compared) - 1
        if is_small or not is_open.any():
            return np.zeros(len(chunks), np.bool_)
        starts = np.flatnonzero(np.diff(chunks, prepend=-1))
        counts = np.diff(starts, append=len(chunks))
        sizes = np.minimum(self._chunk_rows, self._num_rows - chunks[starts] * self._chunk_rows)
        return is_open & np.repeat(counts >= np.minimum(self._least_rows, sizes), counts)

    def _compare(self, chunk: int, stored: Bytes | bytes) -> None:
        """Compare a stored chunk with its checksum, unless that was done before."""
        if self._sums is None or self._is_compared[chunk]:
            return
        if not layout.agrees(self._sums[chunk], stored):
            first, stop = self._rows_of(chunk)
            begin = self._first_row
            label = self._label.removeprefix(f"{self._path}: ")
            raise StoreError(
                f"{self._path}: {label}, rows {begin + first} to {begin + stop - 1} differ from "
                f"their checksum. {repair_hint(self._path)}"
            )
        self._is_compared[chunk] = True

    def _compare_by_hdf5(self, chunk: int) -> None:
        """Compare a chunk of a dataset that h5py reads."""
        first, stop = self._rows_of(chunk)
        dataset = self._dataset
        if self._sums is None or self._is_compared[chunk] or dataset is None:
            return
        offset = (first, *(0,) * len(self._row_shape))
        try:
            _, stored = dataset.id.read_direct_chunk(offset)
        except (OSError, RuntimeError, ValueError) as error:
            if not layout.is_damage(error):
                raise
            raise self._unreadable(first, stop, error) from error
        self._compare(chunk, stored)

    # Addresses of chunks

    def _addresses_of(self, file: RawFile | S3File, rows: Rows, chunks: Rows) -> Rows:
        """Address of each row of a dataset without filters."""
        address = self._addresses(file)[chunks]
        self._check_known(chunks, address)
        return address + rows % self._chunk_rows * self._row_bytes

    def _check_known(self, chunks: Rows, address: Rows) -> None:
        if (address < 0).any():
            row = int(chunks[address < 0][0]) * self._chunk_rows
            raise StoreError(
                f"{self._label}: the chunk that starts with row {row} was never written, lies "
                "outside the file, overlaps another one, or has another size than its rows"
            )

    def _addresses(self, file: RawFile | S3File) -> Rows:
        """(chunks,) address of each chunk, -1 if it cannot be used; HDF5 lists them once."""
        with self._listing:
            if self._address is None:
                self._list_chunks(file)
        assert self._address is not None
        return self._address

    def _list_chunks(self, file: RawFile | S3File) -> None:
        """List the chunks, and leave out those that cannot be what the dataset claims."""
        infos: list[h5py.h5d.StoreInfo] = []
        if (dataset := self._dataset) is None:
            raise ValueError(f"{self._label} is closed")
        try:
            dataset.id.chunk_iter(infos.append)
            entries = [
                (i.chunk_offset[0], i.byte_offset, i.size, i.filter_mask)
                for i in infos
                if i.byte_offset is not None
            ]
            table = np.array(entries, np.int64).reshape(-1, 4)
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            if not layout.is_damage(error):
                raise
            raise StoreError(f"{self._label}: its chunks cannot be listed ({error})") from error
        chunk, rest = np.divmod(table[:, 0], self._chunk_rows)
        count = len(self._is_compared)
        if rest.any() or (chunk >= count).any() or len(np.unique(chunk)) < len(chunk):
            raise StoreError(f"{self._label}: the index of its chunks is damaged")
        address, size, mask = np.full((3, count), -1, np.int64)
        address[chunk], size[chunk], mask[chunk] = table[:, 1:].T
        is_bad = (address < 0) | (size < 1) | (address > file.size - size)
        if not self._pipeline.filters and self._pipeline.is_supported:
            is_bad |= (mask != 0) | (size != self._pipeline.chunk_bytes)
        # Of chunks that share bytes, one would be read for the other.
        order = np.argsort(address, kind="stable")
        is_overlapping = address[order[:-1]] + size[order[:-1]] > address[order[1:]]
        is_overlapping &= address[order[:-1]] >= 0
        is_bad[order[:-1][is_overlapping]] = is_bad[order[1:][is_overlapping]] = True
        address[is_bad] = -1
        self._size, self._mask, self._address = size, mask, address

    # The file

    def _open_file(self) -> RawFile | S3File | None:
        """File to read from, still as long as it was; None if h5py reads.

        Callers hold it in a local variable: `close` in another thread drops the reference of this
        object, and the descriptor is closed with the last reference.
        """
        if self.read_method == "h5py":
            return None
        file = self._file
        if file is None:
            raise ValueError(f"{self._label} is closed")
        if (size := file.current_size()) < file.size:
            raise StoreError(
                f"{self._label}: the file had {file.size} bytes when it was opened, now {size}."
            )
        return file

    def _rows_by_hdf5(self, start: int, stop: int) -> Array:
        """Rows as HDF5 reads them, which holds its lock meanwhile; contiguous."""
        dataset = self._dataset
        if dataset is None:
            raise ValueError(f"{self._label} is closed")
        try:
            return np.ascontiguousarray(dtypes.read_raw(dataset, start, stop))
        except (OSError, RuntimeError) as error:
            if not layout.is_damage(error):
                raise
            raise self._unreadable(start, stop, error) from error

    def _rows_of(self, chunk: int) -> tuple[int, int]:
        """First row of a chunk, and the row after its last one."""
        first = chunk * self._chunk_rows
        return first, min(first + self._chunk_rows, self._num_rows)

    def _unreadable(self, start: int, stop: int, error: Exception) -> StoreError:
        begin = self._first_row
        return StoreError(
            f"{self._label}: rows {begin + start} to {begin + stop - 1} cannot be read ({error}). "
            f"{repair_hint(self._path)}"
        )


def consecutive_ranges(is_joined: Mask) -> Iterator[tuple[int, int]]:
    """Start and stop of each range of items; is_joined[i]: whether item i + 1 continues item i."""
    edges = [0, *(np.flatnonzero(~is_joined) + 1).tolist(), len(is_joined) + 1]
    return itertools.pairwise(edges)


def _is_mapped(file: RawFile | S3File | None) -> TypeGuard[RawFile]:
    return file is not None and file.mapped is not None


def _is_readable_directly(dataset: h5py.Dataset, driver: str) -> bool:
    """Return whether the bytes of a dataset can be read from its file, in chunks of whole rows."""
    file = dataset.file
    return (
        dataset.chunks is not None
        and tuple(dataset.chunks[1:]) == dataset.shape[1:]
        and dataset.size > 0
        and file.driver == driver
        and file.mode == "r"  # otherwise HDF5 may hold values that are not in the file yet
        and file.userblock_size == 0
        and hasattr(dataset.id, "chunk_iter")
    )
