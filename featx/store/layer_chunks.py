"""Chunks of one layer: addresses and checksums, in arrays over all files of a store.

They come from the chunk table at the end of each file, which one read fetches: HDF5 takes 1.6 ms
to open a part, and the table 0.1 ms.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.storage import S3File
from featx.store import codecs, layout
from featx.store.chunk_index import ChunkIndex
from featx.store.chunk_table import CHUNK, DatasetEntry, find_table
from featx.store.dtypes import dtype_name
from featx.store.filter_pipeline import Pipeline
from featx.store.tail_file import open_tail

if TYPE_CHECKING:
    from featx.store.contents import Segment
    from featx.store.reader import FeatureStore

Rows = npt.NDArray[np.int64]

FileState = tuple[int, int, int, int] | None
"""Device, inode, size and modification time of a file; None in an object store."""


@dataclass(frozen=True)
class LayerFile:
    """File with rows of a layer.

    Attributes:
        segment: path and rows of the file.
        pipeline: filters of its chunks.
        state: state of the file when its chunk table was read.
    """

    segment: Segment
    pipeline: Pipeline
    state: FileState


class LayerChunks:
    """Chunks of a layer; arrays have one entry for each chunk of each file.

    Args:
        store: open store.
        layer: name of the layer.

    Attributes:
        path: path of the dataset in a file.
        files: files with rows of the layer, in ascending order of their rows.
        dtype: name of the number type, as stored.
        row_bytes: bytes of a row, decoded.
        address: (chunks,) int64 address of the first byte in its file.
        size: (chunks,) int64 bytes in the file.
        mask: (chunks,) int64 filter mask.
        sums: (chunks,) uint32 checksum of the rows.
        is_compared: (chunks,) bool, whether the rows were compared with their checksum.

    Raises:
        StoreError: the addresses of a file cannot be read or are impossible.
    """

    def __init__(self, store: FeatureStore, layer: str) -> None:
        self.path = f"{layout.FEATURES}/{layer}"
        self._row_shape = store[layer].shape[1:]
        segments, starts = store._layer_reader._segments_of(layer)
        files, entries = list[LayerFile](), list[DatasetEntry]()
        for segment in segments:
            entry, state = self._entry_of(store, segment)
            entries.append(entry)
            # All parts of a run share one pipeline.
            shares_pipeline = (
                entries[0].filters == entry.filters and entries[0].chunk_rows == entry.chunk_rows
            )
            pipeline = files[0].pipeline if files and shares_pipeline else _pipeline(entry)
            files.append(LayerFile(segment, pipeline, state))
        if not files:
            raise StoreError(f"{store.root} has no rows of {layer} yet.")
        self.files: tuple[LayerFile, ...] = tuple(files)
        self.dtype = entries[0].dtype
        self.row_bytes = _row_bytes(entries[0])
        table = np.concatenate([entry.table for entry in entries])
        self.address, self.size, self.mask = (
            table[name].astype(np.int64) for name in ("address", "size", "mask")
        )
        self.sums: npt.NDArray[np.uint32] = table["crc"].copy()
        self.is_compared = np.zeros(len(table), np.bool_)
        self._starts: Rows = starts
        self._stops = np.array([file.segment.stop for file in files], np.int64)
        self._chunk_rows = np.array([entry.chunk_rows for entry in entries], np.int64)
        counts = np.array([len(entry.table) for entry in entries], np.int64)
        self._first_chunk: Rows = np.cumsum(counts) - counts

    def locate(self, rows: Rows) -> tuple[Rows, Rows, Rows]:
        """File and chunk of each row, and its position in the chunk, each (n,).

        Args:
            rows: (n,) rows of the store.

        Raises:
            StoreError: a row is in no file.
        """
        file = np.searchsorted(self._starts, rows, side="right") - 1
        if len(rows) and (file.min() < 0 or (rows >= self._stops[file]).any()):
            raise StoreError(f"some rows are not in the store yet, such as {int(rows.max())}.")
        within = rows - self._starts[file]
        chunk, row = np.divmod(within, self._chunk_rows[file])
        return file, chunk + self._first_chunk[file], row

    def file_of(self, chunk: int) -> int:
        """Number of the file that holds a chunk."""
        return int(np.searchsorted(self._first_chunk, chunk, side="right")) - 1

    def rows_of(self, chunk: int) -> tuple[int, int]:
        """First row of a chunk in the store, and the number of its rows."""
        file = self.file_of(chunk)
        step = int(self._chunk_rows[file])
        start = int(self._starts[file]) + (chunk - int(self._first_chunk[file])) * step
        return start, min(step, int(self._stops[file]) - start)

    @property
    def chunk_rows(self) -> int:
        """Largest number of rows of a chunk."""
        return int(self._chunk_rows.max())

    def is_stored_plainly(self) -> bool:
        """Return whether no file has filters, so that rows lie in the files as they are."""
        return all(file.pipeline.is_supported and not len(file.pipeline) for file in self.files)

    def is_supported(self) -> bool:
        """Return whether all filters are known, so that chunks are decoded without HDF5."""
        return all(file.pipeline.is_supported for file in self.files)

    def _entry_of(self, store: FeatureStore, segment: Segment) -> tuple[DatasetEntry, FileState]:
        """Chunks of a layer in one file, and the state of the file."""
        with contextlib.closing(open_tail(segment.path)) as raw:
            size = raw.size
            state = None if isinstance(raw, S3File) else file_state(raw.fileno())
            entry = None
            if (header_and_entries := find_table(raw)) is not None:
                header, entries = header_and_entries
                if (
                    header["fingerprint"] != segment.fingerprint_sha256
                    or header["start"] != segment.start
                ):
                    raise StoreError(
                        f"{segment.path} belongs to another run than {store.root} did when it was "
                        "opened."
                    )
                entry = entries.get(self.path)
        if entry is None:
            entry = self._entry_by_hdf5(store, segment, size)
        count = segment.stop - segment.start
        if entry.shape != (count, *self._row_shape) or not _fits(entry, size):
            raise StoreError(f"{segment.path}: the chunk table of /{self.path} is impossible.")
        return entry, state

    def _entry_by_hdf5(self, store: FeatureStore, segment: Segment, size: int) -> DatasetEntry:
        """Chunks of a layer in a file whose chunk table is damaged, from HDF5."""
        with store._layer_reader.open(segment) as opened:
            dataset = opened.dataset(self.path)
            properties = dataset.id.get_create_plist()
            filter_infos = [properties.get_filter(i) for i in range(properties.get_nfilters())]
            filters = [(number, tuple(values)) for number, _, values, _ in filter_infos]
            count = -(-len(dataset) // dataset.chunks[0])
            index = ChunkIndex(dataset, f"{segment.path}: {self.path}", Pipeline.of(dataset), size)
            index.find(np.arange(count))
            table = np.zeros(count, CHUNK)
            table["address"], table["size"], table["mask"] = index.address, index.size, index.mask
            if (sums := opened.checksums(self.path)) is not None:
                table["crc"] = sums
            step = int(dataset.chunks[0])
            return DatasetEntry(dataset.shape, dtype_name(dataset), step, filters, table)


def file_state(descriptor: int) -> FileState:
    """State of an open file, which differs after another file has taken its name."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _row_bytes(entry: DatasetEntry) -> int:
    """Bytes of a decoded row."""
    return int(np.prod(entry.shape[1:], dtype=np.int64)) * entry.raw_dtype.itemsize


def _pipeline(entry: DatasetEntry) -> Pipeline:
    """Filters of a dataset; the plug-in is loaded if one of them needs it."""
    codecs.load_plugin_for(number for number, _ in entry.filters)
    return Pipeline(entry.filters, entry.chunk_rows * _row_bytes(entry))


def _fits(entry: DatasetEntry, file_size: int) -> bool:
    """Return whether the chunks of a table are as many as they should be and lie in the file."""
    if len(entry.table) != -(-entry.shape[0] // entry.chunk_rows):
        return False
    address, size = entry.table["address"], entry.table["size"]
    if (size > file_size).any() or (address > file_size - size).any():
        return False
    chunk_bytes = entry.chunk_rows * _row_bytes(entry)
    return bool(entry.filters) or bool((size == chunk_bytes).all())
