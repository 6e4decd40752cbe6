"""A linear projection of a layer (pca, whiten) as a reduction."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from featx.base.devices import plain_tensors
from featx.config import ReduceConfig
from featx.errors import ReduceError
from featx.layers.reductions import Reduction, channel_axis, reduction
from featx.layers.trace import CapturePoint


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of features about their mean: y = components (x - mean).

    Attributes:
        mean: (D,) float64.
        components: (k, D) float64.
        explained_variance: of the principal directions behind it, largest first, float64.
    """

    mean: torch.Tensor
    components: torch.Tensor
    explained_variance: torch.Tensor
    _ready: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) on any device -> (..., k) float32 there; float64 for float64.

        Under autocast as without it.

        Raises:
            ReduceError: x has another number of features.
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
        if (device, dtype) not in self._ready:
            with plain_tensors():
                # A mean of 1e6 in float32 is off by up to 0.03; what its rounding left follows.
                high = self.mean.to(dtype)
                low = (self.mean - high.double()).to(dtype)
                parts = (high, low, self.components.T.to(dtype).contiguous())
                self._ready[device, dtype] = tuple(part.to(device) for part in parts)
        return self._ready[device, dtype]


@dataclass(frozen=True, eq=False)
class ProjectedReduce:
    """A projection by a layer's statistics, after the reduction that they were taken behind.

    Attributes:
        name: pca or whiten.
        args: what the store says of it: first, rows, k, ..., stats_sha256.
        first: the reduction that comes first.
        shape: of a row after `first`.
        by_position: whether each position is projected by itself.
        projection: the linear map.
    """

    name: str
    args: dict[str, float | str]
    first: ReduceConfig
    shape: tuple[int, ...]
    by_position: bool
    projection: Projection

    def bind(
        self,
        layer: str,
        row_shape: tuple[int, ...],
        input_size: tuple[int, int],
        num_prefix_tokens: int,
        has_class_token: bool = True,
    ) -> Reduction:
        """(B, *row_shape) -> (B, k), or the layout of `shape` with k features at each position.

        Raises:
            ReduceError: the statistics are of rows of another shape.
        """
        before = reduction(
            self.first, layer, row_shape, input_size, num_prefix_tokens, has_class_token
        )
        found = tuple(before(torch.zeros(1, *row_shape)).shape[1:])
        if found != self.shape:
            raise ReduceError(
                f"reduce={self.name} does not fit {layer}: its statistics are of rows of shape "
                f"{self.shape}, the layer gives {found} after reduce={self.first.name}."
            )
        if not self.by_position:
            return lambda x: self.projection.apply(before(x).reshape(len(x), -1))
        axis = channel_axis(self.first.name, layer, found, input_size)

        def project(x: torch.Tensor) -> torch.Tensor:
            return self.projection.apply(before(x).movedim(axis, -1)).movedim(-1, axis)

        return project


StoredReduce = ReduceConfig | ProjectedReduce

ChosenLayers = list[tuple[CapturePoint, StoredReduce]]
"""What is captured of the model, and the reduction that makes a stored row of it."""
"""What is stored of a layer, statistics read where they are needed."""


def bound_reduction(
    reduce: StoredReduce,
    layer: str,
    row_shape: tuple[int, ...],
    input_size: tuple[int, int],
    num_prefix_tokens: int,
    has_class_token: bool = True,
) -> Reduction:
    """`reduction`, also for what projects."""
    if isinstance(reduce, ProjectedReduce):
        return reduce.bind(layer, row_shape, input_size, num_prefix_tokens, has_class_token)
    return reduction(reduce, layer, row_shape, input_size, num_prefix_tokens, has_class_token)


def reads_positions(reduce: StoredReduce) -> bool:
    """Whether a reduction relies on where the positions of a layer lie in the image."""
    first = reduce.first if isinstance(reduce, ProjectedReduce) else reduce
    return first.name == "grid"
