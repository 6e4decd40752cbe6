"""A store read as one array per layer, from its parts or from the packed file.

Needs numpy and h5py only. A FeatureStore holds paths, not handles: files are opened on first use in
each process, so the object may cross fork and spawn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from featx.errors import LayerError, StoreError, nearest
from featx.store import layout
from featx.store.array import LayerArray
from featx.store.files import Handles, OpenFile, check_hard
from featx.types import Part, Status

T = TypeVar("T")


def open(path: str | os.PathLike[str]) -> FeatureStore:
    """Open a store for reading: its folder (also while the run goes on) or a features.h5.

    Args:
        path: OUT, OUT/features.h5, or any other file of the same format.

    Raises:
        StoreError: there is no store, it is damaged, of a newer format, or names other files.
    """
    return FeatureStore(path)


class FeatureStore:
    """The features of one run; `store[layer]` is a lazy array of shape (N, ...).

    Attributes:
        root: the folder or file it was opened from.
        layers: the names of the datasets.
        complete: whether every row of the listing is there.
        classes: names of the classes; `labels` index them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = Path(path).expanduser().absolute()
        self._handles = Handles()
        self._num_rows = 0
        self._segments: list[tuple[Path, Part]] = []
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._layer_attrs: dict[str, dict[str, Any]] = {}
        self._find()

    def refresh(self) -> FeatureStore:
        """Look again which parts are there; for a run that still goes on."""
        self._handles = Handles()
        for name in ("keys", "labels", "status", "failures", "_key_bytes"):
            self.__dict__.pop(name, None)
        self._find()
        return self

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        state = "complete" if self.complete else f"{self.num_rows_present} of {len(self)} rows"
        arrays = ", ".join(f"{name} {self[name].shape}" for name in self.layers)
        return f"<FeatureStore {self.root}: {arrays}; {state}>"

    def __getitem__(self, layer: str) -> LayerArray:
        if layer not in self._shapes:
            raise LayerError(
                f"{self.root} has no layer {layer!r}; it has {', '.join(self.layers)}."
                f"{nearest(layer, self.layers)}"
            )
        return LayerArray(self, layer)

    def __contains__(self, layer: object) -> bool:
        return layer in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    @property
    def num_rows_present(self) -> int:
        """Rows that are in the store by now, failed ones included."""
        return sum(len(part) for _, part in self._segments)

    @cached_property
    def keys(self) -> npt.NDArray[np.str_]:
        """(N,) str: the path of each image below data.root; unusual bytes as os.fsdecode gives."""
        decoded = [os.fsdecode(key) for key in self._key_bytes.tolist()]
        return np.array(decoded, dtype=np.str_)

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """(N,) int64: index into `classes`, -1 where an image has none."""
        labels: npt.NDArray[np.int64] = self._column(layout.LABEL, "i")
        return labels

    @cached_property
    def status(self) -> npt.NDArray[np.uint8]:
        """(N,) uint8: 0 ok, 255 not there yet, else the reason of the failure (featx.types)."""
        return self._read(layout.STATUS, np.arange(len(self)), np.uint8(Status.ABSENT), (), "u1")

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
                    "status": Status(int(self.status[row])).label,
                    "error": error.decode("utf-8", "replace"),
                    "message": message.decode("utf-8", "replace"),
                }
            )
        return sorted(found, key=lambda failure: failure["row"])

    def _read_failures(self) -> list[tuple[int, bytes, bytes]]:
        found: list[tuple[int, bytes, bytes]] = []
        for path, part in self._segments:
            with self._segment(path, part) as opened:
                columns = [
                    opened.dataset(f"{layout.FAILURES}/{name}")[:].tolist()
                    for name in ("row", "error", "message")
                ]
            if not all(part.start <= row < part.stop for row in columns[0]):
                raise StoreError(f"{path} has failures of rows that are not in it.")
            found += zip(*columns, strict=True)
        return found

    def row(self, key: str | bytes) -> int:
        """The position of an image by its key.

        Raises:
            KeyError: there is no such key.
        """
        wanted = os.fsencode(key)
        at = int(np.searchsorted(self._key_bytes, np.bytes_(wanted)))
        if at < len(self) and bytes(self._key_bytes[at]) == wanted:
            return at
        nearby = self.keys[max(0, at - 500) : at + 500].tolist()
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
    def _key_bytes(self) -> npt.NDArray[np.bytes_]:
        keys: npt.NDArray[np.bytes_] = self._column(layout.KEY, "S")
        return keys

    def _column(self, name: str, kind: str) -> npt.NDArray[Any]:
        """A column of the listing: one entry per row, of numpy's kind `kind`."""
        path = self._packed or self.root / layout.LISTING
        with self._handles.use(path) as opened:
            dataset = opened.dataset(name)
            if dataset.shape != (len(self),) or dataset.dtype.kind != kind:
                raise StoreError(
                    f"{path}: /{name} is {dataset.shape} {dataset.dtype}; the store has "
                    f"{len(self)} rows."
                )
            column: npt.NDArray[Any] = dataset[:]
        return column

    @contextlib.contextmanager
    def _segment(self, path: Path, part: Part) -> Iterator[OpenFile]:
        """The open file of one part, or the packed one; what is of another run is refused."""
        with self._handles.use(path) as opened:
            if not opened.known:
                attrs = opened.file.attrs
                if attrs.get("fingerprint") != self.attrs.get("fingerprint"):
                    raise StoreError(f"{path} is of another run than {self.root}.")
                if attrs.get("start", 0) != part.start:
                    raise StoreError(f"{path} holds the rows of another part.")
                opened.known = True
            yield opened

    def _find(self) -> None:
        """Find where the rows are and what the datasets look like."""
        path = self.root
        if not path.exists():
            raise StoreError(f"there is no store at {path}.")
        self._packed = path if path.is_file() else None
        if path.is_dir():
            if (path / layout.PACKED).is_file():
                self._packed = path / layout.PACKED
            elif not (path / layout.DESCRIPTOR).is_file():
                raise StoreError(f"{path} holds no store: there is no {layout.DESCRIPTOR} in it.")
        if self._packed is not None:
            self._find_packed(self._packed)
            return
        try:
            self._find_parts()
        except (LookupError, TypeError, ValueError) as error:
            raise StoreError(f"{path / layout.DESCRIPTOR} is damaged ({error}).") from error
        except FileNotFoundError as error:
            if not (path / layout.PACKED).is_file():
                raise StoreError(f"{path} holds no store: {error.filename} is missing.") from error
        if (path / layout.PACKED).is_file():
            self._find()  # packed while we looked: parts may be going

    def _find_packed(self, path: Path) -> None:
        with self._handles.use(path) as opened:
            attrs = opened.file.attrs
            if "featx_format" not in attrs:
                raise StoreError(f"{path} is an HDF5 file, but no featx store.")
            _check_version(path, attrs["featx_format"])
            if "part" in attrs:
                raise StoreError(f"{path} is one part of a store; open the store's folder.")
            self.attrs = {name: _plain(value) for name, value in attrs.items()}
            self.complete = bool(self.attrs.get("complete", False))
            self.classes = _texts(opened.dataset(layout.CLASSES)[:])
            self._num_rows = opened.dataset(layout.KEY).size
            check_hard(opened.file, layout.FEATURES)
            self._shapes, self._layer_attrs = {}, {}
            for name in opened.file[layout.FEATURES]:
                dataset = opened.dataset(f"{layout.FEATURES}/{name}")
                if dataset.shape[:1] != (self._num_rows,) or dataset.dtype.kind != "f":
                    raise StoreError(
                        f"{path}: {name} is {dataset.shape} {dataset.dtype}; expected floats, "
                        f"{self._num_rows} rows."
                    )
                self._shapes[name] = (dataset.shape[1:], dataset.dtype)
                self._layer_attrs[name] = dict(dataset.attrs)
            opened.dataset(layout.STATUS)
        self._segments = [(path, Part(0, 0, self._num_rows))]
        self._column(layout.LABEL, "i")

    def _find_parts(self) -> None:
        descriptor = json.loads((self.root / layout.DESCRIPTOR).read_bytes())
        _check_version(self.root, descriptor["featx_format"])
        self._num_rows = descriptor["num_rows"]
        grid = layout.Grid(self._num_rows, descriptor["part_rows"])
        self.attrs = {
            "featx_format": descriptor["featx_format"],
            "fingerprint": descriptor["fingerprint_sha256"],
            **{name: descriptor[name] for name in ("model", "weights", "weights_sha256")},
            "transform": descriptor["transform"],
            "codec": descriptor["codec"],
        }
        self._shapes, self._layer_attrs = {}, {}
        # HDF5 gives a file's datasets in the order of their names; so do the parts.
        for spec in sorted(descriptor["layers"], key=lambda spec: str(spec["name"])):
            self._shapes[spec["name"]] = (tuple(spec["shape"]), np.dtype(spec["dtype"]))
            names = ("layer", "capture", "reduce", "compute_dtype")
            self._layer_attrs[spec["name"]] = {name: spec[name] for name in names}
        names_there = set(os.listdir(self.root / layout.PARTS))
        self._segments = [
            (self.root / layout.PARTS / layout.part_name(i), grid.part(i))
            for i in range(len(grid))
            if layout.part_name(i) in names_there
        ]
        self.complete = len(self._segments) == len(grid)
        with self._handles.use(self.root / layout.LISTING) as opened:
            self.classes = _texts(opened.dataset(layout.CLASSES)[:])

    def _again_if_packed(self, read: Callable[[], T]) -> T:
        """What `read` returns, after another look where the parts went because of packing."""
        try:
            return read()
        except FileNotFoundError:
            self.refresh()
            return read()

    def _read(
        self,
        path: str,
        rows: npt.NDArray[np.int64],
        fill: Any,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
    ) -> npt.NDArray[Any]:
        """Rows of one dataset in any order and with repeats; rows not there hold the fill."""
        return self._again_if_packed(lambda: self._read_segments(path, rows, fill, shape, dtype))

    def _read_segments(
        self,
        path: str,
        rows: npt.NDArray[np.int64],
        fill: Any,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
    ) -> npt.NDArray[Any]:
        out = np.full((len(rows), *shape), fill, dtype=dtype)
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        for file_path, part in self._segments:
            low, high = np.searchsorted(ordered, [part.start, part.stop])
            if low == high:
                continue
            with self._segment(file_path, part) as opened:
                dataset = opened.dataset(path)
                if dataset.shape != (len(part), *shape) or dataset.dtype != dtype:
                    raise StoreError(
                        f"{file_path}: /{path} is {dataset.shape} {dataset.dtype}, expected "
                        f"{(len(part), *shape)} {np.dtype(dtype)}."
                    )
                for first, last, places in _runs(ordered[low:high], order[low:high]):
                    block = dataset[first - part.start : last - part.start]
                    out[places] = block[rows[places] - first]
        return out


def _runs(
    ordered: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int, npt.NDArray[np.int64]]]:
    """Split increasing rows, repeats allowed, into runs of consecutive ones.

    Yields:
        the first row, one past the last, and the places the rows of this run go to.
    """
    breaks = np.flatnonzero(np.diff(ordered) > 1) + 1
    edges = [0, *breaks.tolist(), len(ordered)]
    for low, high in itertools.pairwise(edges):
        yield int(ordered[low]), int(ordered[high - 1]) + 1, places[low:high]


def _check_version(path: Path, version: Any) -> None:
    if int(version) > layout.FORMAT:
        raise StoreError(
            f"{path} has store format {version}, this featx reads up to {layout.FORMAT}. "
            "Upgrade featx: pip install -U featx."
        )


def _texts(values: npt.NDArray[np.bytes_]) -> tuple[str, ...]:
    return tuple(value.decode("utf-8", "surrogateescape") for value in values.tolist())


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
