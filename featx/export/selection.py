"""Rows and layers of a store that are exported, their values in blocks, and their images."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from featx.base import as_utf8, free_title, name_text, rows_of_block
from featx.config import Config, DataConfig, data_of_saved, from_saved
from featx.errors import ConfigError, DataError, StoreError
from featx.sources import open_source
from featx.store import FeatureStore, check_rows_present
from featx.types import (
    NO_IMAGE,
    UNKNOWN_IMAGE,
    Array,
    ImageFault,
    Status,
    image_checksum,
    with_features,
)

BLOCK_ROWS = 1 << 16
"""Maximum number of rows that are held at a time; as objects of Python a row takes kilobytes."""

_SAMPLED = 64
"""Number of images whose mean size is that of all."""

_OF_THE_STORE = ("fingerprint", "model", "weights", "weights_sha256", "transform")
"""Attributes of the store that every export records."""


@dataclass(frozen=True)
class ExportSelection:
    """Rows and layers of a store in the order of writing.

    Attributes:
        rows: (n,) int64, increasing: row in the store of each exported row.
        on_bytes: called with the number of bytes of each block.
    """

    store: FeatureStore
    layers: tuple[str, ...]
    rows: npt.NDArray[np.int64]
    on_bytes: Callable[[int], None] = lambda num_bytes: None

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """(n,) int64 indices into the classes of the store, -1 without a label."""
        return self.store.labels[self.rows]

    @cached_property
    def status(self) -> npt.NDArray[np.uint8]:
        """(n,) uint8: 0 for ok, else the kind of failure (featx.types.Status)."""
        return self.store.status[self.rows]

    @cached_property
    def image_checksums(self) -> npt.NDArray[np.uint64]:
        """(n,) uint64 as returned by `FeatureStore.image_checksums`; refresh=true changes them."""
        return self.store.image_checksums[self.rows]

    @cached_property
    def keys(self) -> npt.NDArray[np.bytes_]:
        """(n,) fixed-length bytes, the keys as the file system returned them."""
        return self.store.key_bytes[self.rows]

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Divide rows [start, stop) into blocks whose keys and columns are held at a time."""
        step = self.block_rows([])
        return ((first, min(stop, first + step)) for first in range(start, stop, step))

    def each_key(self) -> Iterator[bytes]:
        """Yield the keys of all rows."""
        for start, stop in self.spans(0, len(self)):
            yield from self.keys[start:stop].tolist()

    def key_texts(self, start: int, stop: int) -> list[str]:
        r"""Return the keys of rows [start, stop) as UTF-8 text; other bytes are written as \xff."""
        return [key.decode("utf-8", "backslashreplace") for key in self.keys[start:stop].tolist()]

    @cached_property
    def classes(self) -> list[str]:
        """Class names as UTF-8 text, with other bytes written as in `key_texts`."""
        return [as_utf8(name) for name in self.store.classes]

    def class_texts(self, start: int, stop: int) -> list[str | None]:
        """Return the class of each of the rows [start, stop), or None without a label."""
        names = self.classes
        return [names[label] if label >= 0 else None for label in self.labels[start:stop].tolist()]

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Name -> (n,) values of each column of the data set, as returned by
        `FeatureStore.stored_column`: texts are bytes, of which `with_texts` decodes a block.

        A missing number is NaN, a missing text is b''.
        """
        return {name: self.store.stored_column(name)[self.rows] for name in self.store.columns}

    def named_columns(self, taken: Sequence[str]) -> dict[str, Array]:
        """Return `columns` under the names that they have in one table with other columns."""
        if conflicts := set(taken) & set(self.layers):
            raise ConfigError(f"layers named {conflicts} have the names of columns of the listing.")
        columns: dict[str, Array] = {}
        for name, values in self.columns.items():
            columns[free_title(name, {*taken, *self.layers, *columns})] = values
        return columns

    def is_sampled(self, layer: str) -> bool:
        """Return whether the rows of a layer are tokens of reduce=sample, which have positions."""
        return self.store[layer].attrs.get("reduce") == "sample"

    def positions(self, layer: str, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return (m, k) positions of the sampled tokens of rows [start, stop) of the selection."""
        return self.store[layer].positions(self.rows[start:stop]).astype(np.int32)

    def row_shape(self, layer: str) -> tuple[int, ...]:
        """Return the shape of one row of a layer."""
        return self.store[layer].shape[1:]

    def dtype(self, layer: str) -> np.dtype[np.generic]:
        """Return the dtype of a layer: float16 or float32; bfloat16 is read as float32."""
        return self.store[layer].dtype

    def row_bytes(self, layers: Sequence[str] | None = None) -> int:
        """Return the bytes of the features of one row, of all layers or of some."""
        layers = self.layers if layers is None else layers
        return sum(self.store[name].nbytes for name in layers) // max(1, len(self.store))

    def block_rows(self, layers: Sequence[str] | None = None) -> int:
        """Return the number of rows whose keys, columns and features take half a block, from one
        to BLOCK_ROWS.
        """
        listing = [self.keys, *self.columns.values()]
        # As text, a byte takes up to four.
        row_bytes = self.row_bytes(layers) + sum(4 * values.dtype.itemsize for values in listing)
        return min(BLOCK_ROWS, rows_of_block(2 * row_bytes))

    def blocks(
        self,
        start: int,
        stop: int,
        layers: Sequence[str] | None = None,
        rows_per_block: int | None = None,
    ) -> Iterator[tuple[int, int, dict[str, Array]]]:
        """Read the features of rows [start, stop) of the selection block by block. Yield start and
        stop of the block, and layer -> (m, ...) values.
        """
        layers = self.layers if layers is None else layers
        step = rows_per_block or self.block_rows(layers)
        for first in range(start, stop, step):
            last = min(stop, first + step)
            values_of_layer = {name: self.read(name, first, last) for name in layers}
            yield first, last, values_of_layer
            self.on_bytes(sum(values.nbytes for values in values_of_layer.values()))

    def read(self, layer: str, start: int, stop: int) -> Array:
        """Read rows [start, stop) of one layer as a contiguous array."""
        rows = self.rows[start:stop]
        values = np.ascontiguousarray(self.store[layer][rows])
        ok = with_features(self.status[start:stop])
        check_rows_present(self.store, layer, rows[ok], values[ok] if not ok.all() else values)
        return values

    @cached_property
    def about(self) -> dict[str, Any]:
        """Origin of the rows, which every export contains, as JSON types."""
        attrs = self.store.attrs
        # A format may store texts as bytes.
        columns = {
            name: "text" if values.dtype.kind == "S" else values.dtype.name
            for name, values in self.columns.items()
        }
        return {
            "store": str(self.store.root),
            **{key: str(attrs.get(key, "")) for key in _OF_THE_STORE},
            "classes": self.classes,
            "layers": {
                name: {
                    "shape": list(self.row_shape(name)),
                    "dtype": str(self.dtype(name)),
                    **{
                        key: value.item() if isinstance(value, np.generic) else value
                        for key, value in self.store[name].attrs.items()
                    },
                }
                for name in self.layers
            },
            "status": {int(status): status.label for status in Status},
            **({"columns": columns} if columns else {}),
        }

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Description of the rows as JSON types, equal for two exports with the same rows."""
        listing = (self.rows, self.keys, self.labels, self.status)
        columns = [(repr(name), values) for name, values in self.columns.items()]
        return {
            "store's fingerprint": str(self.store.attrs.get("fingerprint", "")),
            "layers": {name: f"{self.row_shape(name)} {self.dtype(name)}" for name in self.layers},
            "number of rows": len(self),
            "sha256 of rows, keys, labels and status": _sha256([("", each) for each in listing]),
            "sha256 of the checksums of images": _sha256([("", self.image_checksums)]),
            **({"sha256 of columns": _sha256(columns)} if columns else {}),
        }


def _sha256(columns: Sequence[tuple[str, Array]]) -> str:
    sha = hashlib.sha256()
    for name, values in columns:
        sha.update(f"{name} {values.dtype.str} {values.shape} ".encode())
        sha.update(np.ascontiguousarray(values).tobytes())
    return sha.hexdigest()


def data_of_store(store: FeatureStore, asked: DataConfig) -> DataConfig:
    """Return the options of the data set that a store was made from, by the config that it has."""
    try:
        saved = from_saved(str(store.attrs.get("config", "")))
    except ConfigError as error:
        raise StoreError(f"{store.root} does not record where its images are: {error}") from error
    return data_of_saved(saved, asked, str(store.root))


class EncodedImages:
    """Images of the rows of an export; the group `data` of the config says where they are now.
    Raises ConfigError if the rows are boxes, views or frames, not whole images.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        self._selection = selection
        self.data = data_of_store(selection.store, config.data)
        name = config.export.format
        for is_kind, rows, parts_of_key in (
            (self.data.boxes is not None, "boxes of images (data.boxes)", "image and box"),
            (self.data.has_views, "views of images (data.views, data.crops)", "image and view"),
            (self.data.name == "video", "frames of videos", "video and time"),
        ):
            if is_kind:
                raise ConfigError(
                    f"the rows of this store are {rows}, and {name} holds images as they are. "
                    f"Choose another export.format, in which keys name {parts_of_key}."
                )
        self._source = open_source(self.data)

    @property
    def mean_bytes(self) -> float:
        """Mean size of a few evenly spaced images; reading all would take too long."""
        n = len(self._selection)
        positions = np.unique(np.linspace(0, n - 1, min(n, _SAMPLED)).astype(np.int64))
        sizes = [len(self.read(position) or b"") for position in positions.tolist()]
        return float(np.mean(sizes)) if sizes else 0.0

    def read(self, position: int) -> bytes | None:
        """Return the encoded image of a row; None if the row failed and has no readable image.
        Raises DataError if the image of a row with features cannot be read, or has changed.
        """
        key = bytes(self._selection.keys[position])
        has_features = Status(self._selection.status[position]).has_features
        try:
            encoded = self._source.read(key)
        except (ImageFault, OSError) as error:
            if not has_features and isinstance(error, ImageFault):
                return None
            raise DataError(
                f"{name_text(key)} is a row of the store, and its image cannot be read now: "
                f"{error}. If the images are in another folder, give data=folder data.root=DIR."
            ) from error
        computed_from = self._selection.image_checksums[position]
        known = (UNKNOWN_IMAGE, NO_IMAGE, image_checksum(encoded))
        if has_features and computed_from not in known:
            raise DataError(
                f"{name_text(key)} has changed since its row was computed: the export would hold "
                "an image with the features of another one. The command of the store's run with "
                "refresh=true computes the rows of changed images again."
            )
        return encoded


