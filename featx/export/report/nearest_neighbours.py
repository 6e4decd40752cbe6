"""The nearest rows of a few pictures, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.similarity.nearest_neighbours import nearest_among
from featx.analysis.similarity.row_vectors import KEEP_BYTES, Vectors
from featx.base.devices import choose_device
from featx.store.reader import FeatureStore

QUERIES = 6
NEAREST = 6

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Neighbour:
    """A row, its cosine to the picture asked for, and whether it has the same class: None where
    one of the two has none."""

    row: int
    cosine: float
    same: bool | None


@dataclass(frozen=True)
class Strips:
    """The nearest rows of some pictures in one layer.

    Attributes:
        name: of the dataset.
        among: rows that were looked at.
        whole: whether those are all ok rows.
        strips: (row asked for, its nearest rows).
    """

    name: str
    among: int
    whole: bool
    strips: list[tuple[int, list[Neighbour]]]


def chosen_queries(store: FeatureStore, rows: Rows, seed: int) -> list[int]:
    """Up to QUERIES of some rows, random ones, the classes in turn."""
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
    """Exact cosines, a map as one long vector, as job=similar takes them.

    Args:
        store: open for reading.
        layer: its name.
        ok: (n,) increasing: its ok rows, at least two.
        queries: some of them.
        seed: of the choice where a layer is too large to be held.
        device: auto, cpu, cuda, ...
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
    a, b = int(store.labels[row]), int(store.labels[other])
    return a == b if a >= 0 and b >= 0 else None
