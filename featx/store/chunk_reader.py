"""Reads rows of a chunked dataset directly from the file, in any number of threads.

HDF5 tells where the chunks lie; their bytes are then read from the file itself. Small rows are
gathered from a memory map by one numpy call, several times as fast as a system call or an HDF5 call
per row. Chunks with filters are read and decoded in a few threads, once for all rows that are read
from them soon; chunks with filters that only HDF5 knows are decoded by HDF5. Datasets whose chunks
are not whole rows, and files that are open for writing, are left to h5py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.storage import RawFile, S3File
from featx.store import dtypes, layout
from featx.store.chunk_cache import process
from featx.store.chunk_check import ChunkCheck, repair_hint
from featx.store.chunk_index import ChunkIndex
from featx.store.filter_pipeline import Pipeline
from featx.store.row_gather import gather, gather_into, runs

Rows: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_GATHER_ROW_BYTES = 16 << 10
"""Larger rows are copied one by one, as the loop then costs little compared with the copies."""

_CONVERT_BYTES = 16 << 20
"""Number of bytes of bfloat16 rows that are read and widened to float32 at a time."""


class ChunkRows:
    """Rows of one dataset, for any number of threads of the process that created it.

    Attributes:
        dtype: numpy dtype of the values that are read; float32 for bfloat16.
        way: how rows are read: "map" or "file" (no filters), "decode" (whole chunks with filters)
            or "h5py".
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        path: Path,
        far: S3File | None = None,
        check: ChunkCheck | None = None,
        first_row: int = 0,
    ) -> None:
        """Prepare reading; the dataset must stay open until `close`.

        Args:
            dataset: dataset of a file open for reading.
            path: path of the file, for messages.
            far: file object of h5py for a file in an object store, otherwise None.
            check: compares chunks with their checksums; None compares nothing.
            first_row: first row of the dataset in the store, for messages.

        Raises:
            StoreError: the dtype is none of a store, or the dataset is larger than the file.
        """
        self._kind = dtypes.name_of(dataset)
        self.dtype = dtypes.memory_dtype(self._kind)
        self._label = f"{path}: {dataset.name}"
        self._path = path
        self._first_row = first_row
        self._dataset: h5py.Dataset | None = dataset
        self._row_shape: tuple[int, ...] = dataset.shape[1:]
        self._num_rows = int(dataset.shape[0])
        self._chunk_rows = int(dataset.chunks[0]) if dataset.chunks else self._num_rows
        self._file: RawFile | S3File | None = None
        self._token = object()
        self._check_of_chunks = check
        self.way = "h5py"
        if not _is_direct(dataset, "sec2" if far is None else "fileobj"):
            return
        pipeline = Pipeline.of(dataset)
        is_coded = len(pipeline) > 0 or not pipeline.supported
        self._pipeline = pipeline
        self._row_bytes = pipeline.chunk_bytes // self._chunk_rows
        file = far or RawFile(dataset.file.id.get_vfd_handle(), may_map=not is_coded)
        if pipeline.supported:
            self._index = ChunkIndex(dataset, self._label, pipeline, file.size)
        self._file = file
        self.way = "decode" if is_coded else "map" if file.mapped is not None else "file"

    def take(self, rows: Rows) -> npt.NDArray[Any]:
        """Read rows in any order, with repeats; the fastest way to random rows.

        Args:
            rows: (n,) rows of the dataset.

        Returns:
            (n, *row shape) array.

        Raises:
            IndexError, StoreError, OSError: as `read`.
        """
        small = self.way == "map" and self._row_bytes <= _GATHER_ROW_BYTES
        if small and self._kind != "bfloat16" and len(rows) > 1:
            if rows.min() < 0 or rows.max() >= self._num_rows:
                raise self._out_of_range(int(rows.min()), int(rows.max()))
            file, at = self._locate(rows)
            assert _is_mapped(file)
            if self._check_of_chunks is not None:
                self._compare_mapped(file, self._check_of_chunks.due_of_rows(rows))
            taken = gather(file, at, self._row_bytes)
            return taken.view(self.dtype).reshape(len(rows), *self._row_shape)
        out = np.empty((len(rows), *self._row_shape), self.dtype)
        if len(rows) == 1:
            self.read_run(int(rows[0]), out)
            return out
        order = np.argsort(rows, kind="stable")
        self.read(rows[order], out, order)
        return out

    def take_run(self, first: int, count: int) -> npt.NDArray[Any]:
        """Read consecutive rows.

        Args:
            first: first row.
            count: number of rows.

        Returns:
            (count, *row shape) array.

        Raises:
            IndexError, StoreError, OSError: as `read`.
        """
        last = first + count - 1
        if self.way == "map" and self._index.whole and 0 <= first <= last < self._num_rows:
            origin = self._index.origin[first // self._chunk_rows : last // self._chunk_rows + 1]
            begin = int(origin[0])
            # Adjacent chunks have the same origin, so their rows are contiguous in the file.
            if self._kind != "bfloat16" and bool((origin == begin).all()):
                begin += first * self._row_bytes
                file = self._checked_file()
                assert _is_mapped(file)
                assert file.mapped is not None
                copied = file.mapped[begin : begin + count * self._row_bytes].copy()
                if self._check_of_chunks is not None:
                    due = self._check_of_chunks.due_of_run(first, count)
                    # The copy is in the CPU cache, which the mapped chunk may not be.
                    copies = [chunk for chunk in due if self._is_within(chunk, first, count)]
                    self._compare_read(copies, copied, first * self._row_bytes, self._row_bytes)
                    if len(copies) < len(due):
                        self._compare_mapped(file, [at for at in due if at not in copies])
                return copied.view(self.dtype).reshape(count, *self._row_shape)
        out = np.empty((count, *self._row_shape), self.dtype)
        self.read_run(first, out)
        return out

    def read(self, rows: Rows, out: npt.NDArray[Any], places: Rows) -> None:
        """Read row rows[i] into out[places[i]].

        Args:
            rows: (n,) ascending rows, repeats allowed.
            out: (m, *row shape) contiguous array of `dtype`.
            places: (n,) distinct indices in [0, m).

        Raises:
            IndexError: a row or an index is out of range.
            StoreError: a row is not in the file, or is damaged.
            OSError: the file cannot be read now.
        """
        if len(rows) != len(places):
            raise ValueError(f"{len(rows)} rows, but {len(places)} indices into `out`")
        if not len(rows):
            return
        first, last = int(rows[0]), int(rows[-1])
        place = int(places[0])
        if len(rows) > 1:
            steps, moves = rows[1:] - rows[:-1], places[1:] - places[:-1]
            smallest = int(steps.min())
            if smallest < 0 or places.min() < 0 or places.max() >= len(out):
                raise IndexError("rows must increase, and `places` must be indices into `out`")
            # Consecutive rows for consecutive places are one range of the file.
            joined = smallest == 1 == steps.max() and (moves == 1).all()
        elif not 0 <= place < len(out):
            raise IndexError(f"index {place} is out of range for an array of {len(out)} rows")
        if len(rows) == 1 or joined:
            self.read_run(first, out[place : place + len(rows)])
            return
        self._check(first, last, out)
        self._read_any(rows, out, places)

    def read_run(self, first: int, out: npt.NDArray[Any]) -> None:
        """Read consecutive rows into an array.

        Args:
            first: first row.
            out: (n, *row shape) contiguous array of `dtype`; n rows are read.

        Raises:
            IndexError, StoreError, OSError: as `read`.
        """
        count = len(out)
        self._check(first, first + count - 1, out)
        if not count:
            return
        if self.way in ("h5py", "decode") or self._kind == "bfloat16":
            places = np.arange(count)
            self._read_any(places + first, out, places)
            return
        file = self._checked_file()
        width, per_chunk = self._row_bytes, self._chunk_rows
        chunk, last_chunk = first // per_chunk, (first + count - 1) // per_chunk
        if not self._index.whole:
            self._index.find(np.arange(chunk, last_chunk + 1))
        check, due = self._check_of_chunks, []
        if check is not None:
            due = check.due_of_run(first, count)
            if _is_mapped(file):
                self._compare_mapped(file, due)
                due = []
            elif due and (around := self._aligned(first, count, due)) != (first, first + count):
                # Without a map, the rows and the chunks to compare come from one read.
                whole = np.empty((around[1] - around[0], *self._row_shape), self.dtype)
                self.read_run(around[0], whole)
                out[:] = whole[first - around[0] :][:count]
                return
        flat = out.reshape(-1).view(np.uint8)
        begin = end = int(self._index.origin[chunk]) + first * width
        done = 0
        pieces = []
        for at in range(chunk, last_chunk + 1):
            start = max(first, at * per_chunk)
            stop = min(first + count, (at + 1) * per_chunk)
            lies = int(self._index.origin[at]) + start * width
            if lies != end:  # adjacent chunks are read as one range
                pieces.append((flat[done : done + end - begin], begin))
                done += end - begin
                begin = end = lies
            end += (stop - start) * width
        file.read_pieces([*pieces, (flat[done:], begin)], self._label)
        self._compare_read(due, flat, first * width, width)

    @property
    def closed(self) -> bool:
        """Whether `close` was called; rows cannot be read any more."""
        return self._dataset is None

    def close(self) -> None:
        """Release the file; reads in progress in other threads still succeed."""
        self._dataset = self._file = None
        process().cache.drop(self._token)

    def _check(self, first: int, last: int, out: npt.NDArray[Any]) -> None:
        """Raise ValueError or IndexError if rows [first, last] do not fit `out` or the dataset."""
        if out.dtype != self.dtype or out.shape[1:] != self._row_shape:
            raise ValueError(f"rows of {self._label} do not fit {out.shape} {out.dtype}")
        if not out.flags.c_contiguous:
            raise ValueError("rows are read into contiguous arrays only")
        if first < 0 or last >= self._num_rows:
            raise self._out_of_range(first, last)

    def _out_of_range(self, first: int, last: int) -> IndexError:
        """Error for rows that the dataset does not have."""
        return IndexError(f"{self._label} has {self._num_rows} rows, not {first} to {last}")

    def _decode_by_hdf5(self, chunk: int) -> Bytes:
        """Decode one chunk by HDF5, which holds its lock meanwhile.

        Returns:
            (chunk bytes,) uint8; zeros follow the rows of an edge chunk.

        Raises:
            ValueError: the dataset was closed.
            OSError, RuntimeError: HDF5 cannot read the chunk.
        """
        dataset = self._dataset
        if dataset is None:
            raise ValueError(f"{self._label} is closed")
        first, last = self._rows_of(chunk)
        rows = dtypes.read_raw(dataset, first, last + 1)
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        if len(data) == self._pipeline.chunk_bytes:
            return data
        whole = np.zeros(self._pipeline.chunk_bytes, np.uint8)
        whole[: len(data)] = data
        return whole

    def _rows_of(self, chunk: int) -> tuple[int, int]:
        """First and last row of a chunk, both in the dataset."""
        first = chunk * self._chunk_rows
        return first, min(first + self._chunk_rows, self._num_rows) - 1

    def _unreadable(self, first: int, last: int, error: Exception) -> StoreError:
        """Error for rows that cannot be read."""
        begin = self._first_row
        return StoreError(
            f"{self._label}: rows {begin + first} to {begin + last} cannot be read ({error}). "
            f"{repair_hint(self._path)}"
        )

    def _checked_file(self) -> RawFile | S3File:
        """File to read from, checked to be as long as it was; callers hold it in a local variable.

        `close` in another thread drops the reference of this object, and the descriptor is closed
        with the last reference.
        """
        file = self._file
        if file is None:
            raise ValueError(f"{self._label} is closed")
        if (size := file.size_now()) < file.size:
            raise StoreError(
                f"{self._label}: the file had {file.size} bytes when it was opened, now {size}."
            )
        return file

    def _aligned(self, first: int, count: int, due: Sequence[int]) -> tuple[int, int]:
        """Smallest range with rows [first, first + count) and all rows of the chunks in `due`."""
        start = min(first, due[0] * self._chunk_rows)
        stop = min(max(first + count, (due[-1] + 1) * self._chunk_rows), self._num_rows)
        return start, stop

    def _compare_read(
        self, due: Sequence[int], data: npt.NDArray[Any], start: int, width: int = 1
    ) -> None:
        """Compare chunks that were read completely.

        Args:
            due: numbers of the chunks.
            data: rows as stored, or their bytes, in order.
            start: position of the first item of `data`, counted in items from the start of the
                dataset.
            width: items per row.
        """
        check = self._check_of_chunks
        if not due or check is None:
            return

        def compare(chunk: int) -> None:
            check.compare(chunk, data[chunk * self._chunk_rows * width - start :])

        process().each(compare, due)

    def _is_within(self, chunk: int, first: int, count: int) -> bool:
        """Whether all rows of a chunk are among the `count` rows from `first` on."""
        begin = chunk * self._chunk_rows
        return first <= begin and min(begin + self._chunk_rows, self._num_rows) <= first + count

    def _compare_mapped(self, file: RawFile, due: Sequence[int]) -> None:
        """Compare chunks of a mapped file with their checksums; raises the errors of `read`."""
        check, mapped = self._check_of_chunks, file.mapped
        if not due or check is None or mapped is None:
            return
        if not self._index.whole:
            self._index.find(np.array(due))

        def compare(chunk: int) -> None:
            at = int(self._index.at[chunk])
            check.compare(chunk, mapped[at : at + self._pipeline.chunk_bytes])

        process().each(compare, due)

    def _locate(self, rows: Rows) -> tuple[RawFile | S3File, Rows]:
        """File and address of each row, for a dataset without filters."""
        chunks = rows // self._chunk_rows
        self._index.find(chunks)
        return self._checked_file(), self._index.origin[chunks] + rows * self._row_bytes

    def _read_any(self, rows: Rows, out: npt.NDArray[Any], places: Rows) -> None:
        """Read ascending rows to given places, by the way of this dataset."""
        if self.way == "h5py":
            self._read_by_h5py(rows, out, places)
        elif self._kind != "bfloat16":
            self._read_bits(rows, out, places)
        else:
            step = max(1, _CONVERT_BYTES // self._row_bytes)
            for i in range(0, len(rows), step):
                part = rows[i : i + step]
                raw = np.empty((len(part), *self._row_shape), dtypes.raw_dtype(self._kind))
                self._read_bits(part, raw, np.arange(len(part)))
                out[places[i : i + step]] = dtypes.from_raw(raw, self._kind)

    def _read_by_h5py(self, rows: Rows, out: npt.NDArray[Any], places: Rows) -> None:
        """Read rows by h5py, one hyperslab per run of rows without gaps."""
        dataset = self._dataset
        if dataset is None:
            raise ValueError(f"{self._label} is closed")
        for low, high in runs(rows[1:] - rows[:-1] <= 1):
            first, last = int(rows[low]), int(rows[high - 1])
            check = self._check_of_chunks
            due = [] if check is None else check.due_of_run(first, last + 1 - first)
            start, stop = first, last + 1
            if due:
                start, stop = self._aligned(first, last + 1 - first, due)
            try:
                raw = dtypes.read_raw(dataset, start, stop)
            except (OSError, RuntimeError) as error:
                if not layout.is_damage(error):
                    raise
                raise self._unreadable(first, last, error) from error
            self._compare_read(due, np.ascontiguousarray(raw), start)
            block = dtypes.from_raw(raw, self._kind)
            out[places[low:high]] = block[rows[low:high] - start]

    def _read_bits(self, rows: Rows, out: npt.NDArray[Any], places: Rows) -> None:
        """Read stored bits of rows without conversion."""
        if self.way == "decode":
            self._read_decoded(rows, out, places)
            return
        if self._check_of_chunks is not None:
            rows, places = self._read_due(rows, out, places)
            if not len(rows):
                return
        file, at = self._locate(rows)
        width = self._row_bytes
        target = out.reshape(len(out), -1).view(np.uint8)
        joined = (at[1:] - at[:-1] == width) & (places[1:] - places[:-1] == 1)
        num_runs = len(at) - int(np.count_nonzero(joined))
        if num_runs > 4 and width <= _GATHER_ROW_BYTES and _is_mapped(file):
            gather_into(file.items(width), at, target.view(f"V{width}").reshape(-1), places)
            return
        flat = target.reshape(-1)
        spans = ((low, high, int(places[low]) * width) for low, high in runs(joined))
        pieces = (
            (flat[begin : begin + (high - low) * width], int(at[low])) for low, high, begin in spans
        )
        file.read_pieces(pieces, self._label)

    def _read_due(self, rows: Rows, out: npt.NDArray[Any], places: Rows) -> tuple[Rows, Rows]:
        """Compare the chunks that are due, for a dataset without filters.

        If the file is not mapped, the rows of these chunks are read at the same time.

        Returns:
            rows that are still to be read, and their places.
        """
        file, check = self._checked_file(), self._check_of_chunks
        due = [] if check is None else check.due_of_rows(rows)
        if _is_mapped(file):
            self._compare_mapped(file, due)
            return rows, places
        if not due or check is None:
            return rows, places
        self._index.find(np.array(due))
        chunk_bytes = self._pipeline.chunk_bytes
        left = np.ones(len(rows), np.bool_)
        step = max(1, _CONVERT_BYTES // chunk_bytes)
        for i in range(0, len(due), step):
            some = due[i : i + step]
            whole = np.empty((len(some), chunk_bytes), np.uint8)
            pieces = [(whole[j], int(self._index.at[chunk])) for j, chunk in enumerate(some)]
            file.read_pieces(pieces, self._label)
            for data, chunk in zip(whole, some, strict=True):
                check.compare(chunk, data)
                first = chunk * self._chunk_rows
                low, high = np.searchsorted(rows, [first, first + self._chunk_rows])
                values = data.view(out.dtype).reshape(self._chunk_rows, *self._row_shape)
                out[places[low:high]] = values[rows[low:high] - first]
                left[low:high] = False
        return rows[left], places[left]

    def _read_decoded(self, rows: Rows, out: npt.NDArray[Any], places: Rows) -> None:
        """Read rows of compressed chunks; chunks are decoded in threads and cached."""
        file = self._checked_file()
        chunks = rows // self._chunk_rows
        if self._pipeline.supported:
            self._index.find(chunks)
        shared = process()

        def fill(span: tuple[int, int]) -> None:
            low, high = span
            chunk = int(chunks[low])
            whole = shared.cache.get(self._token, chunk)
            if whole is None:
                whole = self._decode(file, chunk)
                if self._file is not None:
                    shared.cache.put(self._token, chunk, whole)
            values = whole.view(out.dtype).reshape(self._chunk_rows, *self._row_shape)
            out[places[low:high]] = values[rows[low:high] - chunk * self._chunk_rows]

        shared.each(fill, list(runs(chunks[1:] == chunks[:-1])))

    def _decode(self, file: RawFile | S3File, chunk: int) -> Bytes:
        """Read and decode one chunk, and compare it with its checksum."""
        whole = refusal = None
        if self._pipeline.supported:
            stored = np.empty(int(self._index.size[chunk]), np.uint8)
            file.pread_into(stored, int(self._index.at[chunk]), self._label)
            try:
                whole = self._pipeline.decode(stored, int(self._index.mask[chunk]))
            except StoreError as error:
                if self._check_of_chunks is None:
                    raise self._unreadable(*self._rows_of(chunk), error) from error
                refusal = error
        if whole is None:
            # HDF5 decodes what is not known here, and chunks that are refused here: its filters
            # may ignore some bits. The checksum then tells whether the rows are right.
            try:
                whole = self._decode_by_hdf5(chunk)
            except (OSError, RuntimeError) as error:
                if refusal is None and not layout.is_damage(error):
                    raise
                raise self._unreadable(*self._rows_of(chunk), refusal or error) from error
        if self._check_of_chunks is not None:
            self._check_of_chunks.compare(chunk, whole)
        return whole


def _is_mapped(file: RawFile | S3File) -> TypeGuard[RawFile]:
    """Whether the file is mapped into memory."""
    return file.mapped is not None


def _is_direct(dataset: h5py.Dataset, driver: str) -> bool:
    """Whether the bytes of a dataset can be read from its file, in chunks of whole rows."""
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