def is_utf8(key: bytes) -> bool:
    """Return whether a key is text in UTF-8."""
    return key.decode(errors="ignore").encode() == key


def unit_rows(rows: Array) -> npt.NDArray[np.float32]:
    """Divide (n, D) rows by their Euclidean length, in float32; rows of zeros stay zero."""
    values = rows.astype(np.float32)
    # Divided by the largest value first: squares of very large or small values leave float32.
    largest = np.abs(values).max(axis=1, keepdims=True, initial=0)
    values /= np.where(largest > 0, largest, 1)
    length = np.linalg.norm(values, axis=1, keepdims=True)
    values /= np.where(length > 0, length, 1)
    return values


def about_text(selection: ExportSelection) -> str:
    """Return `ExportSelection.about` as JSON, for formats whose metadata are text."""
    return json.dumps(selection.about, sort_keys=True)


def with_texts(column: Array) -> Array:
    """Return some values of a column of `ExportSelection.columns`, bytes as text."""
    if column.dtype.kind != "S":
        return column
    return np.char.decode(column, "utf-8", "surrogateescape")


def as_json_values(column: Array) -> list[object]:
    """Return values of a column for JSON, which has no NaN: a missing number is None."""
    values = with_texts(column).astype(object)
    if column.dtype.kind == "f":
        values[np.isnan(column)] = None
    return list(values)


def write_npy(
    file: BinaryIO, dtype: npt.DTypeLike, shape: Sequence[int], blocks: Iterable[Array]
) -> None:
    """Write an array as an .npy file, block by block behind its header."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    header = {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(file, header)
    for block in blocks:
        file.write(np.ascontiguousarray(block, dtype).data)


def as_npy(values: object) -> bytes:
    """Return an array as the content of an .npy file."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(values), allow_pickle=False)
    return buffer.getvalue()
