"""Moments of one part from batches of any size, summed in a fixed order.

Floating-point sums depend on their order, so the order is fixed by a tree over the rows of the
listing. A span of rows is cut at the row within it that is divisible by the highest power of two,
down to leaves of LEAF_ROWS rows, or of a part if that is smaller. A leaf is summed as a whole, and
two halves are merged, the lower rows first. The result is the same bit for bit whatever the
batches, the order of the parts, or the points at which a run was interrupted or merged (for the
same device, number of threads and libraries). session.py continues the tree above the parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from featx.analysis.statistics.moments import (
    EDGES,
    NUM_BINS,
    Counts,
    Moments,
    PositionNorms,
    check_size,
    float64_on,
    moments_of_block,
    rows_that_fit,
)
from featx.analysis.statistics.tokens import feature_axis
from featx.base import float64_device, plain_tensors
from featx.config import StatsConfig
from featx.errors import ReduceError, require
from featx.layers import RowLayout, channel_axis, is_heat_map, mean, positions_last
from featx.store import layout
from featx.types import LayerSpec, Part, TokenGeometry

LEAF_ROWS = 256
"""Rows of the listing per leaf of the tree; fewer if rows are large."""


@dataclass(frozen=True)
class StatsLayer:
    """One layer whose statistics are computed.

    Attributes:
        spec: description of the values of one image that are summed.
        kind: 'full' or 'diagonal'.
        positions: None if the flattened values of an image are one observation; P if each of its P
            spatial positions or tokens is one.
        tokens: places of the tokens or positions whose norms are taken as well, or None.
        captured: shape of the captured tensor of one image.
        averaged: axes of (B, *captured) whose mean is summed; () for the tensor itself.
        axis: axis of (B, *captured) with the features, if each position is an observation.
    """

    spec: LayerSpec
    kind: str = "full"
    positions: int | None = None
    tokens: TokenGeometry | None = None
    captured: tuple[int, ...] = ()
    averaged: tuple[int, ...] = ()
    axis: int | None = None

    @classmethod
    def of(
        cls,
        spec: LayerSpec,
        options: StatsConfig,
        input_size: tuple[int, int],
        tokens: TokenGeometry | None,
    ) -> StatsLayer:
        """Describe the statistics of a captured tensor.

        With stats.observation=image, maps and tokens are averaged over their positions, as by
        reduce=avg, unless `reduce` says otherwise. Heat maps of job=attribute, which have no
        channels, are taken as a whole. `input_size` is (height, width) in pixels.
        """
        shape = captured = tuple(spec.shape)
        if tokens is not None and feature_axis(shape, tokens) is None:
            tokens = None
        is_map = tokens is not None and tokens.channels_first(shape) is True
        rows = RowLayout(spec.name, shape, input_size, is_map=is_map)
        positions, axis = None, None
        averaged: tuple[int, ...] = ()
        has_channels = not is_heat_map(shape, spec.capture)
        if options.observation == "position" and len(shape) > 1:
            if not has_channels:
                raise ReduceError(
                    f"stats.observation=position does not fit {spec.name}: a heat map has one "
                    "number at each position. Use stats.observation=image."
                )
            axis = channel_axis(spec.reduce, rows)
            positions = math.prod(shape) // shape[axis - 1]
        elif spec.reduce == "none" and len(shape) in (2, 3) and has_channels:
            # A tensor whose channels are unknown, or attention weights, are taken as a whole.
            with contextlib.suppress(ReduceError):
                channels = channel_axis("none", rows)
                averaged = tuple(i for i in range(1, len(shape) + 1) if i != channels)
                spec = replace(spec, reduce="avg", shape=(shape[channels - 1],))
        return cls(spec, options.covariance, positions, tokens, captured, averaged, axis)

    def observed(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is summed of captured tensors (B, *captured)."""
        if self.averaged:
            # The order of a sum depends on the layout in memory, which engines choose themselves.
            return mean(x.contiguous(), self.averaged)
        return x if self.axis is None else positions_last(x, self.axis)

    def __post_init__(self) -> None:
        subject = f"{self.spec.name} of shape {self.spec.shape}"
        check_size(
            self.dim, self.kind, subject if self.positions is None else f"a position of {subject}"
        )

    @property
    def rows_per_image(self) -> int:
        """Number of observations per image."""
        return self.positions or 1

    @property
    def dim(self) -> int:
        """D, the number of features of an observation."""
        return math.prod(self.spec.shape) // self.rows_per_image

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of an image's tensor that `PartMoments.add` accepts."""
        if self.positions is not None:
            return ((self.positions, self.dim),)
        return (tuple(self.spec.shape), (self.dim,))

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the layer in the file."""
        return {
            **layout.layer_attributes(self.spec),
            "shape": list(self.spec.shape),
            "row": "image" if self.positions is None else "position",
            "rows_per_image": self.rows_per_image,
            "kind": self.kind,
            **({"averaged_from": list(self.captured)} if self.averaged else {}),
        }


class PartMoments:
    """Moments of one layer over the rows of one part, which arrive in order in batches of any size,
    with the norms of its tokens if it has some.

    On the device it holds one leaf of at most a block, and one scatter matrix for each level of
    the tree below the part. `part_rows` are the rows per part of a run whose tree is followed, if
    `part` is longer.
    """

    def __init__(self, part: Part, layer: StatsLayer, part_rows: int | None = None) -> None:
        self.part = part
        self.layer = layer
        self._leaf_rows = min(
            LEAF_ROWS, part_rows or LEAF_ROWS, rows_that_fit(layer.rows_per_image * layer.dim)
        )
        self._next = part.start
        self._buffer = torch.empty(0)
        self._images: list[int] = []
        self._nodes: list[tuple[int, int, Moments]] = []
        self._norms = None if layer.tokens is None else PartNorms(part, layer, part_rows)

    def add(
        self,
        start: int,
        values: torch.Tensor,
        failed: Collection[int] = (),
        count: int | None = None,
    ) -> None:
        """Add the images [start, start + count) of the listing, which padding may follow. The
        values are copied.
        """
        rows = self.layer.observed(values[:count])
        name, stop = self.layer.spec.name, start + len(rows)
        require(start == self._next, f"row {start} came where row {self._next} was due")
        require(stop <= self.part.stop, "a batch crosses its part")
        require(all(start <= row < stop for row in failed), "a failure outside its batch")
        require(rows.is_floating_point(), f"{name} is {rows.dtype}")
        # A tensor with other axes could be reshaped as well, and would mix up features unnoticed.
        require(tuple(rows.shape[1:]) in self.layer.shapes, f"{name} has shape {tuple(rows.shape)}")
        failed = frozenset(failed)
        with plain_tensors():
            while self._next < stop:
                leaf_stop = (self._next // self._leaf_rows + 1) * self._leaf_rows
                leaf_stop = min(leaf_stop, self.part.stop)
                self._fill(rows[self._next - start : leaf_stop - start], failed)
                if self._next == leaf_stop:
                    self._close_leaf(leaf_stop)
        if self._norms is not None:
            self._norms.add(start, values, len(rows), failed)

    def finish(self) -> Moments:
        """Return the moments of the part, all rows of which must have been added."""
        require(self._next == self.part.stop, f"row {self._next} of the part never came")
        *lower, (_, _, total) = self._nodes
        for _, _, node in reversed(lower):
            total = node.merge(total)
        return total if self._norms is None else replace(total, norms=self._norms.finish())

    def _fill(self, rows: torch.Tensor, failed: frozenset[int]) -> None:
        """Copy images into the buffer of the current leaf, in which all of them lie."""
        images = range(self._next, self._next + len(rows))
        ok_images = [image for image in images if image not in failed]
        if len(ok_images) < len(rows):
            rows = rows[torch.tensor([i - self._next for i in ok_images], dtype=torch.long)]
        rows_per_image = self.layer.rows_per_image
        if not len(self._buffer):
            most = min(self._leaf_rows, len(self.part)) * rows_per_image
            self._buffer = torch.empty((most, self.layer.dim), **float64_on(rows.device))
        place = len(self._images) * rows_per_image
        vectors = rows.reshape(-1, self.layer.dim).to(self._buffer.device)
        self._buffer[place : place + len(vectors)] = vectors
        self._images += ok_images
        self._next = images.stop

    def _close_leaf(self, stop: int) -> None:
        """Sum the leaf, and merge nodes that are the two halves of an aligned power of two."""
        num_rows = len(self._images) * self.layer.rows_per_image
        leaf = moments_of_block(self._buffer[:num_rows], self.layer.kind, self._images)
        start = self._nodes[-1][1] if self._nodes else self.part.start
        self._nodes.append((start, stop, leaf))
        self._images = []
        while len(self._nodes) > 1:
            (start, cut, lower), (_, stop, upper) = self._nodes[-2:]
            if not is_aligned(start, stop) or cut_row(start, stop) != cut:
                break
            self._nodes[-2:] = [(start, stop, lower.merge(upper))]


def cut_row(start: int, stop: int) -> int:
    """Return the row at which the tree cuts [start, stop).

    It is the row in the span that is divisible by the highest power of two.
    """
    bits = (start ^ (stop - 1)).bit_length() - 1
    return (stop - 1) >> bits << bits


def is_aligned(start: int, stop: int) -> bool:
    """Return whether [start, stop) has a power of two of rows and starts at a multiple of it."""
    size = stop - start
    return size & (size - 1) == 0 and start % size == 0


class PartNorms:
    """Norms of the tokens of one layer, which has `tokens`, over the rows of one part, which arrive
    in order.
    """

    def __init__(self, part: Part, layer: StatsLayer, part_rows: int | None = None) -> None:
        assert layer.tokens is not None
        self._tokens = layer.tokens
        axis = feature_axis(layer.captured or tuple(layer.spec.shape), layer.tokens)
        assert axis is not None, "a layer with tokens has an axis of its features"
        self._axis = axis
        rows, columns = layer.tokens.grid
        spec = replace(layer.spec, shape=(layer.tokens.prefix_tokens + rows * columns,))
        self._moments = PartMoments(part, StatsLayer(spec, "diagonal"), part_rows)
        self._histogram: Counts = np.zeros(NUM_BINS, np.int64)

    def add(self, start: int, values: torch.Tensor, count: int, failed: Collection[int]) -> None:
        """Add the images [start, start + count) of the listing."""
        with plain_tensors():
            squares = values.to(float64_device(values.device)).double().square()
            norms = squares.sum(self._axis).sqrt().flatten(1)[:count]
            self._moments.add(start, norms, failed)
        ok_images = [row for row in range(count) if start + row not in failed]
        patches = norms.cpu().numpy()[ok_images, self._tokens.prefix_tokens :]
        bins = np.searchsorted(EDGES, patches.ravel(), side="right")
        self._histogram += np.bincount(bins, minlength=NUM_BINS)

    def finish(self) -> PositionNorms:
        """Return the norms of the part, all rows of which must have been added."""
        return PositionNorms(self._moments.finish(), self._histogram, self._tokens)


def norms_summary(norms: PositionNorms) -> dict[str, object] | None:
    """Summarise the norms as JSON types; None without an image. Return grid; median and p99 of the
    patch tokens, upper edges of their bins or the largest, if that is less; largest, exact;
    threshold, outliers and share of the patch tokens that are outliers; prefix, for each prefix
    token its mean, std and largest norm; largest_mean, the patch with the largest mean norm, with
    row and column counted from 1; and class_token. What lies beyond the edges of the histogram, as
    of small gradients, is None.
    """

    def within(norm: float) -> float | None:
        return norm if EDGES[0] < norm < EDGES[-1] else None

    moments, tokens = norms.positions, norms.tokens
    if not moments.count:
        return None
    std = (moments.scatter / moments.count).sqrt()
    patch = int(moments.mean[tokens.prefix_tokens :].argmax())
    row, column = divmod(patch, tokens.grid[1])
    largest = float(moments.largest[tokens.prefix_tokens :].max())
    threshold = within(norms.threshold)
    outliers = None if threshold is None else norms.outliers
    return {
        "grid": list(tokens.grid),
        "class_token": tokens.has_class_token,
        "median": within(min(norms.quantile(0.5), largest)),
        "p99": within(min(norms.quantile(0.99), largest)),
        "largest": largest,
        "threshold": threshold,
        "outliers": outliers,
        "share": None if outliers is None else outliers / int(norms.histogram.sum()),
        "prefix": [
            {
                "mean": float(moments.mean[i]),
                "std": float(std[i]),
                "largest": float(moments.largest[i]),
            }
            for i in range(tokens.prefix_tokens)
        ],
        "largest_mean": {
            "row": row + 1,
            "column": column + 1,
            "mean": float(moments.mean[tokens.prefix_tokens + patch]),
        },
    }
