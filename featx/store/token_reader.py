"""Reads single tokens of a layer: adjacent bytes of a row, where rows are stored plainly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.store.chunk_reader import Verify, check_verify, consecutive_ranges
from featx.store.dtypes import dtype_name, raw_dtype
from featx.store.layer_reader import LayerReader
from featx.store.layout import FEATURES
from featx.store.reader import FeatureStore
from featx.types import Array

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_PIECE_BYTES = 16 << 20
"""Bytes of rows that are held at a time where tokens are not read at their addresses."""


class TokenReader:
    """Tokens of one layer, for any number of threads: (T, C) rows, or positions of a map.

    Each chunk is compared with its checksum when a token of it is read first, unless verify=False.

    Attributes:
        dtype: name of the number type: 'float16', 'float32' or 'bfloat16'.
        chunk_rows: rows of a chunk.
        reads_whole_chunks: whether a token costs the decoding of its chunk.
        reads_whole_rows: whether a token costs the reading of its row, as in maps (C, H, W).

    Raises:
        StoreError: the rows are no tokens, or the store is damaged.
    """

    def __init__(self, store: FeatureStore, layer: str, verify: Verify = "chunks") -> None:
        check_verify(verify)
        self._store = store._with_verify("rows" if verify else False)
        self._layer = layer
        self.num_tokens, self.channels, self._channels_first = _shape_of_tokens(store, layer)
        segments, _ = self._reader._segments_of(layer)
        if not segments:
            raise StoreError(f"{store.root} has no rows of {layer} yet.")
        self.dtype, method = self._store._retry_if_packed(self._describe)
        self.token_bytes = self.channels * raw_dtype(self.dtype).itemsize
        self.chunk_rows = self._store[layer].chunk_rows
        self.reads_whole_chunks = method in ("decode", "h5py")
        self.reads_whole_rows = self.reads_whole_chunks or self._channels_first

    @property
    def _reader(self) -> LayerReader:
        return self._store._layer_reader

    def _describe(self) -> tuple[str, str]:
        """Number type of the layer, and how its rows are read."""
        segment = self._reader._segments_of(self._layer)[0][0]
        with self._reader.open(segment) as opened:
            name = dtype_name(opened.dataset(f"{FEATURES}/{self._layer}"))
        with self._reader._open_rows(segment, self._layer) as chunks:
            return name, chunks.read_method

    def take(self, rows: Rows, positions: Rows) -> Array:
        """Read tokens in any order with repeats, (n, channels) as stored (bfloat16 as uint16).

        Raises IndexError if a row or a position is out of range, StoreError if a row is not in the
        store or a chunk differs from its checksum, and OSError if a file cannot be read now.
        """
        out = np.empty((len(rows), self.token_bytes), np.uint8)
        order = np.lexsort((positions, rows))
        self.read_into(rows[order], positions[order], out, order, mapped=True)
        return out.view(raw_dtype(self.dtype)).reshape(len(rows), self.channels)

    def read_into(
        self, rows: Rows, positions: Rows, out: Bytes, out_indices: Rows, mapped: bool = False
    ) -> None:
        """Read ascending tokens (rows[i], positions[i]) into out[out_indices[i]]; see `take`.

        With `mapped`, a local file is read through its map, whose pages count as memory.
        """
        if not len(rows):
            return
        for what, values, stop in (
            ("row", rows, len(self._store)),
            ("position", positions, self.num_tokens),
        ):
            if values.min() < 0 or values.max() >= stop:
                wrong = values[(values < 0) | (values >= stop)][0]
                raise IndexError(f"{self._layer} has {stop} {what}s; {what} {wrong} was asked for")
        read = self._read_rows if self.reads_whole_rows else partial(self._read_tokens, mapped)
        self._store._retry_if_packed(lambda: read(rows, positions, out, out_indices))

    def read_tasks(
        self, rows: Rows, positions: Rows, out: Bytes, out_indices: Rows, num_bytes: int
    ) -> list[Callable[[], None]]:
        """Divide what `read_into` does into tasks for threads, between chunks."""
        step = max(1, num_bytes // self.token_bytes)
        starts = np.flatnonzero(np.diff(rows // self.chunk_rows)) + 1
        wanted = np.searchsorted(starts, np.arange(step, len(rows), step))
        cuts = np.unique(starts[wanted[wanted < len(starts)]]).tolist()
        parts = [slice(*pair) for pair in itertools.pairwise([0, *cuts, len(rows)])]
        return [
            partial(self.read_into, rows[part], positions[part], out, out_indices[part])
            for part in parts
        ]

    def _read_tokens(
        self, mapped: bool, rows: Rows, positions: Rows, out: Bytes, out_indices: Rows
    ) -> None:
        """Read tokens at their addresses, file by file."""
        segments, _ = self._reader._segments_of(self._layer)
        number = self._segment_numbers(rows)
        for low, high in consecutive_ranges(number[1:] == number[:-1]):
            segment = segments[int(number[low])]
            with self._reader._open_rows(segment, self._layer) as chunks:
                offsets = positions[low:high] * self.token_bytes
                chunks.read_items(
                    rows[low:high] - segment.start, offsets, out, out_indices[low:high], mapped
                )

    def _segment_numbers(self, rows: Rows) -> Rows:
        """Number of the file of each row; raise StoreError if a row is in no file."""
        segments, starts = self._reader._segments_of(self._layer)
        number = np.searchsorted(starts, rows, side="right") - 1
        is_absent = (number < 0) | (rows >= np.array([each.stop for each in segments])[number])
        if is_absent.any():
            raise StoreError(
                f"some rows are not in the store yet, such as {int(rows[is_absent][0])}."
            )
        return number

    def _read_rows(self, rows: Rows, positions: Rows, out: Bytes, out_indices: Rows) -> None:
        """Read tokens of maps (C, H, W) and of compressed layers from whole rows."""
        unique, inverse = np.unique(rows, return_inverse=True)
        self._segment_numbers(unique)  # the reader of rows fills those that are absent with NaN
        array = self._store[self._layer]
        step = max(1, _PIECE_BYTES * len(array) // max(1, array.nbytes))
        for i in range(0, len(unique), step):
            some = np.flatnonzero((inverse >= i) & (inverse < i + step))
            values = self._reader.read(self._layer, unique[i : i + step])
            if self.dtype == "bfloat16":  # widened to float32 by the reader, which is exact
                values = (values.view(np.uint32) >> 16).astype(np.uint16)
            axes = (self.num_tokens, self.channels)
            values = values.reshape(len(values), *(axes[::-1] if self._channels_first else axes))
            if self._channels_first:
                values = values.transpose(0, 2, 1)
            tokens = np.ascontiguousarray(values[inverse[some] - i, positions[some]])
            out[out_indices[some]] = tokens.view(np.uint8).reshape(len(some), -1)


def _shape_of_tokens(store: FeatureStore, layer: str) -> tuple[int, int, bool]:
    """Tokens of a row, numbers of a token, and whether the channels come first."""
    array = store[layer]
    shape = array.shape[1:]
    if len(shape) == 2:
        return shape[0], shape[1], False
    geometry = array.tokens
    if geometry is not None and (first := geometry.channels_first(shape)) is not None:
        channels = shape[0] if first else shape[2]
        return geometry.grid[0] * geometry.grid[1], channels, first
    raise StoreError(
        f"{store.root}: rows of {layer} have shape {shape}; expected tokens (T, C), or a map whose "
        "channels are known (the store records this when it is made). Extract a layer that "
        "gives such rows, with reduce=none."
    )
