"""The rows of one part, in batches of any size -> their moments, summed in one order.

Floating-point sums depend on their order, so the order is fixed: a tree over the rows of the
listing. A span of rows is cut at the row in it that is divisible by the highest power of two, down
to leaves of LEAF_ROWS rows, or one part, if that is smaller. A leaf is summed at once, and two
halves are merged, the lower rows first. Neither the batches the rows came in, nor the order of the
parts, nor where a run was interrupted or merged early, changes a bit of the result (same device,
threads and libraries). moments_tree.py goes on with the tree above the parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from featx.analysis.statistics.moments import (
    Moments,
    check_size,
    float64_on,
    of_block,
    rows_that_fit,
)
from featx.base.devices import plain_tensors
from featx.errors import ConfigError, require
from featx.store import layout
from featx.types import LayerSpec, Part

LEAF_ROWS = 256
"""A leaf of the tree: this many rows of the listing, fewer where they are too large."""


@dataclass(frozen=True)
class StatsLayer:
    """One layer whose statistics are taken.

    Attributes:
        spec: what is captured; spec.shape is that of an image's tensor before flattening.
        kind: 'full' or 'diagonal'.
        positions: how many rows an image gives: None for one, its whole tensor flattened; P where
            each of P spatial positions or tokens is a row.

    Raises:
        ConfigError: the scatter matrix would be too large, or positions do not fit the shape.
    """

    spec: LayerSpec
    kind: str = "full"
    positions: int | None = None

    def __post_init__(self) -> None:
        if self.positions is not None and math.prod(self.spec.shape) % self.positions:
            raise ConfigError(
                f"{self.spec.name}: a tensor of shape {self.spec.shape} has no {self.positions} "
                "positions."
            )
        what = f"{self.spec.name} of shape {self.spec.shape}"
        check_size(self.dim, self.kind, what if self.positions is None else f"a position of {what}")

    @property
    def rows_per_image(self) -> int:
        """Rows that one image gives."""
        return self.positions or 1

    @property
    def dim(self) -> int:
        """D, features of a row."""
        return math.prod(self.spec.shape) // self.rows_per_image

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of an image's tensor, as it may come to `PartMoments.add`."""
        if self.positions is not None:
            return ((self.positions, self.dim),)
        return (tuple(self.spec.shape), (self.dim,))

    @property
    def attributes(self) -> dict[str, Any]:
        """What the file says of it."""
        return {
            **layout.layer_attributes(self.spec),
            "shape": list(self.spec.shape),
            "row": "image" if self.positions is None else "position",
            "rows_per_image": self.rows_per_image,
            "kind": self.kind,
        }


class PartMoments:
    """The moments of one layer over the rows of one part, which come in order, in any batches.

    What is held on the device: a leaf of at most BLOCK_BYTES, and one scatter matrix for each level
    of the tree below the part.
    """

    def __init__(self, part: Part, layer: StatsLayer) -> None:
        self.part = part
        self.layer = layer
        self._leaf_rows = min(LEAF_ROWS, rows_that_fit(layer.rows_per_image * layer.dim))
        self._next = part.start
        self._buffer = torch.empty(0)
        self._kept: list[int] = []
        self._nodes: list[tuple[int, int, Moments]] = []

    def add(self, start: int, rows: torch.Tensor, failed: Collection[int] = ()) -> None:
        """Add the images [start, start + b) of the listing. The rows are copied.

        Args:
            start: the first one; the one after the last of the batch before.
            rows: (b, *spec.shape) or (b, D), of any float dtype, on any device; (b, P, D) where
                each position is a row.
            failed: images among them, by row of the listing, that are left out.

        Raises:
            NonFiniteError: a value of a row that did not fail is NaN or infinite.
        """
        name, stop = self.layer.spec.name, start + len(rows)
        require(start == self._next, f"row {start} came where row {self._next} was due")
        require(stop <= self.part.stop, "a batch crosses its part")
        require(all(start <= row < stop for row in failed), "a failure outside its batch")
        require(rows.is_floating_point(), f"{name} is {rows.dtype}")
        # Another order of the axes could be reshaped as well, and would mix features up unseen.
        require(tuple(rows.shape[1:]) in self.layer.shapes, f"{name} has shape {tuple(rows.shape)}")
        failed = frozenset(failed)
        with plain_tensors():
            while self._next < stop:
                leaf_stop = (self._next // self._leaf_rows + 1) * self._leaf_rows
                leaf_stop = min(leaf_stop, self.part.stop)
                self._fill(rows[self._next - start : leaf_stop - start], failed)
                if self._next == leaf_stop:
                    self._close_leaf(leaf_stop)

    def finish(self) -> Moments:
        """The moments of the part. All its rows must have come."""
        require(self._next == self.part.stop, f"row {self._next} of the part never came")
        *lower, (_, _, total) = self._nodes
        for _, _, node in reversed(lower):
            total = node.merge(total)
        return total

    def _fill(self, rows: torch.Tensor, failed: frozenset[int]) -> None:
        """Copy images into the leaf's buffer; all of them lie in one leaf."""
        images = range(self._next, self._next + len(rows))
        kept = [image for image in images if image not in failed]
        if len(kept) < len(rows):
            rows = rows[torch.tensor([i - self._next for i in kept], dtype=torch.long)]
        each = self.layer.rows_per_image
        if not len(self._buffer):
            most = min(self._leaf_rows, len(self.part)) * each
            self._buffer = torch.empty((most, self.layer.dim), **float64_on(rows.device))
        place = len(self._kept) * each
        vectors = rows.reshape(-1, self.layer.dim).to(self._buffer.device)
        self._buffer[place : place + len(vectors)] = vectors
        self._kept += kept
        self._next = images.stop

    def _close_leaf(self, stop: int) -> None:
        """Sum the leaf up, and merge what is whole: two halves of an aligned power of two."""
        num_rows = len(self._kept) * self.layer.rows_per_image
        leaf = of_block(self._buffer[:num_rows], self.layer.kind, self._kept)
        start = self._nodes[-1][1] if self._nodes else self.part.start
        self._nodes.append((start, stop, leaf))
        self._kept = []
        while len(self._nodes) > 1:
            (start, cut, lower), (_, stop, upper) = self._nodes[-2:]
            if not is_aligned(start, stop) or cut_row(start, stop) != cut:
                break
            self._nodes[-2:] = [(start, stop, lower.merge(upper))]


def cut_row(start: int, stop: int) -> int:
    """Where the tree cuts rows [start, stop): the row divisible by the highest power of two."""
    bits = (start ^ (stop - 1)).bit_length() - 1
    return (stop - 1) >> bits << bits


def is_aligned(start: int, stop: int) -> bool:
    """Whether [start, stop) is a power of two of rows, at a multiple of it."""
    size = stop - start
    return size & (size - 1) == 0 and start % size == 0
