"""How alike two layers are: linear CKA and RSA, over the same pictures.

With the Gram matrix K = X X^T of the vectors of a layer (n, D), one row a picture:

    CKA       <HKH, HLH> / (|HKH| |HLH|), H = I - 1/n  (Kornblith et al. 2019)
    debiased  the same with the U-centred matrices of Szekely and Rizzo (2014), which have a zero
              diagonal (Nguyen et al. 2021): where D is not small against n, CKA is near 1 for any
              two layers, and this is not
    RSA       Spearman's correlation of the cosine distances 1 - K_ij / sqrt(K_ii K_jj), i < j
              (Kriegeskorte et al. 2008)

Each is the dot product of two vectors of length 1, one a layer, so many layers cost one Gram matrix
each. Everything is float64, but for what is kept of each layer (float32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.similarity import row_vectors as sizes
from featx.analysis.similarity.row_vectors import Vectors
from featx.base.devices import choose_device, float64_home
from featx.errors import ConfigError
from featx.store.layer_selection import matching_layers
from featx.store.reader import FeatureStore

MEASURES = ("cka", "cka_debiased", "rsa")
ROWS = 2000
"""Pictures that are taken where nobody says how many; what is kept of a layer grows with the
square: 8 n^2 bytes, 32 MB."""

Matrix = npt.NDArray[np.float64]

_SAME = 1e-28
"""Products of centred rows so small against those of the rows themselves are rounding: float64 has
2e-16, and products have its square."""

_SAME_RANK = 1e-12
"""Distances this near to each other, as a part of the largest one, share a rank."""


@dataclass(frozen=True)
class LayerSimilarity:
    """Layers against layers.

    Attributes:
        layers, others: names of the rows and of the columns.
        measures: 'cka', 'cka_debiased' and 'rsa' -> (layers, others) float64; NaN where a layer
            is the same for all pictures.
        num_rows: pictures that were taken.
        num_common: pictures there were to choose from.
    """

    layers: tuple[str, ...]
    others: tuple[str, ...]
    measures: dict[str, Matrix]
    num_rows: int
    num_common: int


def layer_similarity(
    store: FeatureStore,
    other: FeatureStore | None = None,
    layers: Sequence[str] | str | None = None,
    num_rows: int = ROWS,
    seed: int = 0,
    device: str = "auto",
    tell: Callable[[int], None] = lambda layers: None,
) -> LayerSimilarity:
    """CKA and RSA between the layers of a store, or between those of two stores.

    Args:
        store: open for reading.
        other: its rows are matched by key; only what is ok in both counts.
        layers: names or globs, of both stores where there are two; all when not given.
        num_rows: so many random pictures; all where there are no more.
        seed: of the choice.
        device: auto, cpu, cuda, ...
        tell: is told of every layer that is done.

    Raises:
        ConfigError: fewer than four pictures to compare, or a single layer.
        LayerError: no such layer in one of the stores.
    """
    rows, other_rows = _common_rows(store, other)
    if len(rows) < 4:
        raise ConfigError(f"{len(rows)} pictures are ok in common; expected at least 4.")
    count = min(num_rows, len(rows))
    chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[:count])
    where = float64_home(choose_device(device))

    def signatures(of: FeatureStore, at: npt.NDArray[np.int64]) -> dict[str, list[torch.Tensor]]:
        found = {}
        for name in matching_layers(of, layers):
            found[name] = list(
                _signatures(*_centred_gram(Vectors(of, name, where, rows=at[chosen])))
            )
            tell(1)
        return found

    left = signatures(store, rows)
    right = left if other is None else signatures(other, other_rows)
    if other is None and len(left) < 2:
        raise ConfigError(
            f"{store.root} has one layer to compare, {next(iter(left))}; name more with layer=, or "
            "another store."
        )
    measures = {
        name: np.array([[_dot(a[i], b[i]) for b in right.values()] for a in left.values()])
        for i, name in enumerate(MEASURES)
    }
    return LayerSimilarity(tuple(left), tuple(right), measures, count, len(rows))


def linear_cka(
    x: npt.NDArray[np.floating], y: npt.NDArray[np.floating], debiased: bool = False
) -> float:
    """Linear CKA of two matrices (n, D) and (n, E) whose rows are of the same n things."""
    which = 1 if debiased else 0
    return _dot(_signatures_of(x)[which], _signatures_of(y)[which])


def rsa(x: npt.NDArray[np.floating], y: npt.NDArray[np.floating]) -> float:
    """Spearman's correlation of the cosine distances within (n, D) and within (n, E)."""
    return _dot(_signatures_of(x)[2], _signatures_of(y)[2])


