"""Layers of a store: lazy arrays over their rows, and the choice of some by the option `layers`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from featx.base import glob_to_regex, sampled_positions, size_text
from featx.errors import ConfigError, LayerError, StoreError, nearest
from featx.store.contents import Contents
from featx.store.layer_reader import LayerReader
from featx.store.layout import geometry_of
from featx.types import Array, TokenGeometry

T = TypeVar("T")


class LayerSource(Protocol):
    """What layers need of the `FeatureStore` that has them."""

    root: Path
    _contents: Contents
    _layer_reader: LayerReader

    @property
    def layers(self) -> tuple[str, ...]: ...
    @property
    def key_bytes(self) -> npt.NDArray[np.bytes_]: ...
    def __contains__(self, layer: object) -> bool: ...
    def __len__(self) -> int: ...
    def _retry_if_packed(self, read: Callable[[], T]) -> T: ...


class LayerArray:
    """Layer of a store with shape (N, ...), indexed like a numpy array and read on access.

    An index is an int, a slice, a list or array of ints in any order with repeats, or a boolean
    mask; further axes may follow: `store["layer4"][10:20, :, 3]`.

    Attributes:
        dtype: numpy dtype of the values; float32 for bfloat16 layers.
        stored_dtype: number type in the file: 'float16', 'float32' or 'bfloat16'.
        shape: (N, ...).
    """

    def __init__(self, store: LayerSource, name: str) -> None:
        self._store = store
        self.name = name
        info = store._contents.layers[name]
        self.dtype, self.stored_dtype = info.dtype, info.stored_dtype
        self.shape: tuple[int, ...] = (len(store), *info.row_shape)

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the dataset, such as layer, capture, reduce and compute_dtype."""
        return dict(self._store._contents.layers[self.name].attrs)

    @property
    def tokens(self) -> TokenGeometry | None:
        """Places of the tokens of a row; None if the layer has no tokens, or in older stores."""
        try:
            return geometry_of(self.attrs)
        except (ValueError, TypeError) as error:
            raise StoreError(f"{self._store.root}: layer {self.name}: {error}.") from error

    def positions(self, rows: slice | Sequence[int] | Array = slice(None)) -> npt.NDArray[np.int64]:
        """Return the positions of the tokens of reduce=sample on the token axis of the layer.

        They follow from the keys and the attributes of the layer; nothing is read from its rows.
        Rows that failed have the positions that they would have had.

        Returns:
            (n, k) int64, increasing in each row; token [i, j] of the layer was at position [i, j].

        Raises:
            StoreError: the tokens of the layer are not a sample.
        """
        attrs = self.attrs
        if attrs.get("reduce") != "sample":
            raise StoreError(
                f"{self._store.root}: the rows of {self.name} are reduced by "
                f"{attrs.get('reduce')}; only tokens of reduce=sample have positions."
            )
        keys = self._store.key_bytes[row_indices(rows, len(self))[0]].tolist()
        seed, candidates = int(attrs["reduce_seed"]), int(attrs["reduce_num_candidates"])
        chosen = sampled_positions(keys, seed, candidates, int(attrs["reduce_k"]))
        return chosen + int(attrs["reduce_first"])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk of the file; slices aligned to it read no chunk twice."""
        store = self._store
        return store._retry_if_packed(lambda: store._layer_reader.chunk_rows(self.name))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        size = f"{size_text(self.nbytes)} in chunks of {self.chunk_rows} rows"
        return (
            f"<LayerArray {self.name} {self.shape} {self.dtype}, {size}; index it to read: "
            "array[:100]>"
        )

    def __getitem__(self, index: Any) -> Array:
        if type(index) is int and -len(self) <= index < len(self):
            start = index % len(self)
            row: Array = self._read_range(start, start + 1)[0]
            return row
        if type(index) is slice and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            return self._read_range(start, max(start, stop))
        first, *rest = (index or (Ellipsis,)) if isinstance(index, tuple) else (index,)
        if first is Ellipsis:  # of how many axes, only numpy knows
            every: Array = self._read_range(0, len(self))[index]
            return every
        rows, single = row_indices(first, len(self))
        store = self._store
        read = store._retry_if_packed(lambda: store._layer_reader.read(self.name, rows))
        if not rest:
            return read[0] if single else read
        if single:
            first = 0
        elif not isinstance(first, slice):
            first = np.arange(len(rows))  # pairs with other lists of indices, as in numpy
        else:
            first = slice(None)
        chosen: Array = read[(first, *rest)]
        return chosen

    def _read_range(self, start: int, stop: int) -> Array:
        store, name = self._store, self.name
        return store._retry_if_packed(lambda: store._layer_reader.read_range(name, start, stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("the rows are on disk; an array of them is always a copy")
        return self[:] if dtype is None else self[:].astype(dtype)


def row_indices(index: object, length: int) -> tuple[npt.NDArray[np.int64], bool]:
    """Convert a row index to (n,) int64 in [0, length), and whether the index was a single int.

    Raises IndexError if an index is out of range, a mask has another length, or the type is not
    supported.
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
        raise IndexError(
            f"rows are chosen by int, slice, mask or list of ints, not {index!r}; store.row(key) "
            "is the row of a key"
        )
    indices = array.reshape(-1)
    outside = (indices < -length) | (indices >= length)
    if outside.any():
        raise IndexError(f"row {int(indices[outside][0])} is out of range for {length} rows")
    rows = indices.astype(np.int64)
    return np.where(rows < 0, rows + length, rows), array.ndim == 0


def matching_layers(store: LayerSource, requested: object) -> tuple[str, ...]:
    """Layers that match a name, a glob or a list of these, each once, in the requested order.

    None stands for all layers. Raises ConfigError if `requested` has another type or is an empty
    list, and LayerError if the store has no matching layer, or no layers at all.
    """
    if not store.layers:
        raise LayerError(f"{store.root} has no layers yet.")
    if requested is None:
        return store.layers
    wanted = [requested] if isinstance(requested, str) else requested
    if isinstance(wanted, Mapping):
        wanted = list(wanted)  # as a run was given layers with their reductions
    if not isinstance(wanted, list | tuple) or not wanted:
        raise ConfigError(f"layers={requested}: expected a name, a glob or a list of them.")
    names: dict[str, None] = {}
    for name in map(str, wanted):
        if name in store:
            names[name] = None
            continue
        pattern = re.compile(glob_to_regex(name))
        matches = [layer for layer in store.layers if pattern.fullmatch(layer)]
        if not matches:
            known = ", ".join(store.layers)
            raise LayerError(
                f"{store.root} has no layer {name!r}; it has {known}.{nearest(name, store.layers)}"
            )
        names |= dict.fromkeys(matches)
    return tuple(names)


def only_layer(store: LayerSource, requested: object) -> str:
    """Name of the single layer that matches; None suffices for a store of one layer.

    Raises ConfigError if several layers match, and LayerError if none does.
    """
    names = matching_layers(store, requested)
    if len(names) > 1:
        raise ConfigError(f"name one layer with layers=: {store.root} has {', '.join(names)}.")
    return names[0]
