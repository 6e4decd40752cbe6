"""Reads rows of a chunked dataset directly from the file, in any number of threads.

HDF5 gives the addresses of the chunks; their bytes are then read from the file itself. Small rows
are gathered from a memory map by one numpy call, several times as fast as a system call or an HDF5
call per row. Chunks with filters are read and decoded in a few threads, once for all rows that are
read from them soon; chunks with filters that only HDF5 knows are decoded by HDF5. Datasets whose
chunks are not whole rows, and files that are open for writing, are left to h5py.
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
from featx.store.chunk_cache import decode_pool
from featx.store.chunk_check import ChunkCheck, repair_hint
from featx.store.chunk_index import ChunkIndex
from featx.store.filter_pipeline import Pipeline
from featx.store.row_gather import consecutive_ranges, gather, gather_into

Rows: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_GATHER_ROW_BYTES = 16 << 10
"""Larger rows are copied one by one, as the loop then costs little compared with the copies."""

_CONVERT_BYTES = 16 << 20
"""Number of bytes of bfloat16 rows that are read and widened to float32 at a time."""


class ChunkReader:
    """Rows of one dataset, for any number of threads of the process that created it.

    Attributes:
        dtype: numpy dtype of the values that are read; float32 for bfloat16.
        read_method: how rows are read: "map" or "file" (no filters), "decode" (whole chunks with
            filters) or "h5py".
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        path: Path,
        file: RawFile | S3File | None = None,
        check: ChunkCheck | None = None,
        first_row: int = 0,
    ) -> None:
        """Prepare reading; the dataset must stay open until `close`.

        Args:
            dataset: dataset of a file open for reading.
            path: path of the file, for messages.
            file: file to read from, which readers may share: that of h5py for one in an object
                store. None opens the file of the dataset once more.
            check: compares chunks with their checksums; None compares nothing.
            first_row: first row of the dataset in the store, for messages.

        Raises:
            StoreError: the dtype is none of a store, or the dataset is larger than the file.
        """
        self._dtype_name = dtypes.dtype_name(dataset)
        self.dtype = dtypes.memory_dtype(self._dtype_name)
        self._label = f"{path}: {dataset.name}"
        self._path = path
        self._first_row = first_row
        self._dataset: h5py.Dataset | None = dataset
        self._row_shape: tuple[int, ...] = dataset.shape[1:]
        self._num_rows = int(dataset.shape[0])
        self._chunk_rows = int(dataset.chunks[0]) if dataset.chunks else self._num_rows
        self._file: RawFile | S3File | None = None
        self._cache_key = object()
        self._chunk_check = check
        self.read_method = "h5py"
        if not _is_readable_directly(dataset, "fileobj" if isinstance(file, S3File) else "sec2"):
            return
        pipeline = Pipeline.of(dataset)
        has_filters = len(pipeline) > 0 or not pipeline.is_supported
        self._pipeline = pipeline
        self._row_bytes = pipeline.chunk_bytes // self._chunk_rows
        if file is None:
            file = RawFile(dataset.file.id.get_vfd_handle(), may_map=not has_filters)
        if pipeline.is_supported:
            self._index = ChunkIndex(dataset, self._label, pipeline, file.size)
        self._file = file
        self.read_method = "decode" if has_filters else "map" if file.mapped is not None else "file"

    def take(self, rows: Rows) -> npt.NDArray[Any]:
        """Read rows in any order, with repeats; the fastest way to random rows.

        Args:
            rows: (n,) rows of the dataset.

        Returns:
            (n, *row shape) array.

        Raises:
            IndexError, StoreError, OSError: as `read`.
        """
        small = self.read_method == "map" and self._row_bytes <= _GATHER_ROW_BYTES
        if small and self._dtype_name != "bfloat16" and len(rows) > 1:
            if rows.min() < 0 or rows.max() >= self._num_rows:
                raise self._range_error(int(rows.min()), int(rows.max()))
            file, addresses = self._locate(rows)
            assert _is_mapped(file)
            if self._chunk_check is not None:
                self._compare_mapped(file, self._chunk_check.due_in_rows(rows))
            taken = gather(file, addresses, self._row_bytes)
            return taken.view(self.dtype).reshape(len(rows), *self._row_shape)
        out = np.empty((len(rows), *self._row_shape), self.dtype)
        if len(rows) == 1:
            self.read_range(int(rows[0]), out)
            return out
        order = np.argsort(rows, kind="stable")
        self.read(rows[order], out, order)
        return out

    def take_range(self, first: int, count: int) -> npt.NDArray[Any]:
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
        if (
            self.read_method == "map"
            and self._index.is_complete
            and 0 <= first <= last < self._num_rows
        ):
            origin = self._index.origin[first // self._chunk_rows : last // self._chunk_rows + 1]
            begin = int(origin[0])
            # Adjacent chunks have the same origin, so their rows are contiguous in the file.
            if self._dtype_name != "bfloat16" and bool((origin == begin).all()):
                begin += first * self._row_bytes
                file = self._check_file()
                assert _is_mapped(file)
                assert file.mapped is not None
                copied = file.mapped[begin : begin + count * self._row_bytes].copy()
                if self._chunk_check is not None:
                    due = self._chunk_check.due_in_range(first, count)
                    # The copy is in the CPU cache, which the mapped chunk may not be.
                    copies = [chunk for chunk in due if self._contains_chunk(chunk, first, count)]
                    self._compare_rows(copies, copied, first * self._row_bytes, self._row_bytes)
                    if len(copies) < len(due):
                        self._compare_mapped(file, [chunk for chunk in due if chunk not in copies])
                return copied.view(self.dtype).reshape(count, *self._row_shape)
        out = np.empty((count, *self._row_shape), self.dtype)
        self.read_range(first, out)
        return out

    def read(self, rows: Rows, out: npt.NDArray[Any], out_indices: Rows) -> None:
        """Read row rows[i] into out[out_indices[i]].

        Args:
            rows: (n,) ascending rows, repeats allowed.
            out: (m, *row shape) contiguous array of `dtype`.
            out_indices: (n,) distinct indices in [0, m).

        Raises:
            IndexError: a row or an index is out of range.
            StoreError: a row is not in the file, or is damaged.
            OSError: the file cannot be read now.
        """
        if len(rows) != len(out_indices):
            raise ValueError(f"{len(rows)} rows, but {len(out_indices)} indices into `out`")
        if not len(rows):
            return
        first, last = int(rows[0]), int(rows[-1])
        out_index = int(out_indices[0])
        if len(rows) > 1:
            steps, moves = rows[1:] - rows[:-1], out_indices[1:] - out_indices[:-1]
            smallest = int(steps.min())
            if smallest < 0 or out_indices.min() < 0 or out_indices.max() >= len(out):
                raise IndexError("rows must increase, and `out_indices` must be indices into `out`")
            # Consecutive rows for consecutive indices are one range of the file.
            is_joined = smallest == 1 == steps.max() and (moves == 1).all()
        elif not 0 <= out_index < len(out):
            raise IndexError(f"index {out_index} is out of range for an array of {len(out)} rows")
        if len(rows) == 1 or is_joined:
            self.read_range(first, out[out_index : out_index + len(rows)])
            return
        self._check_range(first, last, out)
        self._read_ascending(rows, out, out_indices)

    def read_range(self, first: int, out: npt.NDArray[Any]) -> None:
        """Read consecutive rows into an array.

        Args:
            first: first row.
            out: (n, *row shape) contiguous array of `dtype`; n rows are read.

        Raises:
            IndexError, StoreError, OSError: as `read`.
        """
        count = len(out)
        self._check_range(first, first + count - 1, out)
        if not count:
            return
        if self.read_method in ("h5py", "decode") or self._dtype_name == "bfloat16":
            out_indices = np.arange(count)
            self._read_ascending(out_indices + first, out, out_indices)
            return
        file = self._check_file()
        width, per_chunk = self._row_bytes, self._chunk_rows
        chunk, last_chunk = first // per_chunk, (first + count - 1) // per_chunk
        if not self._index.is_complete:
            self._index.find(np.arange(chunk, last_chunk + 1))
        check, due = self._chunk_check, []
        if check is not None:
            due = check.due_in_range(first, count)
            if _is_mapped(file):
                self._compare_mapped(file, due)
                due = []
            elif due:
                start, stop = self._align_with_chunks(first, count, due)
                if (start, stop) != (first, first + count):
                    # Without a map, the rows and the chunks to compare come from one read.
                    whole = np.empty((stop - start, *self._row_shape), self.dtype)
                    self.read_range(start, whole)
                    out[:] = whole[first - start :][:count]
                    return
        flat = out.reshape(-1).view(np.uint8)
        begin = end = int(self._index.origin[chunk]) + first * width
        done = 0
        ranges = []
        for number in range(chunk, last_chunk + 1):
            start = max(first, number * per_chunk)
            stop = min(first + count, (number + 1) * per_chunk)
            address = int(self._index.origin[number]) + start * width
            if address != end:  # adjacent chunks are read as one range
                ranges.append((flat[done : done + end - begin], begin))
                done += end - begin
                begin = end = address
            end += (stop - start) * width
        file.read_ranges_into([*ranges, (flat[done:], begin)], self._label)
        self._compare_rows(due, flat, first * width, width)

    @property
    def closed(self) -> bool:
        """Whether `close` was called; rows cannot be read any more."""
        return self._dataset is None

    def close(self) -> None:
        """Release the file; reads in progress in other threads still succeed."""
        self._dataset = self._file = None
        decode_pool().cache.drop(self._cache_key)

    def _check_range(self, first: int, last: int, out: npt.NDArray[Any]) -> None:
        """Raise ValueError or IndexError if rows [first, last] do not fit `out` or the dataset."""
        if out.dtype != self.dtype or out.shape[1:] != self._row_shape:
            raise ValueError(f"rows of {self._label} do not fit {out.shape} {out.dtype}")
        if not out.flags.c_contiguous:
            raise ValueError("rows are read into contiguous arrays only")
        if first < 0 or last >= self._num_rows:
            raise self._range_error(first, last)

    def _range_error(self, first: int, last: int) -> IndexError:
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

    def _unreadable_error(self, first: int, last: int, error: Exception) -> StoreError:
        """Error for rows that cannot be read."""
        begin = self._first_row
        return StoreError(
            f"{self._label}: rows {begin + first} to {begin + last} cannot be read ({error}). "
            f"{repair_hint(self._path)}"
        )

    def _check_file(self) -> RawFile | S3File:
        """File to read from, checked to be as long as it was; callers hold it in a local variable.

        `close` in another thread drops the reference of this object, and the descriptor is closed
        with the last reference.
        """
        file = self._file
        if file is None:
            raise ValueError(f"{self._label} is closed")
        if (size := file.current_size()) < file.size:
            raise StoreError(
                f"{self._label}: the file had {file.size} bytes when it was opened, now {size}."
            )
        return file

    def _align_with_chunks(self, first: int, count: int, due: Sequence[int]) -> tuple[int, int]:
        """Smallest range with rows [first, first + count) and all rows of the chunks in `due`."""
        start = min(first, due[0] * self._chunk_rows)
        stop = min(max(first + count, (due[-1] + 1) * self._chunk_rows), self._num_rows)
        return start, stop

    def _compare_rows(
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
        check = self._chunk_check
        if not due or check is None:
            return

        def compare(chunk: int) -> None:
            check.compare(chunk, data[chunk * self._chunk_rows * width - start :])

        decode_pool().for_each(compare, due)

    def _contains_chunk(self, chunk: int, first: int, count: int) -> bool:
        """Return whether all rows of a chunk are among the `count` rows from `first` on."""
        begin = chunk * self._chunk_rows
        return first <= begin and min(begin + self._chunk_rows, self._num_rows) <= first + count

    def _compare_mapped(self, file: RawFile, due: Sequence[int]) -> None:
        """Compare chunks of a mapped file with their checksums; raises the errors of `read`."""
        check, mapped = self._chunk_check, file.mapped
        if not due or check is None or mapped is None:
            return
        if not self._index.is_complete:
            self._index.find(np.array(due))

        def compare(chunk: int) -> None:
            address = int(self._index.address[chunk])
            check.compare(chunk, mapped[address : address + self._pipeline.chunk_bytes])

        decode_pool().for_each(compare, due)

    def _locate(self, rows: Rows) -> tuple[RawFile | S3File, Rows]:
        """File and address of each row, for a dataset without filters."""
        chunks = rows // self._chunk_rows
        self._index.find(chunks)
        return self._check_file(), self._index.origin[chunks] + rows * self._row_bytes

    def _read_ascending(self, rows: Rows, out: npt.NDArray[Any], out_indices: Rows) -> None:
        """Read ascending rows into out[out_indices], by the read method of this dataset."""
        if self.read_method == "h5py":
            self._read_by_h5py(rows, out, out_indices)
        elif self._dtype_name != "bfloat16":
            self._read_bits(rows, out, out_indices)
        else:
            step = max(1, _CONVERT_BYTES // self._row_bytes)
            for i in range(0, len(rows), step):
                part = rows[i : i + step]
                raw = np.empty((len(part), *self._row_shape), dtypes.raw_dtype(self._dtype_name))
                self._read_bits(part, raw, np.arange(len(part)))
                out[out_indices[i : i + step]] = dtypes.from_raw(raw, self._dtype_name)

    def _read_by_h5py(self, rows: Rows, out: npt.NDArray[Any], out_indices: Rows) -> None:
        """Read rows by h5py, one hyperslab per run of rows without gaps."""
        dataset = self._dataset
        if dataset is None:
            raise ValueError(f"{self._label} is closed")
        for low, high in consecutive_ranges(rows[1:] - rows[:-1] <= 1):
            first, last = int(rows[low]), int(rows[high - 1])
            check = self._chunk_check
            due = [] if check is None else check.due_in_range(first, last + 1 - first)
            start, stop = first, last + 1
            if due:
                start, stop = self._align_with_chunks(first, last + 1 - first, due)
            try:
                raw = dtypes.read_raw(dataset, start, stop)
            except (OSError, RuntimeError) as error:
                if not layout.is_damage(error):
                    raise
                raise self._unreadable_error(first, last, error) from error
            self._compare_rows(due, np.ascontiguousarray(raw), start)
            block = dtypes.from_raw(raw, self._dtype_name)
            out[out_indices[low:high]] = block[rows[low:high] - start]

    def _read_bits(self, rows: Rows, out: npt.NDArray[Any], out_indices: Rows) -> None:
        """Read stored bits of rows without conversion."""
        if self.read_method == "decode":
            self._read_decoded(rows, out, out_indices)
            return
        if self._chunk_check is not None:
            rows, out_indices = self._read_due(rows, out, out_indices)
            if not len(rows):
                return
        file, addresses = self._locate(rows)
        width = self._row_bytes
        target = out.reshape(len(out), -1).view(np.uint8)
        is_joined = (addresses[1:] - addresses[:-1] == width) & (
            out_indices[1:] - out_indices[:-1] == 1
        )
        num_ranges = len(addresses) - int(np.count_nonzero(is_joined))
        if num_ranges > 4 and width <= _GATHER_ROW_BYTES and _is_mapped(file):
            items = target.view(f"V{width}").reshape(-1)
            gather_into(file.items(width), addresses, items, out_indices)
            return
        flat = target.reshape(-1)
        bounds = (
            (low, high, int(out_indices[low]) * width)
            for low, high in consecutive_ranges(is_joined)
        )
        ranges = (
            (flat[begin : begin + (high - low) * width], int(addresses[low]))
            for low, high, begin in bounds
        )
        file.read_ranges_into(ranges, self._label)

    def _read_due(self, rows: Rows, out: npt.NDArray[Any], out_indices: Rows) -> tuple[Rows, Rows]:
        """Compare the chunks that are due, for a dataset without filters.

        If the file is not mapped, the rows of these chunks are read at the same time.

        Returns:
            rows that are still to be read, and their indices into `out`.
        """
        file, check = self._check_file(), self._chunk_check
        due = [] if check is None else check.due_in_rows(rows)
        if _is_mapped(file):
            self._compare_mapped(file, due)
            return rows, out_indices
        if not due or check is None:
            return rows, out_indices
        self._index.find(np.array(due))
        chunk_bytes = self._pipeline.chunk_bytes
        left = np.ones(len(rows), np.bool_)
        step = max(1, _CONVERT_BYTES // chunk_bytes)
        for i in range(0, len(due), step):
            some = due[i : i + step]
            whole = np.empty((len(some), chunk_bytes), np.uint8)
            ranges = [(whole[j], int(self._index.address[chunk])) for j, chunk in enumerate(some)]
            file.read_ranges_into(ranges, self._label)
            for data, chunk in zip(whole, some, strict=True):
                check.compare(chunk, data)
                first = chunk * self._chunk_rows
                low, high = np.searchsorted(rows, [first, first + self._chunk_rows])
                values = data.view(out.dtype).reshape(self._chunk_rows, *self._row_shape)
                out[out_indices[low:high]] = values[rows[low:high] - first]
                left[low:high] = False
        return rows[left], out_indices[left]

    def _read_decoded(self, rows: Rows, out: npt.NDArray[Any], out_indices: Rows) -> None:
        """Read rows of compressed chunks; chunks are decoded in threads and cached."""
        file = self._check_file()
        chunks = rows // self._chunk_rows
        if self._pipeline.is_supported:
            self._index.find(chunks)
        pool = decode_pool()

        def fill(span: tuple[int, int]) -> None:
            low, high = span
            chunk = int(chunks[low])
            whole = pool.cache.get(self._cache_key, chunk)
            if whole is None:
                whole = self._decode(file, chunk)
                if self._file is not None:
                    pool.cache.put(self._cache_key, chunk, whole)
            values = whole.view(out.dtype).reshape(self._chunk_rows, *self._row_shape)
            out[out_indices[low:high]] = values[rows[low:high] - chunk * self._chunk_rows]

        pool.for_each(fill, list(consecutive_ranges(chunks[1:] == chunks[:-1])))

    def _decode(self, file: RawFile | S3File, chunk: int) -> Bytes:
        """Read and decode one chunk, and compare it with its checksum."""
        whole = refusal = None
        if self._pipeline.is_supported:
            stored = np.empty(int(self._index.size[chunk]), np.uint8)
            file.pread_into(stored, int(self._index.address[chunk]), self._label)
            try:
                whole = self._pipeline.decode(stored, int(self._index.mask[chunk]))
            except StoreError as error:
                if self._chunk_check is None:
                    raise self._unreadable_error(*self._rows_of(chunk), error) from error
                refusal = error
        if whole is None:
            # HDF5 decodes what is not known here, and chunks that are refused here: its filters
            # may ignore some bits. The checksum then tells whether the rows are right.
            try:
                whole = self._decode_by_hdf5(chunk)
            except (OSError, RuntimeError) as error:
                if refusal is None and not layout.is_damage(error):
                    raise
                raise self._unreadable_error(*self._rows_of(chunk), refusal or error) from error
        if self._chunk_check is not None:
            self._chunk_check.compare(chunk, whole)
        return whole


def _is_mapped(file: RawFile | S3File) -> TypeGuard[RawFile]:
    """Return whether the file is mapped into memory."""
    return file.mapped is not None


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
