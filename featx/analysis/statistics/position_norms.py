"""Norms of the tokens of a layer over a data set: sums and a histogram that parts merge exactly."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.part_moments import PartMoments, StatsLayer
from featx.analysis.statistics.tokens import FENCES, feature_axis
from featx.base import float64_home, plain_tensors
from featx.types import Part, TokenGeometry

BINS_PER_OCTAVE = 64
"""Bins between a norm and twice as much; each is 1.1 % wide."""

EDGES: npt.NDArray[np.float64] = np.exp2(
    np.arange(-20 * BINS_PER_OCTAVE, 28 * BINS_PER_OCTAVE + 1) / BINS_PER_OCTAVE
)
"""Edges of the bins, from 2^-20 to 2^28. One bin more lies below them, and one above."""

NUM_BINS = len(EDGES) + 1

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PositionNorms:
    """L2 norms of the tokens of a layer, or of the positions of a map.

    Attributes:
        positions: moments of the norm at each of T positions over the images (diagonal), prefix
            tokens first, then the patches in row-major order.
        histogram: (NUM_BINS,) int64 number of patch tokens in each bin of EDGES, a norm on an edge
            in the bin above it.
        tokens: places of the tokens.
    """

    positions: Moments
    histogram: Counts
    tokens: TokenGeometry

    def merge(self, other: PositionNorms) -> PositionNorms:
        """Return the norms of the images of both."""
        positions = self.positions.merge(other.positions)
        return PositionNorms(positions, self.histogram + other.histogram, self.tokens)

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bin that the quantile of the patch tokens lies in.

        It is above the quantile by 1.1 % at most, for norms between 2^-20 and 2^28.

        Args:
            share: between 0 and 1.
        """
        reached = self.histogram.cumsum() >= share * self.histogram.sum()
        return float(EDGES[min(int(reached.argmax()), len(EDGES) - 1)])

    @property
    def threshold(self) -> float:
        """Norm from which a patch token is an outlier.

        The first edge of a bin that is not below Q3 + 3 (Q3 - Q1), Tukey's outer fence as in
        `TokenNorms`, with the quartiles of `quantile`.
        """
        low, high = self.quantile(0.25), self.quantile(0.75)
        fence = high + FENCES * (high - low)
        return float(EDGES[min(int(np.searchsorted(EDGES, fence)), len(EDGES) - 1)])

    @property
    def outliers(self) -> int:
        """Number of patch tokens whose norm is `threshold` or more."""
        return int(self.histogram[int(np.searchsorted(EDGES, self.threshold)) + 1 :].sum())


class PartNorms:
    """Norms of the tokens of one layer over the rows of one part, which arrive in order.

    Args:
        part: the part.
        layer: a layer with `tokens`.
    """

    def __init__(self, part: Part, layer: StatsLayer) -> None:
        assert layer.tokens is not None
        self._tokens = layer.tokens
        axis = feature_axis(tuple(layer.spec.shape), layer.tokens)
        assert axis is not None, "a layer with tokens has an axis of its features"
        self._axis = axis
        rows, columns = layer.tokens.grid
        spec = replace(layer.spec, shape=(layer.tokens.prefix_tokens + rows * columns,))
        self._moments = PartMoments(part, StatsLayer(spec, "diagonal"))
        self._histogram: Counts = np.zeros(NUM_BINS, np.int64)

    def add(self, start: int, values: torch.Tensor, count: int, failed: Collection[int]) -> None:
        """Add the images [start, start + count) of the listing.

        Args:
            start: row of the first image, which follows the last one of the batch before.
            values: (B, *shape) values of a batch. All B rows are computed, as sums on a GPU may
                depend on the shape, which is constant in a run.
            count: number of rows that are not padding.
            failed: rows of the listing among them to leave out.
        """
        with plain_tensors():
            squares = values.to(float64_home(values.device)).double().square()
            norms = squares.sum(self._axis).sqrt().flatten(1)[:count]
            self._moments.add(start, norms, failed)
        kept = [row for row in range(count) if start + row not in failed]
        patches = norms.cpu().numpy()[kept, self._tokens.prefix_tokens :]
        bins = np.searchsorted(EDGES, patches.ravel(), side="right")
        self._histogram += np.bincount(bins, minlength=NUM_BINS)

    def finish(self) -> PositionNorms:
        """Return the norms of the part, all rows of which must have been added."""
        return PositionNorms(self._moments.finish(), self._histogram, self._tokens)


def norms_summary(norms: PositionNorms) -> dict[str, Any] | None:
    """Summarise the norms as JSON types; None without an image.

    Returns:
        grid; median and p99 of the patch tokens, upper edges of their bins; largest, exact;
        threshold, outliers and share of the patch tokens that are outliers; prefix, for each prefix
        token its mean, std and largest norm; largest_mean, the patch with the largest mean norm,
        with row and column counted from 1; and class_token.
    """
    moments, tokens = norms.positions, norms.tokens
    if not moments.count:
        return None
    std = (moments.scatter / moments.count).sqrt()
    patch = int(moments.mean[tokens.prefix_tokens :].argmax())
    row, column = divmod(patch, tokens.grid[1])
    return {
        "grid": list(tokens.grid),
        "class_token": tokens.has_class_token,
        "median": norms.quantile(0.5),
        "p99": norms.quantile(0.99),
        "largest": float(moments.largest[tokens.prefix_tokens :].max()),
        "threshold": norms.threshold,
        "outliers": norms.outliers,
        "share": norms.outliers / int(norms.histogram.sum()),
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
