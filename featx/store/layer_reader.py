"""Rows of the layers of a store, read from the files that hold them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.storage import S3Path
from featx.store import layout
from featx.store.chunk_reader import ChunkReader
from featx.store.chunk_table import read_column_by_table
from featx.store.contents import Contents, Segment
from featx.store.hdf5_files import ErrorRecordingFile
from featx.store.open_files import Handles, OpenFile
from featx.store.part_files import MANY_FILES, map_in_threads
from featx.types import Array


class LayerReader:
    """Rows of all layers of a store whose files were found; absent rows are NaN."""

    def __init__(self, root: Path, contents: Contents, handles: Handles) -> None:
        self._root = root
        self._contents = contents
        self._handles = handles
        self._segments: dict[str, tuple[list[Segment], npt.NDArray[np.int64]]] = {}
        self._whole_readers: dict[str, tuple[int, ChunkReader]] = {}  # layer -> process id, reader

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_whole_readers": {}}

    def chunk_rows(self, layer: str) -> int:
        """Rows per chunk in the first file of a layer."""
        segments, _ = self._segments_of(layer)
        num_rows = max(1, self._contents.num_rows)
        if not segments:
            return num_rows
        with self.open(segments[0]) as opened:
            chunks = opened.dataset(f"{layout.FEATURES}/{layer}").chunks
        return int(chunks[0]) if chunks else num_rows

    def read_range(self, layer: str, start: int, stop: int) -> Array:
        """Read rows [start, stop) of a layer, (n, ...)."""
        whole = self._read_whole(layer, lambda chunks: chunks.take_range(start, stop - start))
        if whole is not None:
            return whole
        segments, starts = self._segments_of(layer)
        number = int(starts.searchsorted(start, side="right")) - 1
        if number >= 0 and start < stop <= segments[number].stop:
            with self._open_rows(segments[number], layer) as chunks:
                return chunks.take_range(start - segments[number].start, stop - start)
        return self.read(layer, np.arange(start, stop))

    def _segments_of(self, layer: str) -> tuple[list[Segment], npt.NDArray[np.int64]]:
        """Files with rows of a layer in ascending order, and the first row of each."""
        if layer not in self._segments:
            segments = [s for s in self._contents.segments if layer in s.layers]
            segments.sort(key=lambda segment: segment.start)
            starts = np.array([segment.start for segment in segments], dtype=np.int64)
            self._segments[layer] = segments, starts
        return self._segments[layer]

    def _reader_of_whole(self, layer: str) -> ChunkReader | None:
        """Reader of a layer that lies in one file with all rows, or None for a layer in parts, or
        whose reads need HDF5.

        The reader is cached, as finding the open file takes several times as long as reading a row.
        """
        process, chunks = self._whole_readers.get(layer, (0, None))
        if chunks is not None and process == os.getpid() and not chunks.closed:
            return chunks
        segments, _ = self._segments_of(layer)
        if len(segments) != 1 or segments[0].stop - segments[0].start != self._contents.num_rows:
            return None
        with self._open_rows(segments[0], layer) as chunks:
            if not chunks.reads_without_hdf5():
                return None
            self._whole_readers[layer] = os.getpid(), chunks
        return chunks

    def _read_whole(self, layer: str, read: Callable[[ChunkReader], Array]) -> Array | None:
        """Read by `_reader_of_whole`; None if there is none."""
        while (chunks := self._reader_of_whole(layer)) is not None:
            try:
                return read(chunks)
            except ValueError:
                if not chunks.closed:  # by another thread; then the file is opened again
                    raise
        return None

    def read(self, layer: str, rows: npt.NDArray[np.int64]) -> Array:
        """Read rows of a layer, (n, ...), from one file or from several segments."""
        if (whole := self._read_whole(layer, lambda chunks: chunks.take(rows))) is not None:
            return whole
        info = self._contents.layers[layer]
        segments, starts = self._segments_of(layer)
        out = np.empty((len(rows), *info.row_shape), dtype=info.dtype)
        is_sorted = len(rows) < 2 or bool((rows[1:] >= rows[:-1]).all())
        out_indices = np.arange(len(rows)) if is_sorted else np.argsort(rows, kind="stable")
        ordered = rows if is_sorted else rows[out_indices]
        # Sorted rows fall into consecutive groups, one for each segment.
        nearest_segment = np.searchsorted(starts, ordered, side="right") - 1
        edges = np.flatnonzero(np.diff(nearest_segment)) + 1
        for low, high in itertools.pairwise([0, *edges.tolist(), len(ordered)]):
            if low == high:
                continue
            number, group = int(nearest_segment[low]), ordered[low:high]
            targets = out_indices[low:high]
            inside = 0 if number < 0 else int(np.searchsorted(group, segments[number].stop))
            out[targets[inside:]] = np.nan
            if inside:
                segment = segments[number]
                with self._open_rows(segment, layer) as chunks:
                    chunks.read(group[:inside] - segment.start, out, targets[:inside])
        return out

    def statuses(self) -> Iterator[tuple[Segment, npt.NDArray[np.uint8]]]:
        """Each segment with the status of its rows, (n,) uint8.

        If the store has very many files, only their chunk tables are read, and HDF5 opens the files
        whose table does not describe them. Fewer files stay open, so that rows that are read later
        are of the same moment.
        """
        segments = self._contents.segments
        use_tables = len(segments) >= MANY_FILES and not isinstance(segments[0].path, S3Path)
        by_table: Iterator[tuple[Array, int] | None] = itertools.repeat(None, len(segments))
        if use_tables:
            by_table = map_in_threads(_status_by_table, segments)
        for segment, found in zip(segments, by_table, strict=True):
            if found is not None:
                values, version = found
                self._handles.check_version(segment.path, version)
                yield segment, values
                continue
            with self.open(segment) as opened:
                count = segment.stop - segment.start
                yield segment, opened.column(layout.STATUS, count, "u")

    @contextlib.contextmanager
    def open(self, segment: Segment) -> Iterator[OpenFile]:
        """Open the file of a segment; refuse a file of another run or with other rows."""
        with self._handles.use(segment.path) as opened:
            if not opened.is_checked:
                attrs = opened.file.attrs
                if attrs.get("fingerprint") != segment.fingerprint_sha256:
                    raise StoreError(
                        f"{segment.path} belongs to another run than {self._root} did when it was "
                        "opened."
                    )
                if attrs.get("start", 0) != segment.start:
                    raise StoreError(f"{segment.path} holds the rows of another part.")
                opened.is_checked = True
            yield opened

    @contextlib.contextmanager
    def _open_rows(self, segment: Segment, layer: str) -> Iterator[ChunkReader]:
        info = self._contents.layers[layer]
        shape = (segment.stop - segment.start, *info.row_shape)
        with self.open(segment) as opened:
            yield opened.rows(f"{layout.FEATURES}/{layer}", shape, info.dtype, segment.start)


def _status_by_table(segment: Segment) -> tuple[Array, int] | None:
    """Status of the rows of a file by its chunk table, and the version of the file, or None."""
    with ErrorRecordingFile(segment.path) as raw:
        found = read_column_by_table(raw, layout.STATUS, segment.fingerprint_sha256, segment.start)
    if found is None or found[0].shape != (segment.stop - segment.start,):
        return None
    return found if found[0].dtype.kind == "u" else None
