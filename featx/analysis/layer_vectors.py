"""Rows of a layer as vectors on a device, in blocks; a small layer stays in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from featx.base import block_sizes, float64_device
from featx.errors import ConfigError
from featx.store import FeatureStore, check_rows_present
from featx.types import Array

_DOUBLES_BYTES = 8 << 20
"""Bytes of float32 vectors that are converted to float64 at a time."""

FAR = 8.0
"""Length of the vector that stands for a vector of zeros among centred unit vectors, whose length
is below 3."""


class LayerVectors:
    """Rows of a layer as flat vectors of one dtype.

    Args:
        rows: (n,) rows of the store in any order, none of which failed; None for all such rows.
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
        rows: (n,) int64 row of the store of each vector. An index into `rows` is called a place.
        scale: number by which centred vectors are divided unless `unit`, so that float32 holds
            their squares; a power of two.

    Raises:
        ConfigError: all rows failed.
        LayerError: the store has no such layer.
    """

    def __init__(
        self,
        store: FeatureStore,
        layer: str,
        device: torch.device,
        rows: npt.NDArray[np.int64] | None = None,
        unit: bool = False,
        centre: bool = False,
        standardise: bool = False,
        projection: npt.NDArray[np.float32] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._features = store[layer]
        self._store, self.layer, self.device, self._dtype = store, layer, device, dtype
        self.root = store.root
        self.rows = np.flatnonzero(store.ok) if rows is None else rows
        if not len(self.rows):
            raise ConfigError(f"{store.root} has no row of {layer} that is ok.")
        self._projection = projection
        if projection is None:
            self.width = int(np.prod(self._features.shape[1:], dtype=np.int64))
        else:
            self.width = projection.shape[1]
        self._unit, self._centre = False, None
        self._all_vectors: torch.Tensor | None = None
        self._scaler: tuple[torch.Tensor, torch.Tensor] | None = None
        self.scale = 1.0
        if standardise:
            self._scaler = self._mean_and_deviation()  # of the values as they are stored
        self._unit = unit
        if centre:
            count = min(len(self), 1024, self.block_rows)
            first = self._read_rows(self.rows[:count]).to(float64_device(device), torch.float64)
            # Whole numbers stay whole numbers, so that equal distances stay equal.
            self._centre = first.median(dim=0).values
            largest = float((first - self._centre).abs().max())
            if largest and not unit:
                self.scale = math.ldexp(1, math.frexp(largest)[1])
        kept_bytes = block_sizes.KEEP_BYTES
        if device.type == "cuda":
            kept_bytes = int(torch.cuda.mem_get_info(device)[0]) // 2
        if dtype.itemsize * self.width * len(self) <= kept_bytes:
            all_vectors = torch.empty((len(self), self.width), dtype=dtype, device=device)
            for start, block in self.blocks(self.block_rows):
                all_vectors[start : start + len(block)] = block
            self._all_vectors = all_vectors

    def __len__(self) -> int:
        return len(self.rows)

    def subset(self, places: npt.NDArray[np.int64]) -> LayerVectors:
        """Return the vectors at some places, scaled and centred as all of them are."""
        part = copy.copy(self)
        part.rows = self.rows[places]
        if self._all_vectors is not None:
            part._all_vectors = self._all_vectors[torch.from_numpy(places).to(self.device)]
        return part

    def rows_of(self, num_bytes: int) -> int:
        """Return the number of vectors that take `num_bytes`, at least one."""
        return max(1, num_bytes // (self._dtype.itemsize * max(1, self.width)))

    @property
    def block_rows(self) -> int:
        """Number of vectors that are read, or compared with others, at a time."""
        return self.rows_of(2 * block_sizes.BLOCK_BYTES)

    def block(self, start: int, stop: int) -> torch.Tensor:
        """Return the vectors at the places [start, stop), (stop - start, width)."""
        if self._all_vectors is not None:
            return self._all_vectors[start:stop]
        return self._read_rows(self.rows[start:stop])

    def blocks(self, block_rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield all vectors in blocks: the place of the first, and (m, width)."""
        for start in range(0, len(self), block_rows):
            yield start, self.block(start, min(len(self), start + block_rows))

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """Return the vectors at any places, also repeated ones, as (m, width)."""
        if self._all_vectors is not None:
            return self._all_vectors[places]
        unique, back = torch.unique(places, return_inverse=True)
        return self._read_rows(self.rows[unique.cpu().numpy()])[back]

    def prepare(self, rows: Array) -> torch.Tensor:
        """Scale and centre rows (m, ...) as those of the store, of which they need not be. Return
        (m, width).
        """
        vectors = torch.from_numpy(rows).to(self.device).to(self._dtype)
        vectors = vectors.reshape(len(rows), self.width)
        if not self._unit and self._scaler is None and self._centre is None:
            return vectors
        parts = torch.split(vectors, self.rows_of(_DOUBLES_BYTES))
        return torch.cat([self._scaled_and_centred(part) for part in parts])

    def _mean_and_deviation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each value, (width,) float64; a deviation of 0 is 1."""
        home = float64_device(self.device)
        total = torch.zeros(self.width, dtype=torch.float64, device=home)
        squares = torch.zeros_like(total)
        block_rows = self.rows_of(_DOUBLES_BYTES)
        for _, block in self.blocks(block_rows):
            total += block.to(home).double().sum(0)
        mean = total / len(self)
        for _, block in self.blocks(block_rows):
            squares += (block.to(home).double() - mean).square().sum(0)
        deviation = (squares / len(self)).sqrt()
        deviation[deviation == 0] = 1
        return mean, deviation

    def _read_rows(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        read = self._features[rows]
        check_rows_present(self._store, self.layer, rows, read)
        if self._projection is not None:
            read = read.astype(np.float32) @ self._projection
        return self.prepare(read)

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
