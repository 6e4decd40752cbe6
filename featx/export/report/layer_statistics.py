"""Statistics of a layer over some rows, computed block by block in float64."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.errors import ReduceError
from featx.layers import RowLayout, channel_axis
from featx.store import FeatureStore, check_rows_present

BLOCK_BYTES = 64 << 20
"""Bytes of float32 values that are read at a time."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer.

    Attributes:
        name: name of the dataset.
        shape: shape of a row.
        stored: dtype in memory, capture and reduction, as text.
        rows: number of rows used.
        norms: minimum, lower quartile, median, upper quartile and maximum of the L2 norms of rows,
            or None if no row is finite.
        mean: mean of all finite values.
        std: standard deviation of all finite values.
        smallest: minimum of all finite values.
        largest: maximum of all finite values.
        zeros: share of the finite values that are exactly 0, in [0, 1].
        channels: number of channels.
        dead: number of channels that are 0 at every position of every row used.
        what: 'channels', or 'numbers' if the channel axis of a row is unknown.
        nonfinite: number of values that are NaN or infinite.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    rows: int
    norms: tuple[float, float, float, float, float] | None
    mean: float
    std: float
    smallest: float
    largest: float
    zeros: float
    channels: int
    dead: int
    what: str
    nonfinite: int


def layer_statistics(store: FeatureStore, layer: str, rows: Rows) -> LayerStatistics:
    """Compute the statistics of a layer over some rows."""
    features = store[layer]
    axis, kind_of_channels = _channels(store, layer)
    width = int(np.prod(features.shape[1:], dtype=np.int64))
    count, zeros, nonfinite, total, squares = 0, 0, 0, 0.0, 0.0
    smallest, largest = np.inf, -np.inf
    alive = np.zeros(features.shape[axis] if axis else width, bool)
    norms = []
    step = max(1, BLOCK_BYTES // (4 * max(1, width)))
    for start in range(0, len(rows), step):
        read = features[rows[start : start + step]]
        check_rows_present(store, layer, rows[start : start + step], read)
        values = read.astype(np.float32, copy=False)
        finite = np.isfinite(values)
        bad = values.size - int(finite.sum())
        nonfinite += bad
        wide = (values[finite] if bad else values).astype(np.float64).ravel()
        count += wide.size
        zeros += int((wide == 0).sum())
        total += float(wide.sum())
        squares += float(wide @ wide)
        if wide.size:
            smallest, largest = min(smallest, wide.min()), max(largest, wide.max())
        channel_values = np.moveaxis(values, axis, -1) if axis else values.reshape(len(values), -1)
        alive |= (channel_values != 0).reshape(-1, channel_values.shape[-1]).any(0)
        is_finite = finite.reshape(len(values), -1).all(1)
        flat = values.reshape(len(values), -1)[is_finite].astype(np.float64)
        norms.append(np.sqrt(np.einsum("nd,nd->n", flat, flat)))
    all_norms = np.concatenate(norms)
    mean = total / count if count else float("nan")
    variance = max(0.0, squares / count - mean**2) if count else float("nan")
    return LayerStatistics(
        name=layer,
        shape=tuple(features.shape[1:]),
        stored=_stored(store, layer),
        rows=len(rows),
        norms=_five(all_norms) if len(all_norms) else None,
        mean=mean,
        std=variance**0.5,
        smallest=float(smallest),
        largest=float(largest),
        zeros=zeros / count if count else float("nan"),
        channels=len(alive),
        dead=int((~alive).sum()),
        what=kind_of_channels,
        nonfinite=nonfinite,
    )


def _five(values: npt.NDArray[np.float64]) -> tuple[float, float, float, float, float]:
    """Return minimum, lower quartile, median, upper quartile and maximum."""
    low, lower, median, upper, high = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return low, lower, median, upper, high


def _channels(store: FeatureStore, layer: str) -> tuple[int, str]:
    """Return the channel axis of (n, ...) rows and 'channels', or 0 and 'numbers' if unknown."""
    shape = tuple(store[layer].shape[1:])
    crop = re.search(r"crop (\d+)x(\d+)", str(store.attrs.get("transform", "")))
    if len(shape) == 3 and crop is None:
        return 0, "numbers"
    size = (int(crop.group(1)), int(crop.group(2))) if crop else (1, 1)
    reduced = str(store[layer].attrs.get("reduce", ""))
    try:
        return channel_axis(reduced, RowLayout(layer, shape, size)), "channels"
    except ReduceError:
        return 0, "numbers"


def _stored(store: FeatureStore, layer: str) -> str:
    """Describe dtype, capture and reduction of a layer."""
    attrs = store[layer].attrs
    capture, reduced = str(attrs.get("capture", "")), str(attrs.get("reduce", ""))
    parts = [str(store[layer].dtype)]
    parts += [capture] if capture not in ("", "output") else []
    parts += [reduced] if reduced not in ("", "none") else []
    return ", ".join(parts)
