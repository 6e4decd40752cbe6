"""Rows of a layer as vectors on a device, in memory or read in blocks."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from featx.base import block_sizes, float64_device, rows_of_block
from featx.errors import ConfigError, StoreError
from featx.store import FeatureStore, check_rows_present

Ints = npt.NDArray[np.int64]

MAX_VALUE = torch.finfo(torch.float32).max / 2
"""Largest absolute value of a feature; differences of larger ones may be infinite."""

FAR = 8.0
"""Length of the vector that stands for a vector of zeros among centred unit vectors, whose length
is below 3."""

_DOUBLES_BYTES = 8 << 20
"""Bytes of float32 vectors that are converted to float64 at a time."""


@dataclass(frozen=True)
class LayerRows:
    """Some rows of a layer of a store, and how each of them becomes a vector.

    Attributes:
        rows: (n,) int64 rows of the store in any order, none of which failed. An index into `rows`
            is called a place.
        pooled: axes over which rows are averaged, counted with the batch axis; None flattens them.
    """

    store: FeatureStore
    layer: str
    rows: Ints
    pooled: tuple[int, ...] | None = None

    @cached_property
    def width(self) -> int:
        """Number of values of a vector."""
        shape, pooled = self.store[self.layer].shape, self.pooled or ()
        return math.prod(size for axis, size in enumerate(shape) if axis not in (0, *pooled))

    def as_dict(self) -> dict[str, object]:
        """Describe what the store holds of the layer, and how vectors are made of it."""
        dataset = self.store[self.layer]
        flat = "none" if dataset.ndim == 2 else "flatten"
        return {
            "layer": str(dataset.attrs.get("layer", "")),
            "capture": str(dataset.attrs.get("capture", "")),
            "stored": str(dataset.attrs.get("reduce", "")),
            "shape": list(dataset.shape[1:]),
            "then": flat if self.pooled is None else "avg",
            "axes": list(self.pooled or ()),
        }

    def read(self, places: Ints, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read the vectors at some places, (n, width) float32 on the device."""
        rows = self.rows[places]
        if self.pooled is None:
            values = self.store[self.layer][rows]
            check_rows_present(self.store, self.layer, rows, values)
            vectors = as_vectors(torch.from_numpy(values).to(device), None)
        else:  # stored rows may be much larger than their vectors
            blocks = float_blocks(self.store, self.layer, rows)
            averages = [as_vectors(torch.from_numpy(block), self.pooled) for block in blocks]
            vectors = torch.cat(averages).to(device)
        self.check(vectors, rows)
        return vectors

    def check(self, vectors: torch.Tensor, rows: Ints) -> None:
        """Check that vectors are finite, and that float32 holds their differences."""
        smallest, largest = (float(value) for value in vectors.aminmax())
        if smallest >= -MAX_VALUE and largest <= MAX_VALUE:  # NaN is neither
            return
        is_held = (vectors.abs() <= MAX_VALUE).all(1)
        row = int(rows[int((~is_held).nonzero()[0, 0])])
        raise StoreError(
            f"{self.store.root}: row {row} ({self.store.key_of(row)}) of {self.layer} is "
            f"marked ok and has values that are not finite, or beyond {MAX_VALUE:.1e}, whose "
            "differences float32 cannot hold. job=verify says whether they are damaged."
        )


def as_vectors(values: torch.Tensor, pooled: tuple[int, ...] | None) -> torch.Tensor:
    """Convert stored rows (n, ...) to vectors, (n, D) float32."""
    values = values.to(torch.float32)
    return values.mean(pooled).flatten(1) if pooled else values.reshape(len(values), -1)


