"""Norms of tokens and of the positions of maps, and the patch tokens whose norm is an outlier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.layer_vectors import float_blocks
from featx.store import FeatureStore
from featx.types import TokenGeometry

_CAPTURES = ("output", "input", "grad_output", "grad_input")
"""Captures whose rows may be tokens or maps."""

_REDUCTIONS = ("none", "map", "grid", "align")
"""Reductions that keep all tokens and positions in their places."""

FENCES = 3.0
"""Distance of an outlier from the quartiles, in interquartile ranges: Tukey's outer fence."""


@dataclass(frozen=True)
class TokenNorms:
    """L2 norms of the tokens of a layer over some images.

    Vision transformers use some patch tokens of uniform background as memory: their norm is about
    ten times that of the others, and they say little about their patch (T. Darcet, M. Oquab,
    J. Mairal, P. Bojanowski, Vision Transformers Need Registers, ICLR 2024). That paper draws the
    line by eye in the histogram of one model. Here a patch token is an outlier if its norm is above
    Q3 + 3 (Q3 - Q1), with the quartiles of all patch tokens of the images (J. W. Tukey, Exploratory
    Data Analysis, 1977).

    Attributes:
        num_images: number of images without NaN and infinite values.
        grid: (rows, columns) of the patch tokens.
        quantiles: minimum, lower quartile, median, upper quartile, 99 % quantile and maximum of the
            norms of patch tokens.
        prefix: the median norm of each prefix token, class token first.
        has_class_token: whether the first prefix token is a class token.
        threshold: norm above which a patch token is an outlier.
        share: share of the patch tokens that are outliers, in [0, 1].
        images: share of the images with at least one, in [0, 1].
        by_position: (rows, columns) share of the images in which the token there is one.
    """

    layer: str
    num_images: int
    grid: tuple[int, int]
    quantiles: tuple[float, float, float, float, float, float]
    prefix: tuple[float, ...]
    has_class_token: bool
    threshold: float
    share: float
    images: float
    by_position: npt.NDArray[np.float64]

    @property
    def most_frequent(self) -> tuple[int, int]:
        """(row, column) of the patch that is an outlier most often, counted from 1."""
        row, column = np.unravel_index(int(self.by_position.argmax()), self.grid)
        return int(row) + 1, int(column) + 1


def token_norms(store: FeatureStore, layer: str, rows: npt.NDArray[np.int64]) -> TokenNorms | None:
    """Compute the norms of the tokens of a layer over (n,) int64 increasing rows that did not fail.
    Return None if the layer does not hold all its tokens or positions, as after reduce=avg or in a
    store that does not record where they lie, or if no row is finite.
    """
    places = store[layer].tokens
    if places is None:
        return None
    axis = feature_axis(tuple(store[layer].shape[1:]), places)
    if axis is None:
        return None
    blocks = [
        np.sqrt(np.square(values, dtype=np.float64).sum(axis=axis)).reshape(len(values), -1)
        for values in float_blocks(store, layer, rows)
    ]
    norms = np.concatenate(blocks) if blocks else np.zeros((0, 0))
    norms = norms[np.isfinite(norms).all(1)]
    if not len(norms):
        return None
    prefix = places.prefix_tokens if axis == 2 else 0
    patches = norms[:, prefix:]
    quantiles = np.quantile(patches, [0, 0.25, 0.5, 0.75, 0.99, 1]).tolist()
    threshold = quantiles[3] + FENCES * (quantiles[3] - quantiles[1])
    is_outlier = patches > threshold
    return TokenNorms(
        layer,
        len(norms),
        places.grid,
        (quantiles[0], quantiles[1], quantiles[2], quantiles[3], quantiles[4], quantiles[5]),
        tuple(np.median(norms[:, :prefix], axis=0).tolist()),
        places.has_class_token and prefix > 0,
        threshold,
        float(is_outlier.mean()),
        float(is_outlier.any(1).mean()),
        is_outlier.mean(0).reshape(places.grid),
    )


def explain_missing_norms(shape: Sequence[int], attributes: Mapping[str, object]) -> str | None:
    """Explain why a layer without the places of its tokens has no norms of tokens, by the shape of
    a row and the attributes with capture and reduce. Return a clause that follows 'no norms of
    tokens, as', or None if norms are not to be expected: of vectors, of attention weights, and
    after a reduction that does not keep all tokens.
    """
    kept = attributes.get("reduce") in _REDUCTIONS and attributes.get("capture") in _CAPTURES
    if not kept or len(shape) < 2:
        return None
    if len(shape) == 2:
        return (
            f"it is unknown which of its {shape[0]} tokens are patches; num_prefix_tokens of the "
            "model's module says how many at the front are not (docs/layers.md)"
        )
    return (
        f"its rows of shape {'x'.join(map(str, shape))} are not known to be a map of the input's "
        "proportions (docs/statistics.md)"
    )


def feature_axis(shape: tuple[int, ...], places: TokenGeometry) -> int | None:
    """Return the axis of (n, *shape) with the features, or None unless the shape has all tokens."""
    height, width = places.grid
    if len(shape) == 2 and shape[0] == places.prefix_tokens + height * width:
        return 2
    is_first = places.channels_first(shape)
    return None if is_first is None else 1 if is_first else 3
