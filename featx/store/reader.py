"""A store read as one array per layer, from its parts or from the packed file.

Needs numpy and h5py only. A FeatureStore holds paths, not handles: files are opened on first use in
each process, so the object may cross fork and spawn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import LayerError, StoreError, nearest
from featx.store import codecs, layout
from featx.types import Part, Status

MAX_OPEN_FILES = 16
"""File handles one store keeps open in one process."""

_MAX_COMPRESSION = 4096
"""A filtered dataset that claims to expand more than this is refused before memory is taken."""


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
        self.root = Path(path)
        self._handles = _Handles()
        self._segments: list[tuple[Path, Part]] = []
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._layer_attrs: dict[str, dict[str, Any]] = {}
        self._find()

    def refresh(self) -> FeatureStore:
        """Look again which parts are there; for a run that still goes on."""
        self._handles = _Handles()
        for name in ("keys", "labels", "status", "failures", "_positions", "_key_bytes"):
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
        with self._listing_file() as file:
            labels: npt.NDArray[np.int64] = file[layout.LABEL][:]
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
        for path, part in self._segments:
            with self._handles.use(path) as file:
                group = file[layout.FAILURES]
                columns = [group[name][:].tolist() for name in ("row", "error", "message")]
                if part.stop > self._num_rows:
                    raise StoreError(f"{path} holds rows beyond the listing.")
            for row, error, message in zip(*columns, strict=True):
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

    def row(self, key: str | bytes) -> int:
        """The position of an image by its key.

        Raises:
            KeyError: there is no such key.
        """
        wanted = os.fsencode(key)
        at = int(np.searchsorted(self._key_bytes, np.bytes_(wanted)))
        if at < len(self) and bytes(self._key_bytes[at]) == wanted:
            return at
        raise KeyError(f"{self.root} has no row {key!r}.{nearest(str(key), self.keys.tolist())}")

    def xy(self, layer: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Features and labels of the ok rows, as scikit-learn takes them.

        Returns:
            X (n, D) float32, each row flattened, and y (n,) int64.
        """
        rows = np.flatnonzero(self.ok)
        features = self[layer][rows].reshape(len(rows), -1).astype(np.float32)
        return features, self.labels[rows]

    @cached_property
    def _key_bytes(self) -> npt.NDArray[np.bytes_]:
        with self._listing_file() as file:
            keys: npt.NDArray[np.bytes_] = file[layout.KEY][:]
        return keys

    @contextlib.contextmanager
    def _listing_file(self) -> Iterator[h5py.File]:
        listing = self.root / layout.LISTING if self.root.is_dir() else self.root
        if self._packed is not None:
            listing = self._packed
        with self._handles.use(listing) as file:
            for name in (layout.KEY, layout.LABEL):
                _check_plain(file, name)
            yield file

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
        else:
            self._find_parts()

    def _find_packed(self, path: Path) -> None:
        with self._handles.use(path) as file:
            if "featx_format" not in file.attrs:
                raise StoreError(f"{path} is an HDF5 file, but no featx store.")
            _check_version(path, int(file.attrs["featx_format"]))
            self._num_rows = len(file[layout.KEY])
            self.attrs = {name: _plain(value) for name, value in file.attrs.items()}
            start = int(self.attrs.get("start", 0))
            if start:
                raise StoreError(f"{path} is one part of a store; open the store's folder.")
            self.complete = bool(file.attrs["complete"])
            self.classes = _texts(file[layout.CLASSES][:])
            self._shapes, self._layer_attrs = {}, {}
            for name in file[layout.FEATURES]:
                dataset = _check_plain(file, f"{layout.FEATURES}/{name}")
                if len(dataset) != self._num_rows:
                    raise StoreError(f"{path}: {name} has {len(dataset)} rows, not the listing's.")
                self._shapes[name] = (dataset.shape[1:], dataset.dtype)
                self._layer_attrs[name] = dict(dataset.attrs)
            for name in (layout.KEY, layout.LABEL, layout.STATUS):
                _check_plain(file, name)
        self._segments = [(path, Part(0, 0, self._num_rows))]

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
        for spec in descriptor["layers"]:
            self._shapes[spec["name"]] = (tuple(spec["shape"]), np.dtype(spec["dtype"]))
            names = ("layer", "capture", "reduce", "compute_dtype")
            self._layer_attrs[spec["name"]] = {name: spec[name] for name in names}
        names_there = set(os.listdir(self.root / layout.PARTS))  # noqa: PTH208 - names only
        self._segments = [
            (self.root / layout.PARTS / layout.part_name(i), grid.part(i))
            for i in range(len(grid))
            if layout.part_name(i) in names_there
        ]
        self.complete = len(self._segments) == len(grid)
        with self._listing_file() as file:
            self.classes = _texts(file[layout.CLASSES][:])

    def _read(
        self,
        path: str,
        rows: npt.NDArray[np.int64],
        fill: Any,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
    ) -> npt.NDArray[Any]:
        """Rows of one dataset in any order and with repeats; rows not there hold the fill."""
        try:
            return self._read_segments(path, rows, fill, shape, dtype)
        except FileNotFoundError:
            # The parts went because the run was packed meanwhile; the rows are the same.
            self._handles = _Handles()
            self._find()
            return self._read_segments(path, rows, fill, shape, dtype)

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
            with self._handles.use(file_path) as file:
                dataset = _check_plain(file, path)
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