def _common_rows(
    store: FeatureStore, other: FeatureStore | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows of the first and of the second store that are ok and of the same pictures."""
    rows = np.flatnonzero(store.ok)
    if other is None:
        return rows, rows
    others = np.flatnonzero(other.ok)
    _, a, b = np.intersect1d(
        store.key_bytes[rows], other.key_bytes[others], assume_unique=True, return_indices=True
    )
    order = np.argsort(a)
    return rows[a[order]], others[b[order]]


def _signatures_of(x: npt.NDArray[np.floating]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat = torch.from_numpy(np.asarray(x, np.float64).reshape(len(x), -1))
    mean = flat.mean(dim=0)
    centred = flat - mean
    return _signatures(centred @ centred.T, centred @ mean, mean @ mean)


def _centred_gram(vectors: Vectors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Products of all pairs of rows less their mean m, of each such row with m, and of m with m.

    An offset that all rows share would leave nothing of the products but rounding.

    Returns:
        (n, n), (n,) and () float64.
    """
    n = len(vectors)
    step = max(1, vectors.rows_of(sizes.BLOCK_BYTES) // 2)
    mean = torch.zeros(vectors.width, dtype=torch.float64, device=vectors.device)
    for _, block in vectors.blocks(step):
        mean += block.double().sum(dim=0) / n
    gram = torch.empty((n, n), dtype=torch.float64, device=vectors.device)
    along = torch.empty(n, dtype=torch.float64, device=vectors.device)
    for start, block in vectors.blocks(step):
        wide = block.double() - mean
        along[start : start + len(block)] = wide @ mean
        for other in range(start, n, step):
            stop = min(n, other + step)
            products = wide @ (vectors.block(other, stop).double() - mean).T
            gram[start : start + len(block), other:stop] = products
            gram[other:stop, start : start + len(block)] = products.T
    return gram, along, mean @ mean


def _signatures(
    gram: torch.Tensor, along: torch.Tensor, mean_square: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What CKA, its debiased form and RSA compare of a layer: vectors of length 1, float32.

    Args:
        gram, along, mean_square: as `_centred_gram` gives them.
    """
    n = len(gram)
    upper = torch.triu_indices(n, n, 1, device=gram.device)
    # Rows that differ by rounding only, of the numbers they were before the mean was taken off.
    if not gram.norm() > _SAME * (gram.norm() + n * mean_square):
        nothing = torch.full((n * n,), torch.nan)
        return nothing, nothing[: upper.shape[1]], nothing[: upper.shape[1]]
    means = gram.mean(dim=0)  # rounding of the mean of the rows
    cka = _unit((gram - means - means[:, None] + gram.mean()).reshape(-1), gram.norm())
    hollow = gram.clone().fill_diagonal_(0)
    sums = hollow.sum(dim=0)
    u_centred = hollow - (sums + sums[:, None]) / (n - 2) + hollow.sum() / ((n - 1) * (n - 2))
    debiased = _unit(u_centred[upper[0], upper[1]], gram.norm())
    distances = _cosine_distances(gram, along, mean_square, upper)
    ranks = average_ranks(distances.cpu().numpy())
    centred_ranks = torch.from_numpy(ranks - ranks.mean())
    return cka, debiased, _unit(centred_ranks, centred_ranks.new_tensor(float(len(ranks))))


def _cosine_distances(
    gram: torch.Tensor, along: torch.Tensor, mean_square: torch.Tensor, upper: torch.Tensor
) -> torch.Tensor:
    """(p,) 1 - cos of pairs of rows, rounded: what is equal but for its last bits shares a rank.

    With d the difference of two rows x and y, 1 - cos = (|d|^2 - (|x| - |y|)^2) / (2 |x| |y|). Of
    rows that an offset makes nearly parallel, 1 less the cosine would be nothing but rounding; the
    other form is as exact as |d|^2 / (2 |x| |y|), the larger one of its terms.

    Args:
        gram, along, mean_square: as `_centred_gram` gives them.
        upper: (2, p) the pairs.
    """
    i, j = upper
    own = gram.diagonal()
    squares = (own + 2 * along + mean_square).clamp_min(0)
    lengths = squares.sqrt()
    scale, sums = lengths[i] * lengths[j], lengths[i] + lengths[j]
    there = scale > 0
    scale, sums = torch.where(there, scale, 1.0), torch.where(sums > 0, sums, 1.0)
    difference = (own[i] + own[j] - 2 * gram[i, j]).clamp_min(0) / (2 * scale)
    # |x| - |y| = (|x|^2 - |y|^2) / (|x| + |y|), without the squares of the mean.
    shorter = ((own + 2 * along)[i] - (own + 2 * along)[j]) / sums
    exact = difference - shorter.square() / (2 * scale)
    plain = 1 - (gram[i, j] + along[i] + along[j] + mean_square) / scale
    distances = torch.where(difference < 1, exact, plain)
    # A vector of zeros has a cosine of 0 with all others.
    distances = torch.where(there, distances, 1.0)
    largest = float(torch.where(there, difference, 0.0).max().clamp_max(1)) or 1.0
    return torch.round(distances / (_SAME_RANK * largest))


def _unit(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / |x| as float32 in main memory; NaN where it is nothing but rounding.

    Args:
        scale: of the numbers that x was taken from.
    """
    length = x.norm()
    if not length > 1e-12 * scale:
        return torch.full(x.shape, torch.nan)
    unit: torch.Tensor = (x / length).float().cpu()
    return unit


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b)


def average_ranks(values: Matrix) -> Matrix:
    """(m,) ranks from 1; equal values share the mean of theirs."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.append(starts, len(values)))
    ranks = np.empty(len(values))
    ranks[order] = np.repeat(starts + (counts + 1) / 2, counts)
    return ranks
