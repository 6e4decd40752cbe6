"""Chunk table: a second record of the addresses of all rows of a file, readable without HDF5.

HDF5 refuses a dataset, or a whole file, if one bit of its metadata is flipped. The table is found
by its first bytes alone and gives the address and checksum of every chunk, so that all intact
chunks can still be read. If the table is damaged, HDF5 is used.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.store import codecs, layout
from featx.store.dtypes import NAMES, dtype_name, raw_dtype
from featx.store.filter_pipeline import Pipeline, dataset_filters
from featx.store.hdf5_files import (
    chunks_with_verdict,
    failures_agree,
    open_metadata,
    open_plain_dataset,
    open_raw,
    row_datasets,
)
from featx.store.manifest import num_runs_of
from featx.types import Array, Json, with_features

MAGIC = b"featx chunk table 2\n"
"""First bytes of the table; the length of the rest and its checksum follow, 8 bytes each."""

CHUNK = np.dtype([("address", "<u8"), ("size", "<u8"), ("mask", "<u4"), ("sum", "<u8")])
"""Entry of a chunk: address and size in the file, filter mask, checksum."""

_WINDOW = 64 << 20
"""Size of the pieces in which a file is searched for the table, from its end."""

_START = re.compile(rb'"start":([0-9]{1,18}),')
"""First row of a file in the header of its table. No text comes before it there but a digest."""

_FIRST_WINDOW = 64 << 10
"""Size of the first piece, in which the table of a whole part lies."""

LOST_TEXT = b"lost with a damaged file"
"""Placeholder for an unknown exception or message of a failure."""


class RawBytes(Protocol):
    """Bytes of a file, on a disk or in an object store."""

    @property
    def size(self) -> int:
        """Size of the file in bytes."""

    def pread(self, size: int, address: int) -> bytes:
        """Read bytes at an address."""


def write_chunk_table(file: h5py.File, fingerprint_sha256: str, num_runs: int, start: int) -> None:
    """Write /chunk_table as the last dataset of a file."""
    file.flush()
    failures = [f"{layout.FAILURES}/{name}" for name in layout.FAILURE_COLUMNS]
    about, tables = [], []
    for path in [*row_datasets(file), *failures]:
        dataset = file[path]
        table = chunks_of(dataset)
        if dataset.chunks:
            table["sum"] = file[f"{layout.CHECKSUMS}/{path}"][:]
        elif len(table):
            table["sum"] = layout.checksum(dataset[:])
        is_feature = path.startswith(f"{layout.FEATURES}/")
        about.append(
            {
                "path": path,
                "shape": dataset.shape,
                "dtype": dtype_name(dataset) if is_feature else dataset.dtype.str,
                "chunk_rows": dataset.chunks[0] if dataset.chunks else max(1, len(dataset)),
                "filters": dataset_filters(dataset),
                "chunks": len(table),
            }
        )
        tables.append(table)
    header = {
        "fingerprint": fingerprint_sha256,
        "num_runs": num_runs,
        "start": start,
        "datasets": about,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    body = b"".join([len(text).to_bytes(8, "little"), text, *(table.tobytes() for table in tables)])
    head = MAGIC + len(body).to_bytes(8, "little") + layout.checksum(body).to_bytes(8, "little")
    file[layout.CHUNK_TABLE] = np.frombuffer(head + body, np.uint8)


def chunks_of(dataset: h5py.Dataset) -> Array:
    """Addresses of the chunks in order; a dataset without chunks counts as one chunk."""
    if dataset.chunks is None:
        if not len(dataset):
            return np.zeros(0, CHUNK)
        size = dataset.id.get_storage_size()
        return np.array([(dataset.id.get_offset(), size, 0, 0)], CHUNK)
    step = dataset.chunks[0]
    table = np.zeros(-(-len(dataset) // step), CHUNK)
    rest = (0,) * (dataset.ndim - 1)
    for number in range(len(table)):
        # get_chunk_info(number) walks over all chunks before it: 1.4 s for 4096 chunks.
        info = dataset.id.get_chunk_info_by_coord((number * step, *rest))
        table[number] = (info.byte_offset, info.size, info.filter_mask, 0)
    return table


@dataclass(frozen=True)
class DatasetEntry:
    """Entry of a dataset in a chunk table.

    `dtype` is a number type of stores, or a numpy dtype string. `table` has (chunks,) entries
    with `address`, `size`, filter `mask` and checksum `sum`.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int
    filters: list[tuple[int, tuple[int, ...]]]
    table: Array

    @property
    def raw_dtype(self) -> np.dtype[np.generic]:
        return raw_dtype(self.dtype) if self.dtype in NAMES else np.dtype(self.dtype)


