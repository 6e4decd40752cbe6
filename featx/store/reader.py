"""Reads a store: lazy arrays of features, with keys, labels, status and failures of rows."""

from __future__ import annotations

import copy
import difflib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import numpy.typing as npt

from featx.base import as_utf8, declared_function, free_title, import_extra, name_bytes, name_text
from featx.errors import LayerError, StoreError, nearest
from featx.storage import folder_of, parse_path
from featx.store import layout
from featx.store.chunk_reader import Verify, check_verify
from featx.store.contents import Contents, find_contents
from featx.store.description import describe_html, describe_text
from featx.store.layer_array import LayerArray
from featx.store.layer_reader import LayerReader
from featx.store.listing import is_ascending
from featx.store.manifest import load_manifest
from featx.store.open_files import Handles
from featx.types import UNKNOWN_IMAGE, Array, Status, combined_status, with_features


def check_rows_present(
    store: FeatureStore, layer: str, rows: npt.NDArray[np.int64], values: Array
) -> None:
    """Raise StoreError if rows that were ok have lost their values since the store was opened.

    When files of a store vanish, the reader looks for them again, and rows that it cannot find read
    as NaN. A row that is ok never starts with NaN.
    """
    if not values.size:
        return
    is_lost = np.isnan(values.reshape(len(rows), -1)[:, 0])
    if is_lost.any():
        raise StoreError(
            f"{store.root} has lost row {int(rows[is_lost][0])} of {layer} since it was opened. "
            "Give the command that made the store again to compute it."
        )


T = TypeVar("T")

