"""Projections (pca, whiten) of a layer by its statistics, as reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from featx.base import plain_tensors
from featx.config import ReduceConfig
from featx.errors import ReduceError
from featx.layers.layer_names import CapturePoint
from featx.layers.reductions import REDUCTIONS, TokenSample, channel_axis, reduction
from featx.layers.row_layout import Reduction, RowLayout, reduced_shape


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of centred features: y = components (x - mean).

    Attributes:
        mean: (D,) float64.
        components: (k, D) float64.
        explained_variance: float64 variances of the principal components, largest first.
    """

    mean: torch.Tensor
    components: torch.Tensor
    explained_variance: torch.Tensor
    _ready: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Project features (..., D) on any device to (..., k) on the same device.

        The result is float64 for float64 and otherwise float32, also under autocast. Raises
        ReduceError for another number of features.
        """
        if x.shape[-1] != len(self.mean):
            raise ReduceError(
                f"a projection of {len(self.mean)} features does not fit a tensor of shape "
                f"{tuple(x.shape)}; its statistics belong to another layer or reduction."
            )
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        high, low, matrix = self._on(x.device, dtype)
        with torch.autocast(x.device.type, enabled=False):
            return (x.to(dtype) - high - low) @ matrix

    def _on(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Mean as high and low part, and the transposed components, on a device."""
        if (device, dtype) not in self._ready:
            with plain_tensors():
                # In float32, a mean of 1e6 is rounded by up to 0.03; `low` holds the rest.
                high = self.mean.to(dtype)
                low = (self.mean - high.double()).to(dtype)
                parts = (high, low, self.components.T.to(dtype).contiguous())
                self._ready[device, dtype] = tuple(part.to(device) for part in parts)
        return self._ready[device, dtype]


@dataclass(frozen=True, eq=False)
class ProjectedReduce:
    """A projection by the statistics of a layer, applied after another reduction.

    Attributes:
        name: 'pca' or 'whiten'.
        args: parameters as recorded in the store: first, rows, k, ..., stats_sha256.
        first: reduction that the statistics were taken after.
        shape: shape of a row after `first`.
        by_position: whether each position is projected separately.
        projection: the linear map.
    """

    name: str
    args: dict[str, float | str]
    first: ReduceConfig
    shape: tuple[int, ...]
    by_position: bool
    projection: Projection

    def bind(self, rows: RowLayout) -> Reduction:
        """Return the function from (B, *rows.shape) to the projected rows.

        They are (B, k), or (B, *shape) with k features at each position. Raises ReduceError if the
        statistics belong to rows of another shape.
        """
        first_reduction = reduction(self.first, rows)
        if isinstance(first_reduction, TokenSample):
            raise ReduceError(
                f"reduce={self.name} does not fit {rows.layer}: its statistics are of rows after "
                f"reduce={self.first.name}, which depend on the key of the image. Take statistics "
                "of positions after reduce=none."
            )
        shape = reduced_shape(first_reduction, rows.shape)
        if shape != self.shape:
            raise ReduceError(
                f"reduce={self.name} does not fit {rows.layer}: its statistics are of rows of "
                f"shape {self.shape}, the layer gives {shape} after reduce={self.first.name}."
            )
        if not self.by_position:
            return lambda x: self.projection.apply(first_reduction(x).reshape(len(x), -1))
        axis = channel_axis(self.first.name, replace(rows, shape=shape))

        def project(x: torch.Tensor) -> torch.Tensor:
            return self.projection.apply(first_reduction(x).movedim(axis, -1)).movedim(-1, axis)

        return project


StoredReduce = ReduceConfig | ProjectedReduce
"""Reduction of a layer, with its statistics if it needs any."""

ChosenLayers = Sequence[tuple[CapturePoint, StoredReduce]]
"""Capture points, each with the reduction that makes its stored rows."""


def bound_reduction(reduce: StoredReduce, rows: RowLayout) -> Reduction:
    """Return the function of a reduction, or projection, for rows of one layout.

    Raises ReduceError if it does not fit this layout.
    """
    if isinstance(reduce, ProjectedReduce):
        return reduce.bind(rows)
    return reduction(reduce, rows)


def reads_positions(reduce: StoredReduce) -> bool:
    """Return whether a reduction depends on where positions of a layer lie in the image."""
    first = reduce.first if isinstance(reduce, ProjectedReduce) else reduce
    return REDUCTIONS.get(first.name).reads_positions
