"""Group of a statistics file with the norms of the tokens of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import torch

from featx.analysis.statistics.moments import NUM_BINS, Moments, PositionNorms
from featx.store import geometry_of, geometry_values

NORMS = "norms"
"""Name of the group below that of the layer."""

_MOMENTS = ("mean", "scatter", "smallest", "largest")
_HISTOGRAM = "histogram"

NORM_ARRAYS = (*_MOMENTS, _HISTOGRAM)
"""Datasets of the group."""


def write_norms(group: h5py.Group, norms: PositionNorms) -> None:
    """Write norms and the places of the tokens into an empty group."""
    for key in _MOMENTS:
        group.create_dataset(key, data=getattr(norms.positions, key).cpu().numpy())
    group.create_dataset(_HISTOGRAM, data=norms.histogram)
    group.attrs.update(geometry_values(norms.tokens))


def read_norms(
    datasets: Mapping[str, h5py.Dataset], attributes: Mapping[str, Any], count: int
) -> PositionNorms:
    """Read the norms of a group."""
    tokens = geometry_of(attributes)
    if tokens is None:
        raise ValueError("the places of the tokens are missing")
    size = tokens.prefix_tokens + math.prod(tokens.grid)
    for key in _MOMENTS:
        if datasets[key].shape != (size,) or datasets[key].dtype != np.float64:
            raise ValueError(f"{key} does not have {size} float64 numbers")
    if datasets[_HISTOGRAM].shape != (NUM_BINS,) or datasets[_HISTOGRAM].dtype != np.int64:
        raise ValueError(f"the histogram does not have {NUM_BINS} int64 numbers")
    arrays = [torch.from_numpy(datasets[key][()]) for key in _MOMENTS]
    if count and not all(array.isfinite().all() for array in arrays):
        raise ValueError("a number is not finite")
    histogram = datasets[_HISTOGRAM][()]
    if int(histogram.sum()) != count * math.prod(tokens.grid):
        raise ValueError(f"the histogram is not that of {count} images")
    mean, scatter, smallest, largest = arrays
    return PositionNorms(Moments(count, mean, scatter, smallest, largest), histogram, tokens)


def are_equal_norms(a: PositionNorms | None, b: PositionNorms | None) -> bool:
    """Return whether two norms hold the same numbers, or both are None."""
    if a is None or b is None:
        return a is b
    same = (
        torch.equal(getattr(a.positions, key).cpu(), getattr(b.positions, key).cpu())
        for key in _MOMENTS
    )
    return all(same) and np.array_equal(a.histogram, b.histogram) and a.tokens == b.tokens