def float_blocks(store: FeatureStore, layer: str, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the values of some rows in blocks, (m, ...) float32, of which none may be missing."""
    features = store[layer]
    step = rows_of_block(4 * math.prod(features.shape[1:]))
    for start in range(0, len(rows), step):
        block_rows = rows[start : start + step]
        read = features[block_rows]
        check_rows_present(store, layer, block_rows, read)
        yield read.astype(np.float32, copy=False)


class LayerVectors:
    """Vectors of a layer: of rows of one store, then of rows of further ones, if any.

    They stay in memory if they fit into `keep_bytes`; None is KEEP_BYTES, and on CUDA half of the
    free memory. Otherwise they are streamed: read from the stores whenever they are needed.

    Args:
        unit: whether vectors are scaled to length 1; a vector of zeros stays zero.
        centre: whether the median of the first vectors is subtracted. Distances stay the same and
            become more exact, also if a few rows are very long. With `unit`, cosines follow from
            distances as 1 - |u - v|^2 / 2, and a vector of zeros, which has no cosine, becomes a
            vector that is FAR from all others.
        standardise: whether each value has the mean over the rows subtracted, and is divided by
            its standard deviation, before all else. A value that is equal in all rows becomes 0.
        projection: (D, P) float32 by which rows of the store are multiplied first, or None.
        dtype: of the vectors: float32, or float64 where rounding to float32 would be too coarse.

    Attributes:
        rows: (n,) int64 rows of the first store.
        whole: (N, width) on the device, or None if the vectors are streamed.
        scale: number by which centred vectors are divided unless `unit`, so that float32 holds
            their squares; a power of two.

    Raises:
        ConfigError: there are no rows.
        LayerError: a store has no such layer.
    """

    def __init__(
        self,
        parts: Sequence[LayerRows],
        device: torch.device,
        keep_bytes: float | None = None,
        unit: bool = False,
        centre: bool = False,
        standardise: bool = False,
        projection: npt.NDArray[np.float32] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.parts, self.rows, self.device = tuple(parts), parts[0].rows, device
        self._dtype = dtype
        self._starts = np.cumsum([0, *(len(part.rows) for part in parts)])
        if not len(self):
            raise ConfigError(f"{parts[0].store.root} has no row of {parts[0].layer} that is ok.")
        self._projection = projection
        self.width = parts[0].width if projection is None else projection.shape[1]
        self._unit, self._centre = False, None
        self.whole: torch.Tensor | None = None
        self._scaler: tuple[torch.Tensor, torch.Tensor] | None = None
        self.scale = 1.0
        if standardise:
            self._scaler = self._mean_and_deviation()  # of the values as they are stored
        self._unit = unit
        if centre:
            count = min(len(self), 1024, self.block_rows)
            first = self.block(0, count).to(float64_device(device), torch.float64)
            # Whole numbers stay whole numbers, so that equal distances stay equal.
            self._centre = first.median(dim=0).values
            largest = float((first - self._centre).abs().max())
            if largest and not unit:
                self.scale = math.ldexp(1, math.frexp(largest)[1])
        if keep_bytes is None:
            keep_bytes = block_sizes.KEEP_BYTES
            if device.type == "cuda":
                keep_bytes = int(torch.cuda.mem_get_info(device)[0]) // 2
        if dtype.itemsize * self.width * len(self) <= keep_bytes:
            whole = self._empty(len(self))
            for start, block in self.all_blocks(rows_of_block(4 * self.width)):
                whole[start : start + len(block)] = block
            self.whole = whole

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def block_rows(self) -> int:
        """Number of vectors that are compared with others at a time."""
        return rows_of_block(2 * self.width)

    @property
    def _double_rows(self) -> int:
        """Number of vectors that are converted to float64 at a time."""
        return max(1, _DOUBLES_BYTES // (4 * max(1, self.width)))

    def subset(self, places: Ints) -> LayerVectors:
        """Return the vectors at some places of a store, scaled and centred as all of them are."""
        subset = copy.copy(self)
        subset.rows = self.rows[places]
        subset.parts = (replace(self.parts[0], rows=subset.rows),)
        subset._starts = np.array([0, len(places)])
        subset.whole = None if self.whole is None else self.take(places)
        return subset

    def block(self, start: int, stop: int) -> torch.Tensor:
        """Return the vectors at the places [start, stop), (stop - start, width)."""
        if self.whole is not None:
            return self.whole[start:stop]
        return self._read(np.arange(start, stop))

    def all_blocks(self, block_rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield all vectors in blocks: the place of the first, and (m, width)."""
        for start in range(0, len(self), block_rows):
            yield start, self.block(start, min(len(self), start + block_rows))

    def blocks(self, places: Ints, num_outputs: int = 0) -> Iterator[tuple[Ints, torch.Tensor]]:
        """Yield the places of a block in order, and a copy of their vectors, (m, width).

        A block has as many rows as also fit into it with `num_outputs` float64 values each.
        """
        size = rows_of_block(max(4 * self.width, 8 * num_outputs))
        for start in range(0, len(places), size):
            span = places[start : start + size]
            yield span, self._read(span) if self.whole is None else self.take(span)

    def take(self, places: Ints) -> torch.Tensor:
        """Copy the vectors at some places to a new (m, width) tensor."""
        if self.whole is not None:
            return self.whole[torch.from_numpy(places).to(self.device)]
        vectors, done = self._empty(len(places)), 0
        for span, block in self.blocks(places):
            vectors[done : done + len(span)] = block
            done += len(span)
        return vectors

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """Return the vectors at a few places on the device, also repeated ones, as (m, width)."""
        if self.whole is not None:
            return self.whole[places]
        unique, back = torch.unique(places, return_inverse=True)
        return self._read(unique.cpu().numpy())[back]

    def prepare(self, vectors: torch.Tensor) -> torch.Tensor:
        """Scale and centre (m, width) vectors, of any rows, as those of the store."""
        vectors = vectors.to(self._dtype)
        if not self._unit and self._scaler is None and self._centre is None:
            return vectors
        parts = torch.split(vectors, self._double_rows)
        return torch.cat([self._scaled_and_centred(part) for part in parts])

    def _mean_and_deviation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each value, (width,) float64; a deviation of 0 is 1."""
        home = float64_device(self.device)
        total = torch.zeros(self.width, dtype=torch.float64, device=home)
        squares = torch.zeros_like(total)
        for _, block in self.all_blocks(self._double_rows):
            total += block.to(home).double().sum(0)
        mean = total / len(self)
        for _, block in self.all_blocks(self._double_rows):
            squares += (block.to(home).double() - mean).square().sum(0)
        deviation = (squares / len(self)).sqrt()
        deviation[deviation == 0] = 1
        return mean, deviation

    def _empty(self, count: int) -> torch.Tensor:
        """Return an uninitialised tensor for some vectors."""
        return torch.empty((count, self.width), dtype=self._dtype, device=self.device)

    def _read(self, places: Ints) -> torch.Tensor:
        """Read vectors from the stores, and scale and centre them."""
        if len(self.parts) == 1:
            vectors = self.parts[0].read(places, self.device)
        else:
            vectors = torch.empty(
                (len(places), self.width), dtype=torch.float32, device=self.device
            )
            part_of = np.searchsorted(self._starts, places, side="right") - 1
            for number, part in enumerate(self.parts):
                if len(found := np.flatnonzero(part_of == number)):
                    places_of_part = places[found] - self._starts[number]
                    vectors[torch.from_numpy(found)] = part.read(places_of_part, self.device)
        if self._projection is not None:
            vectors = torch.from_numpy(vectors.cpu().numpy() @ self._projection).to(self.device)
        return self.prepare(vectors)

    def _scaled_and_centred(self, vectors: torch.Tensor) -> torch.Tensor:
        """Standardise, scale and centre vectors in float64.

        Features with a large common offset differ little, and float32 would lose the difference.
        """
        wide = vectors.to(float64_device(self.device)).double()
        if self._scaler is not None:
            mean, deviation = self._scaler
            wide = (wide - mean) / deviation
        is_zero = ~wide.any(dim=1)
        if self._unit:
            wide = unit_vectors(wide)
        if self._centre is not None:
            wide = (wide - self._centre) / self.scale
            if self._unit:
                wide[is_zero] = 0
                wide[is_zero, 0] = FAR
        return wide.to(vectors)


def unit_vectors(vectors: torch.Tensor) -> torch.Tensor:
    """Divide (n, D) float64 vectors by their lengths; a vector of zeros stays one.

    The squares of float32 numbers beyond 1e19 or below 1e-19 fit into float64 only.
    """
    lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    unit: torch.Tensor = vectors / lengths.clamp_min(torch.finfo(torch.float64).tiny)
    return unit