_NAMES_AT_ONCE = 1 << 14
"""Number of names that are decoded together."""


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

    `len(store)` is the number N of rows, `in` and iteration are over the names of the layers, and
    `store.keys` are the keys of the rows.

    A store can be pickled and used in forked processes; each process opens its own files. `close`,
    or the end of a `with` block, closes them; a later read opens them again.

    Attributes:
        root: absolute path of the folder or file.
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
        self.refresh()

    def refresh(self) -> FeatureStore:
        """Look again which rows and layers exist, while a run is in progress; returns self."""
        handles = Handles(self.verify)
        self._adopt(find_contents(self.root, handles), handles)
        return self

    def _with_verify(self, verify: Verify) -> FeatureStore:
        """Return the store as it was when it was opened, of which other chunks are compared."""
        store = copy.copy(self)
        store.verify, store._handles = verify, self._handles.with_verify(verify)
        store._layer_reader = LayerReader(self.root, self._contents, store._handles)
        return store

    def _adopt(self, contents: Contents, handles: Handles) -> None:
        """Reset everything that depends on the files of the store."""
        for name, member in vars(FeatureStore).items():
            if isinstance(member, cached_property):
                self.__dict__.pop(name, None)
        self._contents, self._handles = contents, handles
        self.complete = self._contents.complete
        self.attrs = self._contents.attrs
        self._layer_reader = LayerReader(self.root, self._contents, self._handles)
        self.classes = self._contents.classes
        self.columns = self._contents.column_names

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files of the store, except those that another thread is reading."""
        self._handles.close()

    def __len__(self) -> int:
        return self._contents.num_rows

    def __fspath__(self) -> str:
        """Path of the store, so that it can be given where its path can."""
        return str(self.root)

    def __repr__(self) -> str:
        return describe_text(self.root, *self._described())

    def _repr_html_(self) -> str:
        return describe_html(self.root, *self._described())

    def _described(self) -> tuple[Contents, npt.NDArray[np.uint8] | None]:
        """Contents, and the status of all rows or None; a damaged store is described, too."""
        try:
            status = self.status  # first, as it may find that parts were packed
        except StoreError:
            return self._contents, None
        return self._contents, status

    def show(
        self, rows: int | Sequence[int] = 10, data: str | os.PathLike[str] | None = None
    ) -> object:
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
        if not isinstance(layer, str):
            raise LayerError(
                f"{self.root}: a layer is chosen by its name, not {layer!r}; it has "
                f"{', '.join(self.layers)}. Rows of a layer: store[{self.layers[0]!r}][0]."
            )
        if layer not in self._contents.layers:
            raise LayerError(
                f"{self.root} has no layer {layer!r}; it has {', '.join(self.layers)}."
                f"{nearest(layer, self.layers)}"
            )
        return LayerArray(self, layer)

    def __contains__(self, layer: object) -> bool:
        return layer in self._contents.layers

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Refuse numpy.asarray(store) and pandas.DataFrame(store), which expect one array."""
        raise TypeError(
            "a store is no single array: store.to_pandas() is the table of its rows, and "
            f"store[{self.layers[0]!r}][:] the array of a layer."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    @property
    def folder(self) -> Path:
        """Folder of the files next to the rows, such as probe.json."""
        return folder_of(self.root)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in alphabetical order, but blocks.2 before blocks.10."""
        return tuple(self._contents.layers)

    @property
    def num_rows_present(self) -> int:
        """Number of rows that the store holds so far, failed ones included."""
        return self._contents.num_rows_present

    @cached_property
    def keys(self) -> npt.NDArray[np.str_]:
        """(N,) str: key of each row, usually a path below data.root; UTF-8 with surrogates.

        It takes 4 bytes for each character of the longest key in every row; see `key_of`.
        """
        return _texts(self.key_bytes)

    def key_of(self, row: int) -> str:
        """Key of one row, as in `keys`."""
        return name_text(bytes(self.key_bytes[row]))

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """(N,) int64: index into `classes`, -1 for rows without a label."""
        labels: npt.NDArray[np.int64] = self._column(layout.LABEL, "i")
        return labels

    def column(self, name: str) -> Array:
        """Values of one of the `columns` that the data set has for each row (option data.columns).

        Returns:
            (N,) int64, float64 (NaN for missing values), bool, or str (empty for missing values).

        Raises:
            StoreError: there is no such column.
        """
        values = self.stored_column(name)
        return _texts(values) if values.dtype.kind == "S" else values

    def stored_column(self, name: str) -> Array:
        """Values of a column as `column` returns them, but texts as (N,) fixed-length UTF-8 bytes,
        which take a quarter of the memory.
        """
        if name not in self.columns:
            raise StoreError(
                f"{self.root} has no column {name!r}; it has {', '.join(self.columns) or 'none'}."
                f"{nearest(str(name), self.columns)}"
            )
        values = self._column(f"{layout.COLUMNS}/{name}", "Sbif")
        return values.view(values.dtype.str)  # drops the metadata that h5py adds to dtypes

    @cached_property
    def status(self) -> npt.NDArray[np.uint8]:
        """(N,) uint8: `featx.types.Status` of each row; 0 is ok, 255 is not computed yet."""
        return self._retry_if_packed(self._read_status)

    def _read_status(self) -> npt.NDArray[np.uint8]:
        status = np.full(len(self), Status.ABSENT, dtype=np.uint8)
        for segment, statuses in self._layer_reader.statuses():
            before = status[segment.start : segment.stop]
            before[:] = combined_status(before, statuses)
        return status

    @cached_property
    def image_checksums(self) -> npt.NDArray[np.uint64]:
        """(N,) uint64: checksum (xxh3_64) of each row's encoded image.

        0 stands for rows that are not stored or have no recorded checksum, 1 for rows without image
        bytes. A row whose layers are of two different images has a number that neither image has.
        """
        return self._retry_if_packed(self._read_image_checksums)

    def _read_image_checksums(self, only_open: bool = False) -> npt.NDArray[np.uint64]:
        """Checksums of all rows, or of those whose files are open."""
        checksums = np.full(len(self), UNKNOWN_IMAGE, dtype=np.uint64)
        others = np.zeros_like(checksums)
        for segment in self._contents.segments:
            if only_open and not self._handles.is_open(segment.path):
                continue
            with self._layer_reader.open(segment) as opened:
                num_rows = segment.stop - segment.start
                segment_checksums = opened.column(layout.IMAGE_CHECKSUM, num_rows, "u")
            before = checksums[segment.start : segment.stop]
            unknown = before == UNKNOWN_IMAGE
            is_other = (segment_checksums != before) & (segment_checksums != UNKNOWN_IMAGE)
            is_other &= ~unknown
            others[segment.start : segment.stop][is_other] = segment_checksums[is_other]
            before[unknown] = segment_checksums[unknown]
        return checksums ^ others

    @cached_property
    def rows_sha256(self) -> str:
        """Digest of fingerprint, status and image checksums: of the rows as they are now.

        It changes where rows are computed again from other images, which the fingerprint does not.
        """
        digest = hashlib.sha256(str(self.attrs.get("fingerprint", "")).encode())
        digest.update(self.status.data)
        digest.update(self.image_checksums.data)
        return digest.hexdigest()

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """(N,) bool: whether the row holds features."""
        return with_features(self.status)

    @cached_property
    def failures(self) -> list[dict[str, Any]]:
        """Failed rows in ascending order: row, key, status (a word), error, message of each."""
        return [
            {
                "row": row,
                "key": name_text(bytes(self.key_bytes[row])),
                "status": self._status_label(row),
                "error": error.decode("utf-8", "replace"),
                "message": message.decode("utf-8", "replace"),
            }
            for row, error, message in sorted(self._retry_if_packed(self._read_failures))
        ]

    def _status_label(self, row: int) -> str:
        """Status of a row in words; raises StoreError for a number that is no status."""
        try:
            return Status(int(self.status[row])).label
        except ValueError as error:
            raise StoreError(f"{self.root}: row {row} has status {self.status[row]}.") from error

    def _read_failures(self) -> list[tuple[int, bytes, bytes]]:
        """Row, exception and message of each failed row, from the first run in which it failed."""
        failures: dict[int, tuple[int, bytes, bytes]] = {}
        for segment in self._contents.segments:
            with self._layer_reader.open(segment) as opened:
                if not opened.file.attrs.get("num_failures", 1):
                    continue
                columns = [values.tolist() for values in opened.failures()]
            for row, error, message in zip(*columns, strict=True):
                if not segment.start <= row < segment.stop:
                    raise StoreError(f"{segment.path} has failures of rows that are not in it.")
                failures.setdefault(row, (row, error, message))
        return list(failures.values())

    def row(self, key: str | bytes) -> int:
        """Row number of a key.

        Raises:
            KeyError: there is no such key; the message names similar keys.
            TypeError: `key` is no text, bytes or path.
        """
        if not isinstance(key, str | bytes | os.PathLike):
            raise TypeError(
                f"store.row finds the row of a key, which is a str or bytes; {key!r} is a "
                f"{type(key).__name__}. The key of a row number: store.key_of(3)."
            )
        wanted = name_bytes(key)
        keys, order = self.key_bytes, self._key_order
        # With a text longer than the keys, numpy would copy all of them to that length.
        position = int(np.searchsorted(keys, np.bytes_(wanted[: keys.itemsize]), sorter=order))
        rows = range(len(self)) if order is None else order
        if position < len(self) and bytes(keys[rows[position]]) == wanted:
            return int(rows[position])
        nearby = [
            name_text(bytes(keys[row])) for row in rows[max(0, position - 500) : position + 500]
        ]
        # A path typed from another folder, or with another ending, has the name of the file.
        name = wanted.rpartition(b"/")[2]
        stem = name.rpartition(b".")[0] or name
        is_same = np.char.find(keys, b"/" + stem + b".") >= 0
        is_same |= np.char.startswith(keys, stem + b".")
        is_same |= np.char.endswith(keys, b"/" + name) | (keys == name)
        named = [name_text(bytes(each)) for each in keys[is_same][:1000]]
        typed = name_text(wanted).lower()
        named.sort(key=lambda each: -difflib.SequenceMatcher(None, each.lower(), typed).ratio())
        near = f" Nearest: {', '.join(named[:5])}." if named else nearest(name_text(wanted), nearby)
        raise KeyError(f"{self.root} has no row {key!r}.{near}")

    def xy(self, layer: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Features and labels of all ok rows, as scikit-learn takes them.

        Rows without a label are left out, unless no row has one: y is -1 then. The rows are those
        of `store.ok & (store.labels >= 0)`: row i of X need not be row i of the store.

        Returns:
            X (n, D) float32 with flattened features, and y (n,) int64.
        """
        labelled = self.labels >= 0
        rows = np.flatnonzero(self.ok & labelled if labelled.any() else self.ok)
        width = int(np.prod(self[layer].shape[1:], dtype=np.int64))
        features = self[layer][rows].reshape(len(rows), width).astype(np.float32)
        return features, self.labels[rows]

    def to_pandas(self, layers: str | Sequence[str] = ()) -> Any:
        r"""Table of all rows, failed ones included; its index is the row of the store.

        Args:
            layers: layers whose values become columns, `LAYER.0` and so on in the order of the
                flattened row, NaN for failed rows; float16 becomes float32. All are held in memory.

        Returns:
            a pandas.DataFrame with the columns key, label (-1 without one), class, status (a word),
            those of the data set, and those of the layers. A column of the data set with the name
            of one of the first four is called `column.NAME`. Bytes of names that are not UTF-8
            are written as \xff, as in exports.

        Raises:
            MissingExtraError: pandas is not installed.
            LayerError: the store has no such layer.
        """
        pandas = import_extra("pandas", "FeatureStore.to_pandas", "pandas", "export")
        # pandas 3 refuses the surrogates of names that are not UTF-8.
        names = [*map(as_utf8, self.classes), None]  # the last one for -1
        one_of_each = np.unique(self.status, return_index=True)[1]
        words = {int(self.status[row]): self._status_label(row) for row in one_of_each}
        table = {
            "key": [key.decode("utf-8", "backslashreplace") for key in self.key_bytes.tolist()],
            "label": self.labels,
            "class": [names[label] for label in self.labels.tolist()],
            "status": [words[number] for number in self.status.tolist()],
        }
        for name in self.columns:
            values = self.column(name)
            table[free_title(name, table)] = (
                [*map(as_utf8, values.tolist())] if values.dtype.kind == "U" else values
            )
        frames = [pandas.DataFrame(table)]
        is_list = isinstance(layers, Iterable) and not isinstance(layers, str)
        names_of_layers: Iterable[Any] = layers if is_list else [layers]
        for layer in names_of_layers:
            values = self[layer][:].reshape(len(self), -1)
            if values.dtype == np.float16:  # which pandas shows with a warning
                values = values.astype(np.float32)
            titles = [f"{layer}.{i}" for i in range(values.shape[1])]
            frames.append(pandas.DataFrame(values, columns=titles))
        return pandas.concat(frames, axis=1)

    @cached_property
    def key_bytes(self) -> npt.NDArray[np.bytes_]:
        """(N,) fixed-length bytes: keys as the file system gives them."""
        keys = self._column(layout.KEY, "S")
        return keys.view(f"S{keys.dtype.itemsize}")  # drops the metadata that h5py adds to dtypes

    @cached_property
    def _key_order(self) -> npt.NDArray[np.int64] | None:
        """(N,) rows sorted by key, or None if they are sorted, as they are unless a store grew."""
        keys = self.key_bytes
        return None if is_ascending(keys) else np.argsort(keys, kind="stable")

    def _column(self, name: str, kind: str) -> Array:
        """Column of the listing, (N,), whose dtype has one of numpy's kinds in `kind`."""
        path, expected = self._contents.columns, str(self.attrs.get("fingerprint"))
        with self._handles.use(path) as opened:
            if not opened.is_checked:
                if path.name == layout.LISTING:  # has no fingerprint, and is written after one
                    manifest, _ = load_manifest(self.root)
                    is_same = manifest is not None and manifest.num_runs_of(expected) is not None
                else:
                    is_same = str(opened.file.attrs.get("fingerprint")) == expected
                if not is_same:
                    raise self._replaced_error()
                opened.is_checked = True
            return opened.column(name, len(self), kind)

    def _replaced_error(self) -> StoreError:
        return StoreError(f"{self.root} has changed since it was opened. Open it again.")

    def _retry_if_packed(self, read: Callable[[], T]) -> T:
        """Call `read`, and once more after a refresh if a part vanished due to packing."""
        try:
            return read()
        except FileNotFoundError as error:
            present, now = self.num_rows_present, FeatureStore(self.root, self.verify)
            # Rows of another store must not be read by a caller that continues after this error,
            # or by other threads.
            if now.attrs.get("fingerprint") != self.attrs.get("fingerprint") or self._differs(now):
                raise self._replaced_error() from error
            self._adopt(now._contents, now._handles)
            if self.num_rows_present < present:
                raise StoreError(
                    f"{self.root} has lost rows since it was opened: {error.filename} is missing."
                ) from error
            return read()

    def _differs(self, now: FeatureStore) -> bool:
        """Return whether rows have another status or image than when they were read before.

        Files that are open can be read after they were deleted.
        """
        status, images = (self.__dict__.get(name) for name in ("status", "image_checksums"))
        if images is None:
            images = self._read_image_checksums(only_open=True)
        for before, read, none in (
            (status, now._read_status, Status.ABSENT),
            (images, now._read_image_checksums, UNKNOWN_IMAGE),
        ):
            if before is not None and (before != none).any():
                after = read()
                if ((before != after) & (before != none) & (after != none)).any():
                    return True
        return False


def open_if_path(store: FeatureStore | str | os.PathLike[str]) -> FeatureStore:
    """Return an open store as it is, and open the one at a path with `verify="rows"`."""
    if isinstance(store, FeatureStore):
        return store
    return FeatureStore(parse_path(store, "store"), verify="rows")


def _texts(names: npt.NDArray[np.bytes_]) -> npt.NDArray[np.str_]:
    """Names as text, decoded block by block: in lists of all, each takes another 120 bytes."""

    def blocks() -> Iterator[tuple[int, list[str]]]:
        for start in range(0, len(names), _NAMES_AT_ONCE):
            block = names[start : start + _NAMES_AT_ONCE].tolist()
            yield start, [name_text(name) for name in block]

    width = max((max(map(len, block)) for _, block in blocks()), default=0)
    texts = np.empty(len(names), dtype=f"U{max(1, width)}")
    for start, block in blocks():
        texts[start : start + len(block)] = block
    return texts
