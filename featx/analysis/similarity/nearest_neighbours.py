"""Exact nearest rows: every pair is looked at, block against block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.similarity import row_vectors as sizes
from featx.analysis.similarity.row_vectors import Vectors
from featx.base.devices import choose_device
from featx.config import METRICS, check_choice
from featx.errors import ConfigError
from featx.store.reader import FeatureStore
from featx.types import Status

_FAR_SQUARE = (sizes.FAR / 2) ** 2

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

    Products are taken in float32, of vectors around their mean; distances and cosines of the k that
    were found are then taken from the differences, so that those of rows which are nearly the same
    are right as well. Rows of the same
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
    vectors = Vectors(store, layer, choose_device(device), unit=cosine, centre=True)
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
        vectors: centred; of length 1 before that for cosine.
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


def best_of_blocks(
    scored: Iterable[tuple[torch.Tensor, torch.Tensor]], own: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of what comes block by block, for many queries at once.

    Args:
        scored: of each block its places, (m,) int64, increasing, and (q, m) scores, which are
            written over.
        own: (q,) the place of each query, which is not a neighbour of itself.
        k: all of them where there are fewer.

    Returns:
        (q, k) scores, falling, and (q, k) places; a score of -inf is no neighbour.
    """
    best = torch.full((len(own), 0), -torch.inf, device=own.device)
    places = torch.zeros((len(own), 0), dtype=torch.int64, device=own.device)
    for there, scores in scored:
        at = torch.searchsorted(there, own).clamp_max(len(there) - 1)
        mine = (there[at] == own).nonzero()[:, 0]
        scores[mine, at[mine]] = -torch.inf
        top = scores.topk(min(k, scores.shape[1]), dim=1)
        places = torch.cat([places, there[top.indices]], dim=1)
        best, kept = torch.cat([best, top.values], dim=1).topk(
            min(k, best.shape[1] + top.values.shape[1]), dim=1
        )
        places = places.gather(1, kept)
    return best, places


def _nearest(
    vectors: Vectors, queries: torch.Tensor, k: int, cosine: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k) places and (q, k) scores of the rows at some places, (q,)."""
    x = vectors.at(queries)
    at_once = min(
        vectors.rows_of(sizes.BLOCK_BYTES), max(1, sizes.BLOCK_BYTES // (4 * len(queries)))
    )

    def scored() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start, block in vectors.blocks(at_once):
            # |x - y|^2 without |x|^2, the same for all y; the nearest has the largest.
            squares = (block * block).sum(1)
            scores = torch.addmm(-squares, x, block.T, alpha=2)
            if cosine and (squares > _FAR_SQUARE).any():  # zeros: at a cosine of 0 from all
                of_zeros = (x * x).sum(1, keepdim=True) - 2
                scores = torch.where(squares > _FAR_SQUARE, of_zeros, scores)
            yield torch.arange(start, start + len(block), device=x.device), scores

    _, places = best_of_blocks(scored(), queries, k)
    return in_order(vectors, x, places, cosine)


def in_order(
    vectors: Vectors, x: torch.Tensor, places: torch.Tensor, cosine: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k) places and scores as they are given out: the nearest first, equals as in the store.

    Args:
        vectors: in which they were found.
        x: (q, D) the vectors asked for.
        places: (q, k) that were found.
        cosine: else euclidean.
    """
    scores = distances = _distances(vectors, x, places)
    if cosine:
        is_zero = (distances > sizes.FAR / 2) | ((x * x).sum(1, keepdim=True) > _FAR_SQUARE)
        distances[is_zero] = math.sqrt(2)  # a cosine of 0
        scores = (1 - distances * distances / 2).clamp(-1, 1).masked_fill(is_zero, 0)
    places, order = places.sort(dim=1)
    distances, scores = distances.gather(1, order), scores.gather(1, order)
    # By distances, which tell cosines apart that are all 1 in float32.
    order = distances.sort(dim=1, stable=True).indices
    return places.gather(1, order), scores.gather(1, order)


def _distances(vectors: Vectors, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(q, k) lengths of the differences between (q, D) and the vectors at (q, k) places."""
    found = torch.empty(places.shape, dtype=torch.float32, device=x.device)
    step = max(1, vectors.rows_of(sizes.BLOCK_BYTES) // places.shape[1])
    for start in range(0, len(x), step):
        part = places[start : start + step]
        others = vectors.at(part.reshape(-1)).reshape(*part.shape, vectors.width)
        found[start : start + step] = (others - x[start : start + step, None]).norm(dim=2)
    return found
