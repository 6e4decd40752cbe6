"""Rows of a layer as float32 vectors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe.labelled_rows import LabelledRows
from featx.errors import ReduceError, StoreError
from featx.layers import RowLayout, channels_last
from featx.store import FeatureStore

MAX_FLAT = 8192
"""Number of values up to which a map or tokens are flattened; larger ones are averaged."""

BLOCK_BYTES = 64 << 20
"""Bytes of float32 values that are read at a time."""


@dataclass(frozen=True)
class LayerRows:
    """One layer of a store, some of its rows, and how each row becomes a vector.

    Attributes:
        store: the store.
        layer: name of the layer.
        rows: (n,) int64 rows of the store.
        pooled: axes, counted with the batch axis, over which rows are averaged; None to flatten.
        width: D, the number of values of a vector.
    """

    store: FeatureStore
    layer: str
    rows: npt.NDArray[np.int64]
    pooled: tuple[int, ...] | None
    width: int

    @property
    def reduction(self) -> str:
        """Reduction of rows to vectors: 'none', 'flatten' or 'avg'."""
        if self.pooled is not None:
            return "avg"
        return "none" if self.store[self.layer].ndim == 2 else "flatten"

    def vectors(self, values: torch.Tensor) -> torch.Tensor:
        """Convert stored rows (n, ...) to (n, D) float32."""
        return as_vectors(values, self.pooled, self.width)

    def read(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """Read the vectors of some of the rows.

        Returns:
            (n, D) float32 on the CPU.
        """
        rows = self.rows[places]
        values = np.asarray(self.store[self.layer][rows])
        vectors = self.vectors(torch.from_numpy(values.astype(np.float32, copy=False)))
        self.check(vectors, rows)
        return vectors

    def check(self, vectors: torch.Tensor, rows: npt.NDArray[np.int64]) -> None:
        """Check that vectors are finite."""
        finite = torch.isfinite(vectors).all(1)
        if not bool(finite.all()):
            row = int(rows[int((~finite).nonzero()[0, 0])])
            raise StoreError(
                f"{self.store.root}: row {row} ({self.store.keys[row]}) of {self.layer} is marked "
                "ok and has values that are not finite. job=verify says what is damaged."
            )


def as_vectors(values: torch.Tensor, pooled: tuple[int, ...] | None, width: int) -> torch.Tensor:
    """Convert stored rows to vectors.

    Returns:
        (n, D) float32.
    """
    values = values.to(torch.float32)
    if pooled:
        values = values.mean(pooled)
    return values.reshape(len(values), width)


def layer_vectors(labelled: LabelledRows, layer: str) -> LayerRows:
    """Decide how the rows of a layer become vectors.

    Vectors stay as they are. Maps and tokens are flattened if they have at most MAX_FLAT values,
    and averaged over their positions otherwise.

    Args:
        labelled: rows of a store.
        layer: name of the layer.

    Raises:
        ReduceError: the map is too large, and its channel axis is unknown.
    """
    store = labelled.store
    shape = store[layer].shape[1:]
    numbers = int(np.prod(shape, dtype=np.int64))
    if len(shape) < 2 or numbers <= MAX_FLAT:
        return LayerRows(store, layer, labelled.rows, None, numbers)
    if len(shape) == 2:  # tokens (T, C), including the class token
        return LayerRows(store, layer, labelled.rows, (1,), shape[1])
    if len(shape) != 3:
        raise ReduceError(
            f"{layer} has rows of shape {shape}, {numbers} numbers: too many for a probe, and "
            "not a map that it could average. Extract it with a reduction, or leave it out with "
            "layers=."
        )
    is_last = map_channels_last(store, layer, "averaging before a probe")
    axes, width = ((1, 2), shape[2]) if is_last else ((2, 3), shape[0])
    return LayerRows(store, layer, labelled.rows, axes, width)


def map_channels_last(store: FeatureStore, layer: str, purpose: str) -> bool:
    """Return whether the rows of a layer are maps (H, W, C) instead of (C, H, W)."""
    shape = store[layer].shape[1:]
    transform = str(store.attrs.get("transform", ""))
    crop = re.search(r"crop (\d+)x(\d+)", transform)
    if crop is None:
        raise ReduceError(
            f"{purpose} does not fit {layer}: the channel axis of its rows {shape} is unknown, "
            f"because the transform of the store names no crop ({transform!r}). Extract it with a "
            "reduction, or leave it out with layers=."
        )
    size = int(crop.group(1)), int(crop.group(2))
    return channels_last(purpose, RowLayout(layer, shape, size))


class Features:
    """Vectors of one layer: those of the training rows, then those of another store's rows, if any.

    They stay in memory on the device if they and a standardised copy fit into the given size.
    Otherwise they are streamed: read from the store block by block.

    Args:
        parts: rows of the same layer and width in one or two stores.
        device: device that computes.
        memory_bytes: memory for the vectors and their copy, in bytes.

    Attributes:
        parts: as given.
        device: as given.
        width: D, the number of values of a vector.
        whole: (N, D) float32 on the device, or None if the vectors are streamed.
    """

    def __init__(self, parts: list[LayerRows], device: torch.device, memory_bytes: float) -> None:
        self.parts = parts
        self.device = device
        self.width = parts[0].width
        self._starts = np.cumsum([0, *(len(part.rows) for part in parts)])
        self.whole: torch.Tensor | None = None
        if 2 * 4 * len(self) * self.width <= memory_bytes:
            whole = torch.empty((len(self), self.width))
            for places in self._spans(np.arange(len(self))):
                whole[places[0] : places[-1] + 1] = self._read(places)
            self.whole = whole.to(device)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def blocks(
        self, places: npt.NDArray[np.int64]
    ) -> Iterator[tuple[npt.NDArray[np.int64], torch.Tensor]]:
        """Yield the places of a block in order, and their vectors, (n, D) float32 on the device."""
        for span in self._spans(places):
            if self.whole is None:
                yield span, self._read(span).to(self.device)
            else:
                yield span, self.whole[torch.from_numpy(span).to(self.device)]

    def take(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """Copy the vectors of some places to a new (n, D) float32 tensor on the device."""
        vectors = torch.empty((len(places), self.width), device=self.device)
        done = 0
        for span, block in self.blocks(places):
            vectors[done : done + len(span)] = block
            done += len(span)
        return vectors

    def _spans(self, places: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Split places into blocks of BLOCK_BYTES."""
        size = max(1, BLOCK_BYTES // (4 * self.width))
        for start in range(0, len(places), size):
            yield places[start : start + size]

    def _read(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """Read vectors from the stores, (n, D) float32 on the CPU."""
        vectors = torch.empty((len(places), self.width))
        part_of = np.searchsorted(self._starts, places, side="right") - 1
        for number, part in enumerate(self.parts):
            in_part = np.flatnonzero(part_of == number)
            if len(in_part):
                vectors[torch.from_numpy(in_part)] = part.read(
                    places[in_part] - self._starts[number]
                )
        return vectors
