"""Which rows and layers of a store are exported, and their values in blocks that fit in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.errors import ConfigError
from featx.store.reader import FeatureStore, check_rows_present
from featx.types import Status

BLOCK_BYTES = 32 << 20
"""Features that are held at once, at the most, but for a single row that is larger."""

_OF_THE_STORE = ("fingerprint", "model", "weights", "weights_sha256", "transform")


@dataclass(frozen=True)
class Selection:
    """Rows and layers of a store, in the order in which they are written.

    Attributes:
        store: open for reading.
        layers: names of its layers.
        rows: (n,) int64, increasing: which row of the store each exported one is.
        tell: is told of every block how many bytes it has.
    """

    store: FeatureStore
    layers: tuple[str, ...]
    rows: npt.NDArray[np.int64]
    tell: Callable[[int], None] = lambda num_bytes: None

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """(n,) index into the store's classes, -1 where there is none."""
        return self.store.labels[self.rows]

    @cached_property
    def status(self) -> npt.NDArray[np.uint8]:
        """(n,) 0 ok, else the reason (featx.types.Status)."""
        return self.store.status[self.rows]

    @cached_property
    def image_checksums(self) -> npt.NDArray[np.uint64]:
        """(n,) as `FeatureStore.image_checksums` gives them; others after a refresh."""
        return self.store.image_checksums[self.rows]

    @cached_property
    def keys(self) -> npt.NDArray[np.bytes_]:
        """(n,) the keys, as the file system gives them."""
        return self.store.key_bytes[self.rows]

    def key_texts(self, start: int, stop: int) -> list[str]:
        """The keys of some rows for formats that hold UTF-8 only; other bytes are spelled \\xff."""
        return [key.decode("utf-8", "backslashreplace") for key in self.keys[start:stop].tolist()]

    @property
    def classes(self) -> list[str]:
        """Names of the classes as UTF-8, other bytes spelled as in keys."""
        return [as_utf8(name) for name in self.store.classes]

    def class_texts(self, start: int, stop: int) -> list[str | None]:
        """The class of each of some rows, None where there is none."""
        names = self.classes
        return [names[label] if label >= 0 else None for label in self.labels[start:stop].tolist()]

    @cached_property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Name -> (n,) of the columns that the data set brought, as `FeatureStore.column` gives.

        A missing number is NaN, a missing text is empty.
        """
        return {name: self.store.column(name)[self.rows] for name in self.store.columns}

    @cached_property
    def column_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """`columns` for formats of plain arrays: texts are (n,) fixed-length UTF-8 bytes."""
        return {
            name: np.char.encode(values, "utf-8", "surrogateescape")
            if values.dtype.kind == "U"
            else values
            for name, values in self.columns.items()
        }

    def named_columns(self, taken: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """`columns` under the names that they have in a table; 'column.NAME' where NAME is taken.

        Raises:
            ConfigError: a layer, or that other name, is taken as well.
        """
        if both := set(taken) & set(self.layers):
            raise ConfigError(f"layers named {both} have the names of columns of the listing.")
        others = {*taken, *self.layers}
        found = {
            f"column.{name}" if name in others else name: values
            for name, values in self.columns.items()
        }
        if len({*found, *others}) < len(self.columns) + len(others):
            raise ConfigError(
                f"the columns {', '.join(self.columns)} of {self.store.root} and the layers cannot "
                "all have names of their own in one table. Name layers that differ: layer=[...]."
            )
        return found

    def row_shape(self, layer: str) -> tuple[int, ...]:
        """Of one row of a layer."""
        return self.store[layer].shape[1:]

    def dtype(self, layer: str) -> np.dtype[Any]:
        """Of a layer: float16 or float32; bfloat16 is read as float32."""
        return self.store[layer].dtype

    def row_bytes(self, layers: Sequence[str] | None = None) -> int:
        """Bytes of the features of one row, of all layers or some."""
        layers = self.layers if layers is None else layers
        return sum(self.store[name].nbytes for name in layers) // max(1, len(self.store))

    def block_rows(self, layers: Sequence[str] | None = None) -> int:
        """Rows whose features make BLOCK_BYTES, at least one."""
        return max(1, BLOCK_BYTES // max(1, self.row_bytes(layers)))

    def blocks(
        self,
        start: int,
        stop: int,
        layers: Sequence[str] | None = None,
        at_once: int | None = None,
    ) -> Iterator[tuple[int, int, dict[str, npt.NDArray[Any]]]]:
        """The features of rows [start, stop) of the selection, block by block.

        Args:
            start, stop: places in `rows`.
            layers: of the selection, all when not given.
            at_once: rows of a block; `block_rows` when not given.

        Yields:
            start and stop of the block, and layer -> (m, ...).

        Raises:
            StoreError: a row that was ok has no values: the store lost it meanwhile.
        """
        layers = self.layers if layers is None else layers
        step = at_once or self.block_rows(layers)
        for first in range(start, stop, step):
            last = min(stop, first + step)
            found = {name: self._read(name, first, last) for name in layers}
            yield first, last, found
            self.tell(sum(values.nbytes for values in found.values()))

    def _read(self, layer: str, start: int, stop: int) -> npt.NDArray[Any]:
        rows = self.rows[start:stop]
        together = int(rows[-1]) - int(rows[0]) + 1 == len(rows)
        asked: Any = slice(int(rows[0]), int(rows[-1]) + 1) if together else rows
        values = np.ascontiguousarray(self.store[layer][asked])
        ok = self.status[start:stop] == Status.OK
        check_rows_present(self.store, layer, rows[ok], values[ok] if not ok.all() else values)
        return values

    @cached_property
    def about(self) -> dict[str, Any]:
        """What is written into every export of where its rows come from; JSON types."""
        attrs = self.store.attrs
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
            **({"columns": self._column_types} if self.columns else {}),
        }

    @property
    def _column_types(self) -> dict[str, str]:
        """Of each column: int64, float64, bool or text, which a format may hold as bytes."""
        return {
            name: "text" if values.dtype.kind == "U" else values.dtype.name
            for name, values in self.columns.items()
        }

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What has to be the same for two exports to hold the same rows; JSON types."""
        listed = hashlib.sha256()
        for column in (self.rows, self.keys, self.labels, self.status):
            listed.update(f"{column.dtype.str} {column.shape} ".encode())
            listed.update(np.ascontiguousarray(column).tobytes())
        layers = {name: f"{self.row_shape(name)} {self.dtype(name)}" for name in self.layers}
        images = hashlib.sha256(self.image_checksums.tobytes()).hexdigest()
        return {
            "store's fingerprint": str(self.store.attrs.get("fingerprint", "")),
            "layers": layers,
            "number of rows": len(self),
            "sha256 of rows, keys, labels and status": listed.hexdigest(),
            "sha256 of the checksums of images": images,
            **({"sha256 of columns": self._columns_sha256()} if self.columns else {}),
        }

    def _columns_sha256(self) -> str:
        listed = hashlib.sha256()
        for name, values in self.column_arrays.items():
            listed.update(f"{name!r} {values.dtype.str} ".encode())
            listed.update(values.tobytes())
        return listed.hexdigest()


def as_utf8(text: str) -> str:
    """A name of a file or folder with bytes that are not UTF-8 spelled: \\xff."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def about_text(selection: Selection) -> str:
    """`about` as JSON, for formats whose metadata are text."""
    return json.dumps(selection.about, sort_keys=True)