class LayerArray:
    """One layer of a store, (N, ...): indexed like numpy, read from disk when it is.

    Indices are an int, a slice, a list or array of ints in any order and with repeats, or a
    boolean mask; further axes may follow: `store["layer4"][10:20, :, 3]`.
    """

    def __init__(self, store: FeatureStore, name: str) -> None:
        self._store = store
        self.name = name
        row_shape, self.dtype = store._shapes[name]
        self.shape: tuple[int, ...] = (len(store), *row_shape)

    @property
    def attrs(self) -> dict[str, Any]:
        """layer, capture, reduce and compute_dtype of the dataset."""
        return dict(self._store._layer_attrs[self.name])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LayerArray {self.name} {self.shape} {self.dtype}>"

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        if index is Ellipsis:
            index = slice(None)
        rest: tuple[Any, ...] = ()
        if isinstance(index, tuple):
            index, *others = index
            rest = tuple(others)
        rows, single = _row_indices(index, len(self))
        read = self._store._read(
            f"{layout.FEATURES}/{self.name}", rows, np.nan, self.shape[1:], self.dtype
        )
        chosen: npt.NDArray[Any] = read[(0 if single else slice(None), *rest)]
        return chosen

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("the rows are on disk; an array of them is always a copy")
        return self[:] if dtype is None else self[:].astype(dtype)


def _row_indices(index: Any, length: int) -> tuple[npt.NDArray[np.int64], bool]:
    """Any row index as (n,) int64 in [0, length), and whether it was a single int.

    Raises:
        IndexError: an index is out of range, a mask of another length, or of no known kind.
    """
    if isinstance(index, slice):
        return np.arange(*index.indices(length), dtype=np.int64), False
    array = np.asarray(index)
    if array.dtype == np.bool_:
        if array.shape != (length,):
            raise IndexError(f"a mask of shape {array.shape} does not fit {length} rows")
        return np.flatnonzero(array).astype(np.int64), False
    if array.size == 0:
        return np.empty(0, dtype=np.int64), False
    if array.ndim > 1 or array.dtype.kind not in "iu":
        raise IndexError(f"rows are chosen by int, slice, mask or list of ints, not {index!r}")
    rows = array.astype(np.int64).reshape(-1)
    wrapped = np.where(rows < 0, rows + length, rows)
    outside = (wrapped < 0) | (wrapped >= length)
    if outside.any():
        raise IndexError(f"row {int(rows[outside][0])} is out of range for {length} rows")
    return wrapped, array.ndim == 0


class _Handles:
    """Open files of this process, the least recently used closed first."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._files: OrderedDict[Path, h5py.File] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()

    @contextlib.contextmanager
    def use(self, path: Path) -> Iterator[h5py.File]:
        """An open file; never one that a parent process opened before a fork."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            file = self._files.pop(path, None) or _open_file(path)
            self._files[path] = file
            while len(self._files) > MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            yield file


def _open_file(path: Path) -> h5py.File:
    with path.open("rb"):  # says FileNotFoundError and PermissionError by themselves
        pass
    try:
        file = h5py.File(path, "r", locking=False, rdcc_nbytes=0)
    except OSError as error:
        raise StoreError(f"{path} cannot be read as HDF5: {error}.") from error
    codec = file.attrs.get("codec", "none")
    if codec != "none":
        # Whole chunks are decoded; the default cache keeps neighbours from decoding them again.
        file.close()
        if codec in ("zstd", "blosc2"):
            codecs.load_plugin()
        file = h5py.File(path, "r", locking=False)
    return file


def _check_plain(file: h5py.File, path: str) -> h5py.Dataset:
    """The dataset at `path`, if it lies in this very file and is as large as it claims.

    Raises:
        StoreError: it is a link, virtual, external, missing, or larger than the file could hold.
    """
    where = ""
    for name in path.split("/"):
        where = f"{where}/{name}".lstrip("/")
        link = file.get(where, getlink=True)
        if link is None:
            raise StoreError(f"{file.filename} has no /{where}.")
        if not isinstance(link, h5py.HardLink):
            raise StoreError(f"{file.filename}: /{where} points to another place; refused.")
    dataset = file[path]
    if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
        raise StoreError(f"{file.filename}: /{path} is no plain dataset; refused.")
    size = dataset.size * dataset.dtype.itemsize
    filtered = dataset.id.get_create_plist().get_nfilters() > 0
    if size > dataset.id.get_storage_size() * (_MAX_COMPRESSION if filtered else 1):
        raise StoreError(
            f"{file.filename}: /{path} claims {size} bytes, the file holds "
            f"{dataset.id.get_storage_size()} of it; refused."
        )
    return dataset


def _check_version(path: Path, version: int) -> None:
    if version > layout.FORMAT:
        raise StoreError(
            f"{path} has store format {version}, this featx reads up to {layout.FORMAT}. "
            "Upgrade featx: pip install -U featx."
        )


def _texts(values: npt.NDArray[np.bytes_]) -> tuple[str, ...]:
    return tuple(value.decode("utf-8", "surrogateescape") for value in values.tolist())


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
