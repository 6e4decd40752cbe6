"""Nearest neighbours of a few query images in one layer, for the report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis import KEEP_BYTES, LayerVectors
from featx.analysis.similarity import nearest_among
from featx.base import choose_device
from featx.store import FeatureStore

HARD_QUERIES = 3
"""Maximum number of queries with few neighbours of their own class."""

RANDOM_QUERIES = 3
"""Number of random queries."""

NEAREST = 6
"""Number of neighbours per query."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Queries:
    """Rows of the store whose neighbours are shown.

    `hard` have few neighbours of their own class, `random` are others.
    """

    hard: list[int]
    random: list[int]


@dataclass(frozen=True)
class Neighbour:
    """One neighbour of a query.

    `same` says whether both rows have the same class; None if one has no label.
    """

    row: int
    cosine: float
    same: bool | None


Strip = tuple[int, list[Neighbour]]
"""Row of a query, and its nearest neighbours."""


@dataclass(frozen=True)
class Neighbours:
    """Nearest neighbours of the queries in one layer.

    `among` counts the rows that were searched; `whole` if these are all that did not fail.
    """

    layer: str
    among: int
    whole: bool
    hard: list[Strip]
    random: list[Strip]


def hard_queries(
    rows: Rows, same_class: npt.NDArray[np.float64] | None, tested: npt.NDArray[np.bool_]
) -> list[int]:
    """Choose the tested rows with the fewest neighbours of their own class, less than half of them.

    `same_class` is the share of nearest rows with the same class, NaN without a label.
    """
    if same_class is None:
        return []
    shares = np.where(tested & ~np.isnan(same_class), same_class, np.inf)
    order = np.argsort(shares, kind="stable")[:HARD_QUERIES]
    return [int(rows[place]) for place in order if shares[place] < 0.5]


def random_queries(store: FeatureStore, rows: Rows, seed: int) -> list[int]:
    """Choose up to RANDOM_QUERIES random rows of different classes, as far as there are any."""
    order = np.random.default_rng(seed).permutation(rows)
    labels = store.labels[order]
    class_order = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[class_order], return_index=True, return_counts=True)
    # Position of each row within its class: first come the rows that are the first of their class.
    turn = np.empty(len(order), np.int64)
    turn[class_order] = np.arange(len(order)) - np.repeat(starts, counts)
    return [int(row) for row in order[np.argsort(turn, kind="stable")[:RANDOM_QUERIES]]]


def neighbours_of(
    store: FeatureStore,
    layer: str,
    ok: Rows,
    queries: Queries,
    seed: int,
    device: str,
) -> Neighbours:
    """Search the nearest rows of the queries by exact cosine; a map counts as one long vector."""
    rows = [*queries.hard, *queries.random]
    width = int(np.prod(store[layer].shape[1:], dtype=np.int64))
    room = max(len(rows) + 1, KEEP_BYTES // (4 * max(1, width)))
    among = ok
    if len(ok) > room:
        chosen = np.random.default_rng(seed).choice(ok, room, replace=False)
        among = np.union1d(chosen, np.array(rows))
    vectors = LayerVectors(store, layer, choose_device(device), rows=among, unit=True, centre=True)
    neighbours = nearest_among(vectors, np.searchsorted(among, rows), NEAREST)
    strips: list[Strip] = []
    for row, nearest, scores in zip(rows, neighbours.neighbours, neighbours.scores, strict=True):
        near = [
            Neighbour(other, score, _same(store, row, other))
            for other, score in zip(nearest.tolist(), scores.tolist(), strict=True)
        ]
        strips.append((row, near))
    num_hard = len(queries.hard)
    return Neighbours(
        layer, len(among), len(among) == len(ok), strips[:num_hard], strips[num_hard:]
    )


def _same(store: FeatureStore, row: int, other: int) -> bool | None:
    """Return whether two rows have the same class, or None if one has no label."""
    a, b = int(store.labels[row]), int(store.labels[other])
    return a == b if a >= 0 and b >= 0 else None
