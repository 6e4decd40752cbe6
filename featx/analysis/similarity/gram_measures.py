"""CKA and RSA of two layers from the Gram matrices of their rows.

With the Gram matrix K = X X^T of the vectors of a layer (n, D), one row per image, and L of
another:

    CKA       <HKH, HLH> / (|HKH| |HLH|), H = I - 1/n  (Kornblith et al. 2019)
    debiased  the same with the U-centred matrices of Szekely and Rizzo (2014), which have a zero
              diagonal (Nguyen et al. 2021); their product is the unbiased HSIC of Song et al. 2012
    RSA       Spearman's correlation of the distances of all pairs of images: 1 minus Pearson's
              correlation of their vectors (Kriegeskorte et al. 2008), or 1 minus their cosine,
              which does not see a rotation of the features

Each measure is the dot product of two unit vectors, one per layer, so the cost is one Gram matrix
per layer, and one more for each RSA, not one per pair. Computation is in float64; the vectors of
each layer are kept as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.layer_vectors import LayerVectors
from featx.base import rows_of_block

Matrix = npt.NDArray[np.float64]

SAME = 1e-28
"""Ratio of squared norms below which centred rows count as rounding errors, so that all rows of the
layer are the same: float64 has a relative error of 2e-16, and products have its square."""

_SAME_RANK = 1e-12
"""Difference of distances, relative to the largest, below which they share a rank."""

_NO_LENGTH = 1e-13
"""Length of a row minus the mean of its values, relative to the row, that is a rounding error."""


@dataclass(frozen=True)
class Rows:
    """The `count` rows of a layer or matrix, with `width` values each; `read` returns the rows
    [start, stop), (m, D), in blocks of `step`.
    """

    count: int
    width: int
    step: int
    read: Callable[[int, int], torch.Tensor]

    @classmethod
    def of_layer(cls, vectors: LayerVectors) -> Rows:
        """Rows of a layer."""
        step = rows_of_block(4 * vectors.width)
        return cls(len(vectors), vectors.width, step, vectors.block)

    @classmethod
    def of_matrix(cls, x: Matrix) -> Rows:
        """Rows of a matrix in memory, (n, D) float64."""
        rows = torch.from_numpy(x)
        return cls(len(x), x.shape[1], len(x), lambda start, stop: rows[start:stop])


@dataclass(frozen=True)
class GramProducts:
    """Dot products of rows minus their mean m, in float64.

    The mean is subtracted first, since a large common offset would leave only rounding errors.

    Attributes:
        gram: (n, n) products of all pairs.
        mean_square: m with m.
        are_zero: (n,) bool, whether all values of a row are 0.
    """

    gram: torch.Tensor
    mean_square: float
    are_zero: torch.Tensor

    @property
    def are_same(self) -> bool:
        """Whether all rows are the same up to rounding, relative to their size before centring."""
        norm, n = float(self.gram.norm()), len(self.gram)
        return not norm > SAME * (norm + n * self.mean_square)


def gram_products(
    rows: Rows, prepare: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> GramProducts:
    """Compute the products of rows in blocks; `prepare` makes the rows that are multiplied of (m,
    D) float64 rows.
    """
    n, starts = rows.count, range(0, rows.count, rows.step)

    def prepared(start: int) -> torch.Tensor:
        return prepare(rows.read(start, min(n, start + rows.step)).double())

    mean, are_zero = torch.zeros((), dtype=torch.float64), []
    for start in starts:
        block = prepared(start)
        mean = mean.to(block.device) + block.sum(dim=0) / n
        are_zero.append((block == 0).all(1))
    gram = torch.empty((n, n), dtype=torch.float64, device=mean.device)
    for start in starts:
        block = prepared(start) - mean
        for other in starts[start // rows.step :]:
            products = block @ (prepared(other) - mean).T
            gram[start : start + rows.step, other : other + rows.step] = products
            gram[other : other + rows.step, start : start + rows.step] = products.T
    return GramProducts(gram, float(mean @ mean), torch.cat(are_zero))


RSA_DISTANCES = {"rsa": "correlation", "rsa_cosine": "cosine"}
"""Measure -> distance of two images."""


def signatures(rows: Rows, measures: Collection[str]) -> dict[str, torch.Tensor]:
    """Compute the unit vectors of a layer whose dot products with those of another are measures.
    Return measure -> float32 on the CPU: (n^2,) for CKA, else (n (n - 1) / 2,); NaN if all rows are
    the same.
    """
    found = {}
    if of_products := [name for name in measures if name not in RSA_DISTANCES]:
        products = gram_products(rows)
        found = {name: _signature(products, name) for name in of_products}
    for name in measures:
        if name in RSA_DISTANCES:
            found[name] = _rsa_signature(rows, RSA_DISTANCES[name])
    return found


def _signature(products: GramProducts, measure: str) -> torch.Tensor:
    """Compute the unit vector of CKA or of debiased CKA."""
    gram, n = products.gram, len(products.gram)
    if products.are_same:
        return torch.full((n * n if measure == "cka" else n * (n - 1) // 2,), torch.nan)
    if measure == "cka":
        means = gram.mean(dim=0)  # nearly 0: the rounding error of centring
        return _unit((gram - means - means[:, None] + gram.mean()).reshape(-1), gram.norm())
    i, j = torch.triu_indices(n, n, 1, device=gram.device)
    hollow = gram.clone().fill_diagonal_(0)
    sums = hollow.sum(dim=0)
    u_centred = hollow - (sums + sums[:, None]) / (n - 2) + hollow.sum() / ((n - 1) * (n - 2))
    return _unit(u_centred[i, j], gram.norm())


def _rsa_signature(rows: Rows, distance: str) -> torch.Tensor:
    """Compute the unit vector of RSA from the ranks of the distances of all pairs of rows.

    With u and v of length 1, 1 - u.v is |u - v|^2 / 2. Their mean is subtracted, so that the
    distance is exact for rows that a common offset makes nearly parallel. A row of zeros, or of
    equal values for the correlation, has a distance of 1 to all others.
    """

    def unit_rows(x: torch.Tensor) -> torch.Tensor:
        lengths = x.norm(dim=1, keepdim=True)
        if distance == "correlation":
            least = _NO_LENGTH * lengths
            x = x - x.mean(dim=1, keepdim=True)
            lengths = x.norm(dim=1, keepdim=True)
            lengths = torch.where(lengths > least, lengths, 0)
        return torch.where(lengths > 0, x / lengths, 0)

    products, n = gram_products(rows, unit_rows), rows.count
    if products.are_same:
        return torch.full((n * (n - 1) // 2,), torch.nan)
    gram, squares = products.gram, products.gram.diagonal()
    i, j = torch.triu_indices(n, n, 1, device=gram.device)
    distances = ((squares[i] + squares[j]) / 2 - gram[i, j]).clamp_min(0)
    distances[products.are_zero[i] | products.are_zero[j]] = 1
    # Nearly equal distances share the mean of their ranks.
    steps = (distances / (_SAME_RANK * distances.max())).round().cpu().numpy()
    _, inverse, counts = np.unique(steps, return_inverse=True, return_counts=True)
    ranks = torch.from_numpy((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    centred_ranks = ranks - ranks.mean()
    return _unit(centred_ranks, centred_ranks.new_tensor(float(len(ranks))))


def _unit(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    length = x.norm()
    if not length > 1e-12 * scale:
        return torch.full(x.shape, torch.nan)
    unit: torch.Tensor = (x / length).float().cpu()
    return unit
