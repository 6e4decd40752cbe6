"""kNN probe: k nearest neighbours by cosine, with votes weighted by similarity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from featx.analysis.layer_vectors import LayerVectors, unit_vectors
from featx.analysis.probe.layer_rows import Problem
from featx.analysis.probe.metrics import Ints, Matrix
from featx.analysis.similarity.nearest_neighbours import LEAST_SQUARE, tie_limit
from featx.base import float64_device, rows_of_block

K_GRID = (1, 5, 10, 20, 50, 100, 200)
"""Numbers of neighbours to try, as far as there are enough rows."""

TEMPERATURE = 0.07
"""Temperature T of the votes, that of DINO."""

_SAMPLED_ROWS = 1024
"""Number of rows of which the centre is the median."""


def vote(problem: Problem, bank: Ints, queries: Ints, ks: Sequence[int]) -> dict[int, Matrix]:
    """Compute each class's share of the votes of a query's k most similar rows of the bank, or the
    mean of their values, weighted by the votes. Return k -> (len(queries), num_outputs) float64;
    shares sum to 1.

    A neighbour of cosine s has exp(s / T) votes. M. Caron et al., Emerging Properties in
    Self-Supervised Vision Transformers (DINO), ICCV 2021, appendix; as there, features are not
    standardised. A row of zeros has cosine 0 to all others. Of rows that are as similar, up to
    rounding, the first ones of the bank are neighbours, and they have equal votes, so that classes
    with equal votes have equal scores.

    Args:
        bank: (n,) increasing places, none of which is a query.
    """
    features, y, num_outputs = problem.features, problem.y, problem.num_outputs

    def combined(weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Combine k neighbours of each query, whose weights and places are (n, k)."""
        if y.ndim == 2:
            values = torch.from_numpy(y)[places]
            return (weights[:, :, None] * values).sum(1) / weights.sum(1, keepdim=True)
        labels = torch.from_numpy(y)[places]
        votes = torch.zeros((len(labels), num_outputs), dtype=weights.dtype)
        votes.scatter_add_(1, labels, weights)
        return votes / votes.sum(1, keepdim=True)

    largest = min(max(ks), len(bank))
    scores = {k: np.empty((len(queries), num_outputs)) for k in ks}
    centre = _centre(features, bank)
    # As many queries as leave room for their distances to one block of the bank.
    step = min(4096, rows_of_block(8 * largest))
    for start in range(0, len(queries), step):
        query_places = queries[start : start + step]
        distances, places = _nearest(features, bank, query_places, largest, centre)
        for k, scores_of_k in scores.items():
            top = distances[:, :k]
            # Subtracting the smallest distance leaves the shares unchanged and avoids overflow.
            # Votes are summed in the same order on the CPU alone.
            weights = ((top[:, :1] - top) / (2 * TEMPERATURE)).exp().cpu()
            votes = combined(weights, places[:, :k].cpu())
            scores_of_k[start : start + step] = votes.numpy()
    return scores


def _nearest(
    features: LayerVectors, bank: Ints, queries: Ints, count: int, centre: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (q, count) squared distances of unit vectors, 2 - 2 cos, in rising order, and the
    places of the bank. Equal distances are in the order of the bank.

    A squared distance is computed from differences to the centre, so that cosines near 1 keep
    their digits.
    """
    home = centre.device

    def unit(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return unit vectors minus the centre, and whether each is of a row of zeros."""
        rows = rows.to(home).double()
        return unit_vectors(rows) - centre, (rows == 0).all(1)

    x, is_zero = unit(features.take(queries))
    squares = x.square().sum(1, keepdim=True)
    sizes = squares.clamp_min(LEAST_SQUARE)
    nearest = torch.empty((len(queries), 0), dtype=torch.float64, device=home)
    places = torch.empty((len(queries), 0), dtype=torch.int64, device=home)
    rows = rows_of_block(16 * len(queries))
    for start in range(0, len(bank), rows):
        for block_places, block in features.blocks(bank[start : start + rows]):
            y, is_zero_too = unit(block)
            found = (squares + y.square().sum(1) - 2 * (x @ y.T)).clamp_min(0)
            found[is_zero[:, None] | is_zero_too] = 2  # a cosine of 0
            new_places = torch.from_numpy(block_places).to(home).expand(len(x), -1)
            nearest = torch.cat([nearest, found], dim=1)
            places = torch.cat([places, new_places], dim=1)
            columns = _smallest(nearest, sizes, min(count, nearest.shape[1]))
            nearest, places = nearest.gather(1, columns), places.gather(1, columns)
    # Distances that differ by rounding become the smallest of them.
    values, order = nearest.sort(dim=1)
    values[:, 1:][values[:, 1:] <= tie_limit(values[:, :-1], sizes)] = 0
    nearest.scatter_(1, order, values.cummax(dim=1).values)
    nearest, order = nearest.sort(dim=1, stable=True)
    return nearest, places.gather(1, order)


def _smallest(distances: torch.Tensor, squares: torch.Tensor, count: int) -> torch.Tensor:
    """Return the (q, count) columns of the smallest of (q, n) distances, increasing; of equal ones
    the first columns.
    """
    # Twice as fast as kthvalue on a CPU.
    last = distances.topk(count, largest=False, sorted=False).values.amax(1, keepdim=True)
    is_chosen = distances <= tie_limit(last, squares)
    if int(is_chosen.sum()) > count * len(distances):  # several are equal to the last one
        is_nearer = tie_limit(distances, squares) < last
        is_tie = is_chosen & ~is_nearer
        room = count - is_nearer.sum(1, keepdim=True)
        is_chosen = is_nearer | (is_tie & (is_tie.cumsum(1) <= room))
    return is_chosen.nonzero()[:, 1].reshape(len(distances), count)


def _centre(features: LayerVectors, bank: Ints) -> torch.Tensor:
    """Return the median direction of some rows of the bank, which a few other rows do not move."""
    sample = bank[np.unique(np.linspace(0, len(bank) - 1, _SAMPLED_ROWS).astype(np.int64))]
    rows = features.take(sample).to(float64_device(features.device)).double()
    return unit_vectors(rows).median(dim=0).values


def candidates(num_bank: int, k: int | None) -> tuple[int, ...]:
    """Return the numbers of neighbours to try."""
    if k is not None:
        return (k,)
    return tuple(k for k in K_GRID if k == 1 or k <= num_bank)
