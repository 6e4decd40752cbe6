"""Norms of the tokens of a layer: of the rows of a part, and their summary over a data set."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from featx.analysis.statistics.moments import EDGES, NUM_BINS, Counts, PositionNorms
from featx.analysis.statistics.part_moments import PartMoments, StatsLayer
from featx.analysis.statistics.tokens import feature_axis
from featx.base import float64_device, plain_tensors
from featx.types import Part


class PartNorms:
    """Norms of the tokens of one layer over the rows of one part, which arrive in order.

    Args:
        part: the part.
        layer: a layer with `tokens`.
    """

    def __init__(self, part: Part, layer: StatsLayer) -> None:
        assert layer.tokens is not None
        self._tokens = layer.tokens
        axis = feature_axis(layer.captured or tuple(layer.spec.shape), layer.tokens)
        assert axis is not None, "a layer with tokens has an axis of its features"
        self._axis = axis
        rows, columns = layer.tokens.grid
        spec = replace(layer.spec, shape=(layer.tokens.prefix_tokens + rows * columns,))
        self._moments = PartMoments(part, StatsLayer(spec, "diagonal"))
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
