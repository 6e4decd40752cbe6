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
per layer, not per pair. Computation is in float64; the vectors of each layer are kept as float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis import layer_vectors as sizes
from featx.analysis.layer_vectors import LayerVectors

Matrix = npt.NDArray[np.float64]

SAME = 1e-28
"""Ratio of squared norms below which centred rows count as rounding errors, so that all rows of the
layer are the same: float64 has a relative error of 2e-16, and products have its square."""

_SAME_RANK = 1e-12
"""Difference of distances, relative to the largest, below which they share a rank."""


@dataclass(frozen=True)
class GramProducts:
    """Dot products of the rows of a matrix minus their mean m, in float64.

    The mean is subtracted first, since a large common offset would leave only rounding errors.

    Attributes:
        gram: (n, n) products of all pairs.
        along: (n,) products with m.
        mean_square: () m with m.
        along_even: (n,) products with m minus the mean of its values.
        even_square: () that vector with itself.
        row_means: (n,) mean of the values of each centred row times sqrt(D).
    """

    gram: torch.Tensor
    along: torch.Tensor
    mean_square: torch.Tensor
    along_even: torch.Tensor
    even_square: torch.Tensor
    row_means: torch.Tensor


def gram_products(vectors: LayerVectors) -> GramProducts:
    """Compute the products of the rows of a layer, in blocks."""
    n = len(vectors)
    step = max(1, vectors.rows_of(sizes.BLOCK_BYTES) // 2)
    mean = torch.zeros(vectors.width, dtype=torch.float64, device=vectors.device)
    for _, block in vectors.blocks(step):
        mean += block.double().sum(dim=0) / n
    gram = torch.empty((n, n), dtype=torch.float64, device=vectors.device)
    along, along_even, row_means = torch.empty((3, n), dtype=torch.float64, device=vectors.device)
    even = mean - mean.mean()
    for start, block in vectors.blocks(step):
        wide = block.double() - mean
        along[start : start + len(block)] = wide @ mean
        along_even[start : start + len(block)] = wide @ even
        row_means[start : start + len(block)] = wide.mean(dim=1) * vectors.width**0.5
        for other_start in range(start, n, step):
            stop = min(n, other_start + step)
            products = wide @ (vectors.block(other_start, stop).double() - mean).T
            gram[start : start + len(block), other_start:stop] = products
            gram[other_start:stop, start : start + len(block)] = products.T
    return GramProducts(gram, along, mean @ mean, along_even, even @ even, row_means)


def matrix_products(x: npt.NDArray[np.floating]) -> GramProducts:
    """Compute the products of the rows of a matrix in memory, (n, D) or any shape with n rows."""
    flat = torch.from_numpy(np.asarray(x, np.float64).reshape(len(x), -1))
    mean = flat.mean(dim=0)
    centred = flat - mean
    even = mean - mean.mean()
    return GramProducts(
        centred @ centred.T,
        centred @ mean,
        mean @ mean,
        centred @ even,
        even @ even,
        centred.mean(dim=1) * flat.shape[1] ** 0.5,
    )


def signature(
    products: GramProducts, measure: str, rsa_distance: str = "correlation"
) -> torch.Tensor:
    """Compute the unit vector of a layer whose dot product with that of another is a measure.

    Returns:
        float32 on the CPU: (n^2,) for CKA, else (n (n - 1) / 2,); NaN if all rows are the same.
    """
    gram, n = products.gram, len(products.gram)
    # All rows are the same up to rounding, relative to their size before centring.
    if not gram.norm() > SAME * (gram.norm() + n * products.mean_square):
        return torch.full((n * n if measure == "cka" else n * (n - 1) // 2,), torch.nan)
    if measure == "cka":
        means = gram.mean(dim=0)  # nearly 0: the rounding error of centring
        return _unit((gram - means - means[:, None] + gram.mean()).reshape(-1), gram.norm())
    upper = torch.triu_indices(n, n, 1, device=gram.device)
    if measure == "cka_debiased":
        hollow = gram.clone().fill_diagonal_(0)
        sums = hollow.sum(dim=0)
        u_centred = hollow - (sums + sums[:, None]) / (n - 2) + hollow.sum() / ((n - 1) * (n - 2))
        return _unit(u_centred[upper[0], upper[1]], gram.norm())
    if rsa_distance == "cosine":
        distances = _cosine_distances(gram, products.along, products.mean_square, upper)
    else:
        distances = _correlation_distances(products, upper)
    ranks = average_ranks(distances.cpu().numpy())
    centred_ranks = torch.from_numpy(ranks - ranks.mean())
    return _unit(centred_ranks, centred_ranks.new_tensor(float(len(ranks))))


def _correlation_distances(products: GramProducts, upper: torch.Tensor) -> torch.Tensor:
    """Compute 1 minus the correlation of pairs of rows, as `_cosine_distances` does.

    It is the cosine distance of the rows minus the mean of their values. A row of equal values has
    a correlation of 0 with all others.
    """
    means, squares = products.row_means, products.gram.diagonal()
    gram = products.gram - means[:, None] * means
    rounding = _SAME_RANK * (squares + products.even_square)
    return _cosine_distances(gram, products.along_even, products.even_square, upper, rounding)


def _cosine_distances(
    gram: torch.Tensor,
    along: torch.Tensor,
    mean_square: torch.Tensor,
    upper: torch.Tensor,
    rounding: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Compute 1 - cos for pairs of rows, rounded so that nearly equal values are equal.

    With d the difference of two rows x and y, 1 - cos = (|d|^2 - (|x| - |y|)^2) / (2 |x| |y|). For
    rows that a common offset makes nearly parallel, 1 minus the cosine is dominated by rounding.
    The other form is as exact as |d|^2 / (2 |x| |y|), the larger of its terms.
    """
    i, j = upper
    centred_squares = gram.diagonal()
    squares = (centred_squares + 2 * along + mean_square).clamp_min(0)
    squares = torch.where(squares > rounding, squares, 0.0)
    lengths = squares.sqrt()
    scale, sums = lengths[i] * lengths[j], lengths[i] + lengths[j]
    has_length = scale > 0
    scale, sums = torch.where(has_length, scale, 1.0), torch.where(sums > 0, sums, 1.0)
    difference = (centred_squares[i] + centred_squares[j] - 2 * gram[i, j]).clamp_min(0) / (
        2 * scale
    )
    # |x| - |y| = (|x|^2 - |y|^2) / (|x| + |y|), without the squares of the mean.
    shorter = ((centred_squares + 2 * along)[i] - (centred_squares + 2 * along)[j]) / sums
    exact = difference - shorter.square() / (2 * scale)
    plain = 1 - (gram[i, j] + along[i] + along[j] + mean_square) / scale
    distances = torch.where(difference < 1, exact, plain)
    # A vector of zeros has a cosine of 0 with all others.
    distances = torch.where(has_length, distances, 1.0)
    largest = float(torch.where(has_length, difference, 0.0).max().clamp_max(1)) or 1.0
    return torch.round(distances / (_SAME_RANK * largest))


def _unit(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Normalise a vector to length 1."""
    length = x.norm()
    if not length > 1e-12 * scale:
        return torch.full(x.shape, torch.nan)
    unit: torch.Tensor = (x / length).float().cpu()
    return unit


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the dot product of two vectors."""
    return float(a @ b)


def average_ranks(values: Matrix) -> Matrix:
    """Rank values from 1; equal values get the mean of their ranks."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.append(starts, len(values)))
    ranks = np.empty(len(values))
    ranks[order] = np.repeat(starts + (counts + 1) / 2, counts)
    return ranks
