"""Reads a store: lazy arrays of features, with keys, labels, status and failures of rows."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from featx.base import declared_function
from featx.errors import LayerError, StoreError, nearest
from featx.storage import parse_path
from featx.store import layout
from featx.store.chunk_check import Verify, check_verify
from featx.store.chunk_reader import ChunkRows
from featx.store.contents import Segment, find_contents
from featx.store.description import describe_html, describe_text
from featx.store.hdf5_files import Handles, OpenFile
from featx.store.layer_array import LayerArray
from featx.types import UNKNOWN_IMAGE, Status


def check_rows_present(
    store: FeatureStore, layer: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]
) -> None:
    """Raise StoreError if rows that were ok have lost their values since the store was opened.

    When files of a store vanish, the reader looks for them again, and rows that it cannot find read
    as NaN. A row that is ok never starts with NaN.

    Args:
        store: store that the rows were read from.
        layer: name of the layer.
        rows: (n,) rows of the store that were ok when it was opened.
        values: (n, ...) values read from these rows.
    """
    if not values.size:
        return
    gone = np.isnan(values.reshape(len(rows), -1)[:, 0])
    if gone.any():
        raise StoreError(
            f"{store.root} has lost row {int(rows[gone][0])} of {layer} since it was opened. Give "
            "the command that made the store again to compute it."
        )


T = TypeVar("T")


def open(path: str | os.PathLike[str], verify: Verify = "chunks") -> FeatureStore:
    """Open a store for reading.

    Args:
        path: folder of a store (also while a run writes to it), its features.h5, or another file of
            the same format; on a disk or as s3://bucket/run. Only requested rows are read.
        verify: which chunks are compared with their checksums when they are read; each chunk is
            compared once per process. "chunks": chunks of which one read takes a quarter or more
            (half in an object store), and all chunks of compressed layers; so single rows of an
            uncompressed layer are not compared. "rows": all chunks of which a row is read; the
            first row of a chunk then costs a read of the whole chunk, about 1 MiB. False: none.

    Raises:
        ConfigError: `verify` is none of these values.
        StoreError: there is no store, or it is damaged, of a newer format, or refers to other
            files.
    """
    return FeatureStore(path, verify)


class FeatureStore:
    """Features of a data set; `store[layer]` is a lazy array of shape (N, ...).

    A store can be pickled and used in forked processes; each process opens its own files.

    Args:
        path: as for `featx.open`.
        verify: as for `featx.open`.

    Attributes:
        root: absolute path of the folder or file.
        layers: names of the layers.
        complete: whether every row of the listing is there.
        classes: names of the classes; `labels` are indices into them.
        columns: names of the columns that the data set has; see `column`.
        attrs: root attributes of the store: model, weights, transform, config and others.
        verify: as for `featx.open`.
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
        """Look again which rows and layers exist, while a run is in progress; returns self."""
        self._handles = Handles(self.verify)
        columns = ("keys", "labels", "status", "failures", "key_bytes", "image_checksums")
        for name in (*columns, "_key_order"):
            self.__dict__.pop(name, None)
        self._find()
        return self

    def _find(self) -> None:
        """Find the files of the store and reset everything that depends on them."""
        self._contents = find_contents(self.root, self._handles)
        self.complete = self._contents.complete
        self.attrs = self._contents.attrs
        self._places: dict[str, tuple[list[Segment], npt.NDArray[np.int64]]] = {}
        self._at_hand: dict[str, tuple[int, ChunkRows]] = {}  # layer -> process id, reader
        self.classes = self._contents.classes
        self.columns = self._contents.column_names

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_at_hand": {}}

    def __len__(self) -> int:
        return self._contents.num_rows

    def __repr__(self) -> str:
        return describe_text(self)

    def _repr_html_(self) -> str:
        """Return the description that notebooks show."""
        return describe_html(self)

    def show(
        self, rows: int | Sequence[int] = 10, data: str | os.PathLike[str] | None = None
    ) -> Any:
        """Return images of some rows, which a notebook shows as a grid of thumbnails.

        The images are read again from the data set of the store. One that is gone or cannot be
        decoded is shown as its reason.

        Args:
            rows: number of ok rows, evenly spaced, or a list of rows; at most 100.
            data: folder of the images, if they have moved.

        Raises:
            ConfigError: there are no such rows, or too many are asked for.
            StoreError: the store does not record where its images are.
        """
        return declared_function("FeatureStore.show")(self, rows, data)

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
        """Names of the layers."""
        return tuple(self._contents.layers)

    @property
    def num_rows_present(self) -> int:
        """Number of rows that the store holds so far, failed ones included."""
        segments, _ = self._segments_of(self.layers[0])
        return sum(segment.stop - segment.start for segment in segments)

    @cached_property
    def keys(self) -> npt.NDArray[np.str_]:
        """(N,) str: key of each row, usually a path below data.root, decoded by os.fsdecode."""
        decoded = [os.fsdecode(key) for key in self.key_bytes.tolist()]
        return np.array(decoded, dtype=np.str_)

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """(N,) int64: index into `classes`, -1 for rows without a label."""
        labels: npt.NDArray[np.int64] = self._column(layout.LABEL, "i")
        return labels

    def column(self, name: str) -> npt.NDArray[Any]:
        """Values of one of the `columns` that the data set has for each row (option data.columns).

        Returns:
            (N,) int64, float64 (NaN for missing values), bool, or str (empty for missing values).

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
        """(N,) uint8: `featx.types.Status` of each row; 0 is ok, 255 is not computed yet."""
        return self._again_if_packed(self._read_status)

    def _read_status(self) -> npt.NDArray[np.uint8]:
        """Combine the status of all files; see `status`."""
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
        """(N,) uint64: BLAKE2b checksum (8 bytes, little-endian) of each row's encoded image.

        0 stands for rows that are not there or have no recorded checksum, 1 for rows without image
        bytes.
        """
        return self._again_if_packed(self._read_image_checksums)

    def _read_image_checksums(self) -> npt.NDArray[np.uint64]:
        """Combine the checksums of all files; see `image_checksums`."""
        checksums = np.full(len(self), UNKNOWN_IMAGE, dtype=np.uint64)
        for segment in self._contents.segments:
            with self._open(segment) as opened:
                num_rows = segment.stop - segment.start
                found = opened.column(layout.IMAGE_CHECKSUM, num_rows, "u")
            before = checksums[segment.start : segment.stop]
            unknown = before == UNKNOWN_IMAGE
            before[unknown] = found[unknown]
        return checksums

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """(N,) bool: whether the row holds features."""
        mask: npt.NDArray[np.bool_] = self.status == Status.OK
        return mask

    @cached_property
    def failures(self) -> list[dict[str, Any]]:
        """Failed rows in ascending order, each with row, key, status (a word), error and
        message.
        """
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
        """Status of a row in words; raises StoreError for a number that is no status."""
        try:
            return Status(int(self.status[row])).label
        except ValueError as error:
            raise StoreError(f"{self.root}: row {row} has status {self.status[row]}.") from error

    def _read_failures(self) -> list[tuple[int, bytes, bytes]]:
        """Row, exception and message of each failed row, from the first run in which it failed."""
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
        """Row number of a key.

        Raises:
            KeyError: there is no such key; the message names similar keys.
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
        """Features and labels of all ok rows, as scikit-learn takes them.

        Args:
            layer: name of the layer.

        Returns:
            X (n, D) float32 with flattened features, and y (n,) int64.
        """
        rows = np.flatnonzero(self.ok)
        width = int(np.prod(self[layer].shape[1:], dtype=np.int64))
        features = self[layer][rows].reshape(len(rows), width).astype(np.float32)
        return features, self.labels[rows]

    @cached_property
    def key_bytes(self) -> npt.NDArray[np.bytes_]:
        """(N,) fixed-length bytes: keys as the file system gives them."""
        keys = self._column(layout.KEY, "S")
        return keys.view(f"S{keys.dtype.itemsize}")  # drops the metadata that h5py adds to dtypes

    @cached_property
    def _key_order(self) -> npt.NDArray[np.int64] | None:
        """(N,) rows sorted by key, or None if they are sorted, as they are unless a store grew."""
        keys = self.key_bytes
        return None if (keys[1:] > keys[:-1]).all() else np.argsort(keys, kind="stable")

    def _column(self, name: str, kind: str) -> npt.NDArray[Any]:
        """Column of the listing, (N,), whose dtype has one of numpy's kinds in `kind`."""
        with self._handles.use(self._contents.columns) as opened:
            return opened.column(name, len(self), kind)

    @contextlib.contextmanager
    def _open(self, segment: Segment) -> Iterator[OpenFile]:
        """Open the file of a segment; refuse a file of another run or with other rows."""
        with self._handles.use(segment.path) as opened:
            if not opened.known:
                attrs = opened.file.attrs
                if attrs.get("fingerprint") != segment.identity:
                    raise StoreError(
                        f"{segment.path} belongs to another run than {self.root} did when it was "
                        "opened."
                    )
                if attrs.get("start", 0) != segment.start:
                    raise StoreError(f"{segment.path} holds the rows of another part.")
                opened.known = True
            yield opened

    def _segments_of(self, layer: str) -> tuple[list[Segment], npt.NDArray[np.int64]]:
        """Files with rows of a layer in ascending order, and the first row of each."""
        if layer not in self._places:
            there = [s for s in self._contents.segments if layer in s.layers]
            there.sort(key=lambda segment: segment.start)
            starts = np.array([segment.start for segment in there], dtype=np.int64)
            self._places[layer] = there, starts
        return self._places[layer]

    def _again_if_packed(self, read: Callable[[], T]) -> T:
        """Call `read`, and once more after a refresh if a part vanished due to packing.

        Raises:
            StoreError: the rows are not in a packed file, or another store took the place of this
                one.
        """
        try:
            return read()
        except FileNotFoundError as error:
            before, present = self._contents, self.num_rows_present
            self.refresh()
            now = self._contents
            if now.attrs["fingerprint"] != before.attrs["fingerprint"]:
                raise StoreError(
                    f"{self.root} has changed since it was opened. Open it again."
                ) from error
            if self.num_rows_present < present:
                raise StoreError(
                    f"{self.root} has lost rows since it was opened: {error.filename} is missing."
                ) from error
            return read()

    def _read(self, layer: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Read rows of a layer in any order; absent rows are NaN.

        Args:
            layer: name of the layer.
            rows: (n,) rows in [0, N), repeats allowed.

        Returns:
            (n, ...) array.
        """
        return self._again_if_packed(lambda: self._read_rows(layer, rows))

    def _read_run(self, layer: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Read rows [start, stop) of a layer, (n, ...); absent rows are NaN."""

        def read() -> npt.NDArray[Any]:
            if (chunks := self._whole(layer)) is None:
                return self._read_rows(layer, np.arange(start, stop))
            return chunks.take_run(start, stop - start)

        return self._again_if_packed(read)

    def _whole(self, layer: str) -> ChunkRows | None:
        """Reader of a layer that lies in one file with all rows, or None for a layer in parts.

        The reader is cached, as finding the open file takes several times as long as reading a row.
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
        """Read rows of a layer from one file or from several segments."""
        if (chunks := self._whole(layer)) is not None:
            return chunks.take(rows)
        info = self._contents.layers[layer]
        segments, starts = self._segments_of(layer)
        out = np.empty((len(rows), *info.row_shape), dtype=info.dtype)
        increasing = len(rows) < 2 or bool((rows[1:] >= rows[:-1]).all())
        places = np.arange(len(rows)) if increasing else np.argsort(rows, kind="stable")
        ordered = rows if increasing else rows[places]
        # Sorted rows fall into consecutive groups, one for each segment.
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
        """Write sorted rows of a segment to their places of `out`; absent rows become NaN."""
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
        """Rows per chunk in the first file of a layer."""

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
        """Open the rows of a layer in one segment."""
        info = self._contents.layers[layer]
        shape = (segment.stop - segment.start, *info.row_shape)
        with self._open(segment) as opened:
            yield opened.rows(f"{layout.FEATURES}/{layer}", shape, info.dtype, segment.start)
