"""Rows that a store had when it was opened and has no more."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from featx.errors import LayerError, StoreError, nearest
from featx.storage.s3_path import parse_path
from featx.store import layout
from featx.store.chunk_check import Verify, check_verify
from featx.store.chunk_reader import ChunkRows
from featx.store.contents import Segment, find_contents
from featx.store.hdf5_files import Handles, OpenFile
from featx.store.layer_array import LayerArray
from featx.types import UNKNOWN_IMAGE, Status


def check_rows_present(
    store: FeatureStore, layer: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]
) -> None:
    """Raise StoreError where rows that were ok have no values any more.

    A store whose files went looks for them anew, and what is not there then reads as NaN; a row
    that is ok never holds one.

    Args:
        store: the rows were read from.
        layer: of these values.
        rows: (n,) of the store, ok when it was opened.
        values: (n, ...) what was read of them.
    """
    if not values.size:
        return
    gone = np.isnan(values.reshape(len(rows), -1)[:, 0])
    if gone.any():
        raise StoreError(
            f"{store.root} has lost row {int(rows[gone][0])} of {layer} since it was opened. The "
            "command that made the store computes it again."
        )


T = TypeVar("T")


def open(path: str | os.PathLike[str], verify: Verify = "chunks") -> FeatureStore:
    """Open a store for reading: its folder (also while the run goes on) or a features.h5.

    Args:
        path: OUT, OUT/features.h5, or any other file of the same format; on a disk, or in an
            object store as s3://bucket/OUT, of which only the rows that are asked for are read.
        verify: what is compared with its checksum when it is read, each chunk once in a process.
            "chunks": every chunk of which a read takes a quarter or more (in an object store half),
            of compressed layers every chunk. So single rows of an uncompressed layer are not
            compared. "rows": every chunk of which a read takes any row; the first row of a chunk
            then costs the reading of the whole chunk, about 1 MiB. False: nothing.

    Raises:
        ConfigError: verify is none of these.
        StoreError: there is no store, it is damaged, of a newer format, or names other files.
    """
    return FeatureStore(path, verify)


class FeatureStore:
    """The features of one run; `store[layer]` is a lazy array of shape (N, ...).

    Attributes:
        root: the folder or file it was opened from.
        layers: the names of the datasets.
        complete: whether every row of the listing is there.
        classes: names of the classes; `labels` index them.
        columns: names of what else the data set said of each row; see `column`.
        verify: what is compared with its checksum when it is read; see `open`.
    """

    root: Path
    complete: bool
    classes: tuple[str, ...]
    columns: tuple[str, ...]

    def __init__(self, path: str | os.PathLike[str], verify: Verify = "chunks") -> None:
        check_verify(verify)
        self.root = parse_path(path).absolute()
        self.verify = verify
        self._handles = Handles(verify)
        self._find()

    def refresh(self) -> FeatureStore:
        """Look again which rows and layers are there; for a run that still goes on."""
        self._handles = Handles(self.verify)
        columns = ("keys", "labels", "status", "failures", "key_bytes", "image_checksums")
        for name in (*columns, "_key_order"):
            self.__dict__.pop(name, None)
        self._find()
        return self

    def _find(self) -> None:
        self._contents = find_contents(self.root, self._handles)
        self.complete = self._contents.complete
        self.attrs = self._contents.attrs
        self._places: dict[str, tuple[list[Segment], npt.NDArray[np.int64]]] = {}
        self._at_hand: dict[str, tuple[int, ChunkRows]] = {}
        self.classes = self._contents.classes
        self.columns = self._contents.column_names

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_at_hand": {}}

    def __len__(self) -> int:
        return self._contents.num_rows

    def __repr__(self) -> str:
        state = "complete" if self.complete else f"{self.num_rows_present} of {len(self)} rows"
        arrays = ", ".join(f"{name} {self[name].shape}" for name in self.layers)
        return f"<FeatureStore {self.root}: {arrays}; {state}>"

    def __getitem__(self, layer: str) -> LayerArray:
        if layer not in self._contents.layers:
            raise LayerError(
                f"{self.root} has no layer {layer!r}; it has {', '.join(self.layers)}."
                f"{nearest(layer, self.layers)}"
            )
        return LayerArray(self, layer)

    def __contains__(self, layer: object) -> bool:
        return layer in self._contents.layers

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self._contents.layers)

    @property
    def num_rows_present(self) -> int:
        """Rows that are in the store by now, failed ones included."""
        segments, _ = self._segments_of(self.layers[0])
        return sum(segment.stop - segment.start for segment in segments)

    @cached_property
    def keys(self) -> npt.NDArray[np.str_]:
        """(N,) str: the path of each image below data.root; unusual bytes as os.fsdecode gives."""
        decoded = [os.fsdecode(key) for key in self.key_bytes.tolist()]
        return np.array(decoded, dtype=np.str_)

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """(N,) int64: index into `classes`, -1 where an image has none."""
        labels: npt.NDArray[np.int64] = self._column(layout.LABEL, "i")
        return labels

    def column(self, name: str) -> npt.NDArray[Any]:
        """What the data set said of each row in one of its `columns` (data.columns).

        Returns:
            (N,) int64, float64 (NaN where a value is missing), bool, or str (empty where one is).

        Raises:
            StoreError: there is no such column.
        """
        if name not in self.columns:
            raise StoreError(
                f"{self.root} has no column {name!r}; it has {', '.join(self.columns) or 'none'}."
                f"{nearest(name, self.columns)}"
            )
        values = self._column(f"{layout.COLUMNS}/{name}", "Sbif")
        if values.dtype.kind != "S":
            return values
        texts = [text.decode("utf-8", "surrogateescape") for text in values.tolist()]
        return np.array(texts, dtype=np.str_)

    @cached_property
    def status(self) -> npt.NDArray[np.uint8]:
        """(N,) uint8: 0 ok, 255 not there yet, else the reason of the failure (featx.types)."""
        return self._again_if_packed(self._read_status)

    def _read_status(self) -> npt.NDArray[np.uint8]:
        status = np.full(len(self), Status.ABSENT, dtype=np.uint8)
        for segment in self._contents.segments:
            with self._open(segment) as opened:
                found = opened.column(layout.STATUS, segment.stop - segment.start, "u")
            # A row that failed in one run has failed, whatever a later run made of it.
            before = status[segment.start : segment.stop]
            undecided = (before == Status.ABSENT) | (before == Status.OK)
            before[undecided] = found[undecided]
        return status

    @cached_property
    def image_checksums(self) -> npt.NDArray[np.uint64]:
        """(N,) uint64: BLAKE2b (8 bytes, little-endian) of the encoded image that each row was
        computed from; 1 where there was none, 0 where it is not known or the row not there."""
        return self._again_if_packed(self._read_image_checksums)

    def _read_image_checksums(self) -> npt.NDArray[np.uint64]:
        checksums = np.full(len(self), UNKNOWN_IMAGE, dtype=np.uint64)
        for segment in self._contents.segments:
            with self._open(segment) as opened:
                if layout.IMAGE_CHECKSUM not in opened.file:
                    continue
                num_rows = segment.stop - segment.start
                found = opened.column(layout.IMAGE_CHECKSUM, num_rows, "u")
            before = checksums[segment.start : segment.stop]
            unknown = before == UNKNOWN_IMAGE
            before[unknown] = found[unknown]
        return checksums

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """(N,) bool: the rows that hold features."""
        mask: npt.NDArray[np.bool_] = self.status == Status.OK
        return mask

    @cached_property
    def failures(self) -> list[dict[str, Any]]:
        """The failed rows in order: row, key, status (name), error, message."""
        found = []
        for row, error, message in self._again_if_packed(self._read_failures):
            found.append(
                {
                    "row": row,
                    "key": str(self.keys[row]),
                    "status": self._status_label(row),
                    "error": error.decode("utf-8", "replace"),
                    "message": message.decode("utf-8", "replace"),
                }
            )
        return sorted(found, key=lambda failure: failure["row"])

    def _status_label(self, row: int) -> str:
        try:
            return Status(int(self.status[row])).label
        except ValueError as error:
            raise StoreError(f"{self.root}: row {row} has status {self.status[row]}.") from error

    def _read_failures(self) -> list[tuple[int, bytes, bytes]]:
        found: dict[int, tuple[int, bytes, bytes]] = {}
        for segment in self._contents.segments:
            with self._open(segment) as opened:
                if not opened.file.attrs.get("num_failures", 1):
                    continue
                columns = [values.tolist() for values in opened.failures()]
            for row, error, message in zip(*columns, strict=True):
                if not segment.start <= row < segment.stop:
                    raise StoreError(f"{segment.path} has failures of rows that are not in it.")
                found.setdefault(row, (row, error, message))
        return list(found.values())

    def row(self, key: str | bytes) -> int:
        """The position of an image by its key.

        Raises:
            KeyError: there is no such key.
        """
        wanted = os.fsencode(key)
        order = self._key_order
        at = int(np.searchsorted(self.key_bytes, np.bytes_(wanted), sorter=order))
        rows = np.arange(len(self)) if order is None else order
        if at < len(self) and bytes(self.key_bytes[rows[at]]) == wanted:
            return int(rows[at])
        nearby = self.keys[rows[max(0, at - 500) : at + 500]].tolist()
        raise KeyError(f"{self.root} has no row {key!r}.{nearest(os.fsdecode(wanted), nearby)}")

    def xy(self, layer: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Features and labels of the ok rows, as scikit-learn takes them.

        Returns:
            X (n, D) float32, each row flattened, and y (n,) int64.
        """
        rows = np.flatnonzero(self.ok)
        width = int(np.prod(self[layer].shape[1:], dtype=np.int64))
        features = self[layer][rows].reshape(len(rows), width).astype(np.float32)
        return features, self.labels[rows]

    @cached_property
    def key_bytes(self) -> npt.NDArray[np.bytes_]:
        """(N,) fixed-length bytes: the keys as the file system gives them."""
        keys = self._column(layout.KEY, "S")
        return keys.view(f"S{keys.dtype.itemsize}")  # without what h5py adds to its types

    @cached_property
    def _key_order(self) -> npt.NDArray[np.int64] | None:
        """The rows in order of their keys, or None where they are: only growing changes that."""
        keys = self.key_bytes
        return None if (keys[1:] > keys[:-1]).all() else np.argsort(keys, kind="stable")

    def _column(self, name: str, kind: str) -> npt.NDArray[Any]:
        """A column of the listing: one entry per row, of numpy's kind `kind`."""
        with self._handles.use(self._contents.columns) as opened:
            return opened.column(name, len(self), kind)

    @contextlib.contextmanager
    def _open(self, segment: Segment) -> Iterator[OpenFile]:
        """The open file of a segment; what is of another run is refused."""
        with self._handles.use(segment.path) as opened:
            if not opened.known:
                attrs = opened.file.attrs
                if attrs.get("fingerprint") != segment.identity:
                    raise StoreError(
                        f"{segment.path} is of another run than {self.root} was when it was opened."
                    )
                if attrs.get("start", 0) != segment.start:
                    raise StoreError(f"{segment.path} holds the rows of another part.")
                opened.known = True
            yield opened

    def _segments_of(self, layer: str) -> tuple[list[Segment], npt.NDArray[np.int64]]:
        """The files with rows of a layer in order of their rows, and the first row of each."""
        if layer not in self._places:
            there = [s for s in self._contents.segments if layer in s.layers]
            there.sort(key=lambda segment: segment.start)
            starts = np.array([segment.start for segment in there], dtype=np.int64)
            self._places[layer] = there, starts
        return self._places[layer]

    def _again_if_packed(self, read: Callable[[], T]) -> T:
        """What `read` returns, after another look where the parts went because of packing.

        Raises:
            StoreError: the rows did not go into a packed file, or it is another store now.
        """
        try:
            return read()
        except FileNotFoundError as error:
            before, present = self._contents, self.num_rows_present
            self.refresh()
            now = self._contents
            if now.attrs["fingerprint"] != before.attrs["fingerprint"]:
                raise StoreError(
                    f"{self.root} has changed since it was opened; open it again."
                ) from error
            if self.num_rows_present < present:
                raise StoreError(
                    f"{self.root}: rows that were there are gone; {error.filename} is missing."
                ) from error
            return read()

    def _read(self, layer: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Rows of one layer in any order and with repeats; rows not there are NaN.

        Args:
            layer: its name.
            rows: (n,) in [0, N).

        Returns:
            (n, ...)
        """
        return self._again_if_packed(lambda: self._read_rows(layer, rows))

    def _read_run(self, layer: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows [start, stop) of one layer, (n, ...); rows not there are NaN."""

        def read() -> npt.NDArray[Any]:
            if (chunks := self._whole(layer)) is None:
                return self._read_rows(layer, np.arange(start, stop))
            return chunks.take_run(start, stop - start)

        return self._again_if_packed(read)

    def _whole(self, layer: str) -> ChunkRows | None:
        """The rows of a layer that lies in one file, kept at hand; None for parts.

        Finding the open file costs several times what a single row does.
        """
        process, chunks = self._at_hand.get(layer, (0, None))
        if chunks is not None and process == os.getpid() and not chunks.closed:
            return chunks
        segments, _ = self._segments_of(layer)
        if len(segments) != 1 or segments[0].stop - segments[0].start != len(self):
            return None
        with self._open_rows(segments[0], layer) as chunks:
            self._at_hand[layer] = os.getpid(), chunks
        return chunks

    def _read_rows(self, layer: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        if (chunks := self._whole(layer)) is not None:
            return chunks.take(rows)
        info = self._contents.layers[layer]
        segments, starts = self._segments_of(layer)
        out = np.empty((len(rows), *info.row_shape), dtype=info.dtype)
        increasing = len(rows) < 2 or bool((rows[1:] >= rows[:-1]).all())
        places = np.arange(len(rows)) if increasing else np.argsort(rows, kind="stable")
        ordered = rows if increasing else rows[places]
        nearest_segment = np.searchsorted(starts, ordered, side="right") - 1
        edges = np.flatnonzero(np.diff(nearest_segment)) + 1
        for low, high in itertools.pairwise([0, *edges.tolist(), len(ordered)]):
            if low == high:
                continue
            self._fill(
                layer, segments, int(nearest_segment[low]), ordered[low:high], places[low:high], out
            )
        return out

    def _fill(
        self,
        layer: str,
        segments: list[Segment],
        number: int,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
    ) -> None:
        """Put increasing rows of one segment at their places of `out`; NaN where it has none."""
        if number < 0:
            out[places] = np.nan
            return
        segment = segments[number]
        inside = int(np.searchsorted(rows, segment.stop))
        out[places[inside:]] = np.nan
        if inside:
            with self._open_rows(segment, layer) as chunks:
                chunks.read(rows[:inside] - segment.start, out, places[:inside])

    def _chunk_rows(self, layer: str) -> int:
        """Rows of a chunk in the first file of a layer."""

        def read() -> int:
            segments, _ = self._segments_of(layer)
            if not segments:
                return max(1, len(self))
            with self._open(segments[0]) as opened:
                chunks = opened.dataset(f"{layout.FEATURES}/{layer}").chunks
            return int(chunks[0]) if chunks else max(1, len(self))

        return self._again_if_packed(read)

    @contextlib.contextmanager
    def _open_rows(self, segment: Segment, layer: str) -> Iterator[ChunkRows]:
        """The rows of a layer that lie in one segment."""
        info = self._contents.layers[layer]
        shape = (segment.stop - segment.start, *info.row_shape)
        with self._open(segment) as opened:
            yield opened.rows(f"{layout.FEATURES}/{layer}", shape, info.dtype, segment.start)