@dataclass(frozen=True)
class FoundRows:
    """Rows of one dataset of a damaged file, (n, ...) as stored.

    `good` tells whether a row agrees with the checksum of its chunk; others are meaningless.
    """

    values: Array
    good: npt.NDArray[np.bool_]

    def complete(self, other: FoundRows | None) -> FoundRows:
        """Replace bad rows by those that were read by another method."""
        shape, dtype = self.values.shape, self.values.dtype
        if other is None or (other.values.shape, other.values.dtype) != (shape, dtype):
            return self
        values = self.values.copy()
        values[~self.good] = other.values[~self.good]
        return FoundRows(values, self.good | other.good)


class DamagedFile:
    """Part or features.h5 from which every intact chunk can be read.

    `file` is None if HDF5 refuses the file. `start` is its first row in the store, and
    `fingerprint_sha256` None if it is unknown.
    """

    def __init__(self, raw: RawBytes, file: h5py.File | None) -> None:
        self._raw = raw
        self._file = file
        self._entries: dict[str, DatasetEntry] = {}
        self.fingerprint_sha256: str | None = None
        self.num_runs, self.start = 1, 0
        if (header_and_entries := find_table(raw)) is not None:
            header, self._entries = header_and_entries
            self.fingerprint_sha256 = str(header["fingerprint"])
            self.num_runs, self.start = int(header["num_runs"]), int(header["start"])

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[DamagedFile]:
        """Open a file as far as it is readable."""
        with contextlib.ExitStack() as stack:
            file = None
            try:
                file = stack.enter_context(open_metadata(path))
            except (StoreError, *layout.UNREADABLE) as error:
                if not layout.is_damage(error):
                    raise
            raw = open_raw(path)
            stack.callback(raw.close)
            damaged = cls(raw, file)
            if damaged.fingerprint_sha256 is None and file is not None:
                with contextlib.suppress(*layout.UNREADABLE):
                    damaged.fingerprint_sha256 = str(file.attrs["fingerprint"])
                    damaged.start = int(file.attrs.get("start", 0))
                    damaged.num_runs = num_runs_of(file)
            yield damaged

    def rows(self, name: str, start: int, stop: int) -> FoundRows | None:
        """Read rows [start, stop) of a dataset; None if their addresses are unknown."""
        rows = None
        for read in (self._read_by_table, self._read_by_hdf5):
            with _suppress_damage():
                read_rows = read(name, start, stop)
                rows = read_rows if rows is None else rows.complete(read_rows)
            if rows is not None and rows.good.all():
                break
        return rows

    def failures(self) -> dict[int, tuple[bytes, bytes]] | None:
        """Row -> exception and message of all failed rows, or None if the rows are unknown."""
        names = [f"{layout.FAILURES}/{name}" for name in layout.FAILURE_COLUMNS]
        with _suppress_damage():
            count = self._entries[names[0]].shape[0]
            rows, errors, messages = (self._read_all_by_table(name, count) for name in names)
            if rows is None:  # the status column tells the same rows
                [num_rows] = self._entries[layout.STATUS].shape
                status = self._read_all_by_table(layout.STATUS, num_rows)
                rows = (
                    None if status is None else np.flatnonzero(~with_features(status)) + self.start
                )
            if rows is not None and len(rows) == count:
                lost = np.full(count, LOST_TEXT)
                texts = [lost if values is None else values for values in (errors, messages)]
                return dict(
                    zip(rows.tolist(), zip(*(t.tolist() for t in texts), strict=True), strict=True)
                )
        with _suppress_damage():
            if self._file is not None and failures_agree(self._file):
                rows, errors, messages = (self._file[name][:].tolist() for name in names)
                return dict(zip(rows, zip(errors, messages, strict=True), strict=True))
        return None

    def _read_all_by_table(self, name: str, count: int) -> Array | None:
        """First `count` rows of a dataset by the table, or None unless all of them are good."""
        rows = self._read_by_table(name, 0, count)
        return rows.values if rows is not None and rows.good.all() else None

    def _read_by_table(self, name: str, start: int, stop: int) -> FoundRows | None:
        entry = self._entries.get(name)
        if entry is None or stop > entry.shape[0]:
            return None
        values = np.zeros((stop - start, *entry.shape[1:]), entry.raw_dtype)
        good = np.zeros(stop - start, np.bool_)
        step = entry.chunk_rows
        for chunk in range(start // step, -(-stop // step)):
            with _suppress_damage():
                if (chunk_values := _read_chunk(self._raw, entry, chunk)) is None:
                    continue
                first = chunk * step
                low, high = max(start, first), min(stop, first + len(chunk_values))
                values[low - start : high - start] = chunk_values[low - first : high - first]
                good[low - start : high - start] = True
        return FoundRows(values, good)

    def _read_by_hdf5(self, name: str, start: int, stop: int) -> FoundRows | None:
        if self._file is None or stop > len(self._file[name]):
            return None
        step = self._file[name].chunks[0]
        blocks, verdicts = [], []
        for first, values, good in chunks_with_verdict(self._file, name, start // step * step):
            if first >= stop:
                break
            blocks.append(values[max(0, start - first) : stop - first])
            verdicts.append(np.full(len(blocks[-1]), good))
        return FoundRows(np.concatenate(blocks), np.concatenate(verdicts))


@contextlib.contextmanager
def _suppress_damage() -> Iterator[None]:
    """Suppress errors of damaged data, but not errors of access to the file."""
    try:
        yield
    except (StoreError, *layout.UNREADABLE) as error:
        if not layout.is_damage(error):
            raise


def _read_chunk(raw: RawBytes, entry: DatasetEntry, chunk: int) -> Array | None:
    """Rows of a chunk by the table, or None if it differs from its checksum."""
    chunk_entry = entry.table[chunk]
    stored = raw.pread(int(chunk_entry["size"]), int(chunk_entry["address"]))
    if not layout.agrees(chunk_entry["sum"], stored):
        return None
    codecs.require_filters(number for number, _ in entry.filters)
    row_bytes = entry.raw_dtype.itemsize * int(np.prod(entry.shape[1:], dtype=np.int64))
    pipeline = Pipeline(entry.filters, entry.chunk_rows * row_bytes)
    values = np.frombuffer(pipeline.decode(stored, int(chunk_entry["mask"])), entry.raw_dtype)
    count = min(entry.chunk_rows, entry.shape[0] - chunk * entry.chunk_rows)
    return values.reshape(-1, *entry.shape[1:])[:count]


def find_table(raw: RawBytes) -> tuple[Json, dict[str, DatasetEntry]] | None:
    """Header and datasets (path -> entry) of the last complete table in a file, or None.

    The header has `fingerprint`, `num_runs` and `start` of the file.
    """
    for header, body in _find_tables(raw):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return header, {
                about["path"]: _entry_of(about, body, first_chunk)
                for about, first_chunk in _first_chunks(header)
            }
    return None


def read_column_by_table(
    raw: RawBytes, path: str, fingerprint_sha256: str, start: int
) -> tuple[Array, int] | None:
    """Read a dataset of a file by its chunk table alone, a tenth of the time that HDF5 takes.

    Each chunk is compared with its checksum. Return the values and the checksum of the table, or
    None if a chunk differs, or if the file has no such table.
    """
    for header, body in _find_tables(raw):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            if header["fingerprint"] != fingerprint_sha256 or header["start"] != start:
                return None
            for about, first_chunk in _first_chunks(header):
                if about["path"] == path and not about["filters"]:
                    entry = _entry_of(about, body, first_chunk)
                    chunks = [_read_chunk(raw, entry, chunk) for chunk in range(len(entry.table))]
                    good = [values for values in chunks if values is not None]
                    if not good or len(good) < len(chunks):
                        return None
                    return np.concatenate(good), header["checksum"]
        break
    return None


def table_checksum(file: h5py.File) -> int | None:
    """Checksum of the chunk table of a file, or None; it changes with every row of the file."""
    with _suppress_damage():
        if layout.CHUNK_TABLE in file:
            head = open_plain_dataset(file, layout.CHUNK_TABLE)[: len(MAGIC) + 16].tobytes()
            return int.from_bytes(head[-8:], "little")
    return None


def table_header(raw: RawBytes) -> Json | None:
    """Header of the chunk table of a file, or None if it has no complete table."""
    return next((header for header, _ in _find_tables(raw)), None)


def _find_tables(raw: RawBytes) -> Iterator[tuple[Json, bytes]]:
    """Header, with the checksum of the table, and body of each complete table, from the end."""
    for address in _find_magic(raw):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            head = raw.pread(len(MAGIC) + 16, address)
            size = int.from_bytes(head[-16:-8], "little")
            if size > raw.size - address:
                continue
            body = raw.pread(size, address + len(head))
            checksum = int.from_bytes(head[-8:], "little")
            if not layout.agrees(checksum, body):
                continue
            length = int.from_bytes(body[:8], "little")
            yield {**_parse_header(body[8 : 8 + length]), "checksum": checksum}, body


def _parse_header(text: bytes) -> dict[str, object]:
    """Parse the header of a table; texts that differ in the first row only are parsed once.

    The headers of the parts of a run differ in nothing else.
    """
    if (start := _START.search(text)) is None:
        return dict(json.loads(text))
    return {**_parse_text(text[: start.start()], text[start.end() :]), "start": int(start[1])}


@functools.lru_cache(maxsize=8)
def _parse_text(before: bytes, behind: bytes) -> dict[str, object]:
    """Parse a header without its first row; callers must not change the result."""
    return dict(json.loads(before + b'"start":0,' + behind))


def _first_chunks(header: Json) -> Iterator[tuple[Json, int]]:
    """Description of each dataset, and the number of its first entry in the table."""
    first_chunk = 0
    for about in header["datasets"]:
        yield about, first_chunk
        first_chunk += about["chunks"]


def _entry_of(about: Json, body: bytes, first_chunk: int) -> DatasetEntry:
    offset = 8 + int.from_bytes(body[:8], "little") + first_chunk * CHUNK.itemsize
    table = np.frombuffer(body, CHUNK, about["chunks"], offset)
    filters = [(number, tuple(values)) for number, values in about["filters"]]
    return DatasetEntry(tuple(about["shape"]), about["dtype"], about["chunk_rows"], filters, table)


def _find_magic(raw: RawBytes) -> Iterator[int]:
    """Addresses at which a table may start, from the end of the file."""
    stop, window = raw.size, _FIRST_WINDOW
    while stop > 0:
        start = max(0, stop - window)
        data = raw.pread(stop - start + len(MAGIC) - 1, start)
        offset = data.rfind(MAGIC)
        while offset >= 0:
            yield start + offset
            offset = data.rfind(MAGIC, 0, offset + len(MAGIC) - 1)
        stop, window = start, _WINDOW


def has_chunk_table(path: Path) -> bool:
    with contextlib.closing(open_raw(path)) as raw:
        return find_table(raw) is not None
