"""Nearest rows of a few query images in each layer, for the report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.similarity import KEEP_BYTES, Vectors, nearest_among
from featx.base import choose_device
from featx.store import FeatureStore

QUERIES = 6
"""Number of query images."""
NEAREST = 6
"""Number of neighbours per query."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Neighbour:
    """One neighbour of a query.

    Attributes:
        row: row of the store.
        cosine: cosine of the two vectors.
        same: whether both rows have the same class, or None if one has no label.
    """

    row: int
    cosine: float
    same: bool | None


@dataclass(frozen=True)
class Strips:
    """Nearest rows of the queries in one layer.

    Attributes:
        name: name of the dataset.
        among: number of rows that were searched.
        whole: whether these are all rows that did not fail.
        strips: pairs of a query's row and its nearest rows.
    """

    name: str
    among: int
    whole: bool
    strips: list[tuple[int, list[Neighbour]]]


def chosen_queries(store: FeatureStore, rows: Rows, seed: int) -> list[int]:
    """Choose up to QUERIES random rows, one class after the other.

    Args:
        store: open store.
        rows: (n,) int64 rows to choose from.
        seed: seed of the choice.
    """
    order = np.random.default_rng(seed).permutation(rows)
    labels = store.labels[order]
    by_class = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    turn = np.empty(len(order), np.int64)
    turn[by_class] = np.arange(len(order)) - np.repeat(starts, counts)
    return [int(row) for row in order[np.argsort(turn, kind="stable")[:QUERIES]]]


def nearest_strips(
    store: FeatureStore, layer: str, ok: Rows, queries: list[int], seed: int, device: str
) -> Strips:
    """Search the nearest rows of the queries by exact cosine; a map counts as one long vector.

    Args:
        store: open store.
        layer: name of the layer.
        ok: (n,) int64, increasing; rows that did not fail, at least two.
        queries: some of these rows.
        seed: seed of the sample that is searched if a layer is too large for memory.
        device: 'auto', 'cpu', 'cuda', ...
    """
    width = int(np.prod(store[layer].shape[1:], dtype=np.int64))
    room = max(len(queries) + 1, KEEP_BYTES // (4 * max(1, width)))
    among = ok
    if len(ok) > room:
        chosen = np.random.default_rng(seed).choice(ok, room, replace=False)
        among = np.union1d(chosen, np.array(queries))
    vectors = Vectors(store, layer, choose_device(device), rows=among, unit=True, centre=True)
    found = nearest_among(vectors, np.searchsorted(among, queries), NEAREST)
    strips = []
    for row, nearest, scores in zip(queries, found.neighbours, found.scores, strict=True):
        near = [
            Neighbour(other, score, _same(store, row, other))
            for other, score in zip(nearest.tolist(), scores.tolist(), strict=True)
        ]
        strips.append((row, near))
    return Strips(layer, len(among), len(among) == len(ok), strips)


def _same(store: FeatureStore, row: int, other: int) -> bool | None:
    """Return whether two rows have the same class, or None if one has no label."""
    a, b = int(store.labels[row]), int(store.labels[other])
    return a == b if a >= 0 and b >= 0 else None
