"""kNN probe: k nearest neighbours by cosine, with votes weighted by similarity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from featx.analysis.layer_vectors import LayerVectors, unit_vectors
from featx.analysis.probe.layer_rows import Problem
from featx.analysis.probe.metrics import Ints, Matrix
from featx.analysis.similarity.nearest_neighbours import best_of_blocks
from featx.base import float64_device, rows_of_block

K_GRID = (1, 5, 10, 20, 50, 100, 200)
"""Numbers of neighbours to try, as far as there are enough rows."""

TEMPERATURE = 0.07
"""Temperature T of the votes, that of DINO."""

_OFFSET = 1e4
"""Ratio of the square of the median direction to the median squared distance from it above which
cosines are computed in float64: they then differ from 1 by less than float32, with a precision of
1e-7, resolves well."""

_SAMPLED_ROWS = 1024
"""Number of rows from which that ratio is estimated."""


def vote(problem: Problem, bank: Ints, queries: Ints, ks: Sequence[int]) -> dict[int, Matrix]:
    """Compute each class's share of the votes of a query's k most similar rows of the bank, or the
    mean of their values, weighted by the votes. Return k -> (len(queries), num_outputs) float64;
    shares sum to 1.

    A neighbour of cosine s has exp(s / T) votes. M. Caron et al., Emerging Properties in
    Self-Supervised Vision Transformers (DINO), ICCV 2021, appendix; as there, features are not
    standardised. A query in the bank does not vote for itself. A row of zeros has cosine 0 to all
    others.
    """
    features, y, num_outputs = problem.features, problem.y, problem.num_outputs

    def combined(weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Combine k neighbours of each query, whose weights and places are (n, k)."""
        if y.ndim == 2:
            values = torch.from_numpy(y).to(weights)[places]
            return (weights[:, :, None] * values).sum(1) / weights.sum(1, keepdim=True)
        labels = torch.from_numpy(y).to(weights.device)[places]
        votes = torch.zeros((len(labels), num_outputs), dtype=weights.dtype, device=weights.device)
        votes.scatter_add_(1, labels, weights)
        return votes / votes.sum(1, keepdim=True)

    largest = min(max(ks), len(bank))
    scores = {k: np.empty((len(queries), num_outputs)) for k in ks}
    dtype = _needed_dtype(features, bank)
    # As many queries as leave room for their similarities to one block of the bank.
    step = min(4096, rows_of_block(4 * largest))
    for start in range(0, len(queries), step):
        query_places = queries[start : start + step]
        cosines, places = _nearest(features, bank, query_places, largest, dtype)
        for k, scores_of_k in scores.items():
            top = cosines[:, :k].double() if cosines.device.type != "mps" else cosines[:, :k]
            # Subtracting the largest exponent leaves the shares unchanged and avoids overflow.
            weights = ((top - top[:, :1]) / TEMPERATURE).exp()
            weights = torch.where(torch.isfinite(top), weights, 0.0)  # -inf: no neighbour
            votes = combined(weights, places[:, :k]).cpu().double()
            scores_of_k[start : start + step] = votes.numpy()
    return scores


def _nearest(
    features: LayerVectors, bank: Ints, queries: Ints, count: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    home = features.device if dtype == torch.float32 else float64_device(features.device)

    def unit(rows: torch.Tensor) -> torch.Tensor:
        return unit_vectors(rows.to(float64_device(features.device)).double()).to(home, dtype)

    query_vectors = unit(features.take(queries))
    rows = rows_of_block(4 * len(queries))

    def scored_blocks() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the places of a block of the bank, and their cosines to the queries."""
        for start in range(0, len(bank), rows):
            for places, block in features.blocks(bank[start : start + rows]):
                yield torch.from_numpy(places).to(home), query_vectors @ unit(block).T

    return best_of_blocks(scored_blocks(), torch.from_numpy(queries).to(home), count)


def _needed_dtype(features: LayerVectors, bank: Ints) -> torch.dtype:
    """Return float64 if a common offset makes most rows nearly parallel, else float32."""
    sample = bank[np.unique(np.linspace(0, len(bank) - 1, _SAMPLED_ROWS).astype(np.int64))]
    rows = unit_vectors(features.take(sample).to(float64_device(features.device)).double())
    centre = rows.median(dim=0).values  # which a few other rows do not move
    spread = float((rows - centre).square().sum(dim=1).median())
    return torch.float64 if float(centre @ centre) > _OFFSET * spread else torch.float32


def candidates(num_bank: int, k: int | None) -> tuple[int, ...]:
    """Return the numbers of neighbours to try."""
    if k is not None:
        return (k,)
    return tuple(k for k in K_GRID if k == 1 or k <= num_bank)
