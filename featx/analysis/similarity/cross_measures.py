"""CKA, SVCCA and Procrustes distance of two layers from the products of their features.

With the centred vectors X (n, D) of a layer, one row per image, and Y (n, E) of another:

    CKA         |X^T Y|_F^2 / (|X^T X|_F |Y^T Y|_F)  (Kornblith et al. 2019)
    debiased    h(X, Y) / sqrt(h(X, X) h(Y, Y)) with the unbiased HSIC of Song et al. 2012, equation
                5, times n (n - 3). With k_i = |x_i|^2 and l_i = |y_i|^2, for centred vectors
                h = |X^T Y|_F^2 - k.l + sum(k) sum(l) / ((n - 1) (n - 2)) - 2 k.l / (n - 2)
    SVCCA       mean canonical correlation of the first principal directions of X and of Y that have
                99% of the variance, over as many correlations as the smaller number of directions
                (Raghu et al. 2017; the threshold of Kornblith et al. 2019)
    Procrustes  min_Q |X / |X|_F - Y Q / |Y|_F|_F^2 = 2 - 2 |X^T Y|_* / (|X|_F |Y|_F) over
                orthogonal Q, a squared distance from 0 to 2, with |.|_* the sum of the singular
                values (Ding, Denain and Steinhardt 2021)

None of these needs a matrix of n x n values, so that any number of images can be compared. All are
unchanged by a rotation, so that a layer with D > n is replaced by the coordinates of its rows in n
dimensions. Computation is in float64.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from featx.analysis.similarity.gram_measures import SAME, Rows, gram_products
from featx.base import rows_of_block

MAX_WIDTH = 8192
"""Largest number of values of a layer in products of features, which take 512 MiB then."""

VARIANCE = 0.99
"""Share of the variance in the principal directions of SVCCA."""

_ROUNDING = 1e-13
"""Debiased HSIC of a layer with itself, relative to its CKA's, that counts as a rounding error."""


@dataclass(frozen=True)
class CentredRows(Rows):
    """Rows in float64 minus their mean, whose squared length is `mean_square`."""

    mean_square: float


@dataclass(frozen=True)
class LayerProducts:
    """Products of a layer with itself.

    Attributes:
        squares: (n,) squared length of each centred row, k.
        norm: |X^T X|_F, NaN if all rows are the same.
        basis: (D, r) map to coordinates of variance 1 along the principal directions of SVCCA, or
            None if SVCCA is not computed.
    """

    squares: torch.Tensor
    norm: float
    basis: torch.Tensor | None


def centred_rows(rows: Rows) -> CentredRows:
    """Return rows minus their mean, or their coordinates if a row has more values than there are
    rows.
    """
    if rows.width > rows.count:
        products = gram_products(rows)
        # U S of the eigenvalues U S^2 U^T are rows of n values with these products.
        values, vectors = torch.linalg.eigh(products.gram)
        coordinates: torch.Tensor = vectors * values.clamp_min(0).sqrt()
        return CentredRows(
            rows.count,
            width=rows.count,
            step=rows.step,
            read=lambda start, stop: coordinates[start:stop],
            mean_square=products.mean_square,
        )
    mean = torch.zeros((), dtype=torch.float64)
    for start in range(0, rows.count, rows.step):
        block = rows.read(start, min(rows.count, start + rows.step))
        mean = mean.to(block.device) + block.double().sum(dim=0) / rows.count

    def read(start: int, stop: int) -> torch.Tensor:
        return rows.read(start, stop).double() - mean

    return CentredRows(rows.count, rows.width, rows.step, read, float(mean @ mean))


def layer_products(rows: CentredRows, measures: Collection[str]) -> LayerProducts:
    """Compute the products of a layer with itself that some measures need."""
    product, squares = cross_product(rows, rows), []
    for start, stop in _spans(rows):
        squares.append(rows.read(start, stop).square().sum(dim=1))
    norm = float(product.norm())
    if not norm > SAME * (norm + rows.count * rows.mean_square):
        return LayerProducts(torch.cat(squares), float("nan"), None)
    basis = None
    if "svcca" in measures:
        values, vectors = (tensor.flip(-1) for tensor in torch.linalg.eigh(product))
        shares = values.clamp_min(0).cumsum(0) / values.clamp_min(0).sum()
        count = int((shares < VARIANCE).sum()) + 1
        basis = vectors[:, :count] / values[:count].sqrt()
    return LayerProducts(torch.cat(squares), norm, basis)


def cross_product(x: CentredRows, y: CentredRows) -> torch.Tensor:
    """Compute X^T Y, (D, E) float64, in blocks of rows."""
    total: torch.Tensor | None = None
    for start, stop in _spans(x, y):
        block = x.read(start, stop)
        product = block.T @ (block if x is y else y.read(start, stop))
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


def compare_products(
    x: LayerProducts, y: LayerProducts, product: torch.Tensor, measures: Collection[str]
) -> dict[str, float]:
    """Compute measures of two layers; NaN if a layer is the same for all images."""
    if np.isnan(x.norm) or np.isnan(y.norm):
        return dict.fromkeys(measures, float("nan"))
    values = {}
    for name in measures:
        if name == "cka":
            values[name] = float(product.square().sum()) / (x.norm * y.norm)
        elif name == "cka_debiased":
            values[name] = _debiased_cka(x, y, float(product.square().sum()))
        elif name == "svcca":
            assert x.basis is not None
            assert y.basis is not None
            correlations = torch.linalg.svdvals(x.basis.T @ product @ y.basis)
            values[name] = float(correlations.clamp_max(1).mean())
        else:
            lengths = (x.squares.sum() * y.squares.sum()).sqrt()
            values[name] = max(0.0, float(2 - 2 * torch.linalg.svdvals(product).sum() / lengths))
    return values


def _spans(*layers: CentredRows) -> Iterator[tuple[int, int]]:
    """Yield the first and last row of blocks of two layers, as float64."""
    step = rows_of_block(4 * max(rows.width for rows in layers))
    for start in range(0, layers[0].count, step):
        yield start, min(layers[0].count, start + step)


def _debiased_cka(x: LayerProducts, y: LayerProducts, square: float) -> float:
    """Return the debiased CKA, given |X^T Y|_F^2."""

    def hsic(a: LayerProducts, b: LayerProducts, square: float) -> float:
        n = len(a.squares)
        both = float(a.squares @ b.squares)
        sums = float(a.squares.sum() * b.squares.sum())
        return square - both + sums / ((n - 1) * (n - 2)) - 2 * both / (n - 2)

    self_hsic = hsic(x, x, x.norm**2), hsic(y, y, y.norm**2)
    if self_hsic[0] <= _ROUNDING * x.norm**2 or self_hsic[1] <= _ROUNDING * y.norm**2:
        return float("nan")
    return hsic(x, y, square) / float(np.sqrt(self_hsic[0] * self_hsic[1]))
