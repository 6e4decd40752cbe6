"""Exact nearest rows: every pair is looked at, block against block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.devices import choose_device
from featx.errors import ConfigError
from featx.options import METRICS, check_choice
from featx.similarity import vectors as sizes
from featx.similarity.vectors import Vectors
from featx.store.reader import FeatureStore
from featx.types import Status

QUERIES = 8192
"""Rows whose neighbours are looked for at a time, at the most."""


@dataclass(frozen=True)
class Neighbours:
    """The nearest rows of some rows.

    Attributes:
        rows: (q,) int64, of the store.
        neighbours: (q, k) int64, rows of the store, the nearest first, never the row itself.
        scores: (q, k) float32: cosines, the largest first, or Euclidean distances.
        metric: cosine or euclidean.
    """

    rows: npt.NDArray[np.int64]
    neighbours: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    metric: str


def nearest_rows(
    store: FeatureStore,
    layer: str,
    k: int = 10,
    metric: str = "cosine",
    key: str | None = None,
    device: str = "auto",
    tell: Callable[[int], None] = lambda rows: None,
) -> Neighbours:
    """The k nearest ok rows of every ok row, or of one picture.

    Products are taken in float32; distances of the k that were found are then taken from the
    differences, so that those of rows which are nearly the same are right as well. Rows of the same
    score come in the order of the store; which of them are among the k is not defined.

    Args:
        store: open for reading.
        layer: its name; a map counts as one long vector.
        k: at most as many as there are other rows.
        metric: cosine (0 with a vector of zeros) or euclidean.
        key: of a picture; None looks at every row.
        device: auto, cpu, cuda, ...
        tell: is told of every block how many rows are done.

    Raises:
        ConfigError: no such metric, no such picture, or it failed; there is no other row.
        LayerError: no such layer.
    """
    check_choice("metric", metric, METRICS)
    cosine = metric == "cosine"
    asked = None if key is None else row_of(store, key)
    vectors = Vectors(store, layer, choose_device(device), unit=cosine, centre=not cosine)
    every = np.arange(len(vectors))
    places = every if asked is None else np.searchsorted(vectors.rows, [asked])
    return nearest_among(vectors, places, k, metric, tell)


def nearest_among(
    vectors: Vectors,
    places: npt.NDArray[np.int64],
    k: int,
    metric: str = "cosine",
    tell: Callable[[int], None] = lambda rows: None,
) -> Neighbours:
    """The k nearest of some vectors for a part of them; see `nearest_rows`.

    Args:
        vectors: of length 1 for cosine, centred for euclidean.
        places: (q,) of those whose neighbours are wanted.
        k, metric, tell: as for `nearest_rows`.

    Raises:
        ConfigError: there is no other row.
    """
    if len(vectors) < 2:
        raise ConfigError(f"{vectors.root} has one ok row only: it has no neighbours.")
    cosine = metric == "cosine"
    k = min(k, len(vectors) - 1)
    found, scores = [], []
    step = min(QUERIES, vectors.rows_of(sizes.BLOCK_BYTES))
    for start in range(0, len(places), step):
        queries = torch.from_numpy(places[start : start + step]).to(vectors.device)
        best, best_scores = _nearest(vectors, queries, k, cosine)
        found.append(best.cpu().numpy())
        scores.append(best_scores.cpu().numpy())
        tell(len(queries))
    return Neighbours(
        vectors.rows[places], vectors.rows[np.concatenate(found)], np.concatenate(scores), metric
    )


def row_of(store: FeatureStore, key: str) -> int:
    """The row of a picture that is ok. Raises ConfigError where there is none."""
    try:
        row = store.row(key)
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from error
    if store.status[row] != Status.OK:
        why = Status(int(store.status[row])).label
        raise ConfigError(f"{key} has no features: its row {row} is recorded as {why}.")
    return row


def _nearest(
    vectors: Vectors, queries: torch.Tensor, k: int, cosine: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k) places and (q, k) scores of the rows at some places, (q,)."""
    x = vectors.at(queries)
    best = torch.full((len(queries), 0), 0, dtype=torch.int64, device=x.device)
    best_scores = torch.full((len(queries), 0), 0.0, device=x.device)
    at_once = min(
        vectors.rows_of(sizes.BLOCK_BYTES), max(1, sizes.BLOCK_BYTES // (4 * len(queries)))
    )
    for start, block in vectors.blocks(at_once):
        scores = x @ block.T
        if not cosine:
            # |x - y|^2 without |x|^2, which is the same for all y; the nearest has the largest.
            scores = 2 * scores - (block * block).sum(1)
        own = (queries >= start) & (queries < start + len(block))
        scores[own.nonzero()[:, 0], queries[own] - start] = -torch.inf
        top = scores.topk(min(k, len(block)), dim=1)
        best = torch.cat([best, top.indices + start], dim=1)
        best_scores = torch.cat([best_scores, top.values], dim=1)
        best_scores, kept = best_scores.topk(min(k, best_scores.shape[1]), dim=1)
        best = best.gather(1, kept)
    if not cosine:
        best_scores = -_distances(vectors, x, best)
    best, order = best.sort(dim=1)
    best_scores, order = best_scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    best = best.gather(1, order)
    return best, best_scores.clamp(-1, 1) if cosine else -best_scores


def _distances(vectors: Vectors, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(q, k) lengths of the differences between (q, D) and the vectors at (q, k) places."""
    found = torch.empty(places.shape, dtype=torch.float32, device=x.device)
    step = max(1, vectors.rows_of(sizes.BLOCK_BYTES) // places.shape[1])
    for start in range(0, len(x), step):
        part = places[start : start + step]
        others = vectors.at(part.reshape(-1)).reshape(*part.shape, vectors.width)
        found[start : start + step] = (others - x[start : start + step, None]).norm(dim=2)
    return found
