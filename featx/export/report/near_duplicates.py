"""Pairs of near-duplicates among some rows, and those that job=probe found across its split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.probe import MIN_FEATURES, NEAR_COSINE
from featx.export.report.embedding_plots import RowVectors, row_vectors
from featx.export.report.predictions_file import ROLES
from featx.export.report.probe_results import Probes
from featx.store import FeatureStore

PAIRS_SHOWN = 12
"""Maximum number of pairs of near-duplicates."""

_BLOCK_NUMBERS = 1 << 24
"""Number of cosines in memory at a time."""

_TEST = ROLES.index("test")


@dataclass(frozen=True)
class Pair:
    """Two rows that are near-duplicates.

    `cosine` is of their standardised vectors; the pair crosses if exactly one is a test row.
    """

    first: int
    second: int
    cosine: float
    crosses: bool


@dataclass(frozen=True)
class Duplicates:
    """Pairs of near-duplicates.

    `layer` is '' if none was compared; `pairs` are those that are shown, `count` counts all.
    """

    layer: str
    cosine: float
    pairs: list[Pair]
    count: int


def find_duplicates(
    store: FeatureStore, layers: tuple[str, ...], rows: npt.NDArray[np.int64], probes: Probes
) -> Duplicates:
    """Find near-duplicates among the selected rows, and add those that job=probe found."""
    vectors = _widest_vectors(store, layers, rows, probes)
    if vectors is None or vectors.x is None:
        return Duplicates("", NEAR_COSINE, [], 0)
    places, count = similar_pairs(vectors.x, NEAR_COSINE, PAIRS_SHOWN)
    roles = None if probes.predicted is None else probes.predicted.roles
    pairs = []
    for i, j, cosine in places:
        a, b = int(rows[i]), int(rows[j])
        if roles is not None and roles[b] == _TEST:  # the test row comes first
            a, b = b, a
        crosses = roles is not None and (roles[a] == _TEST) != (roles[b] == _TEST)
        pairs.append(Pair(a, b, cosine, crosses))
    pairs += [Pair(a, b, cosine, crosses=True) for a, b, cosine in probes.leaked_pairs]
    distinct = {frozenset((each.first, each.second)): each for each in pairs}
    ordered = sorted(distinct.values(), key=lambda each: (not each.crosses, -each.cosine))
    return Duplicates(vectors.layer, NEAR_COSINE, ordered[:PAIRS_SHOWN], max(count, len(distinct)))


def _widest_vectors(
    store: FeatureStore, layers: tuple[str, ...], rows: npt.NDArray[np.int64], probes: Probes
) -> RowVectors | None:
    """Return the vectors in which near-duplicates are searched; None if all are too short."""
    first = probes.leakage_layer
    widths = {layer: int(np.prod(store[layer].shape[1:], dtype=np.int64)) for layer in layers}
    for layer in sorted(layers, key=lambda layer: (layer != first, -widths[layer])):
        if widths[layer] >= MIN_FEATURES:
            vectors = row_vectors(store, layer, rows)
            if vectors.x is not None and vectors.width >= MIN_FEATURES:
                return vectors
    return None


def similar_pairs(
    x: npt.NDArray[np.float32], cosine: float, most: int
) -> tuple[list[tuple[int, int, float]], int]:
    """Find pairs of rows whose standardised vectors are almost equal, as job=probe does.

    Returns (i, j, cosine) of pairs with i < j, the largest cosine first; and the number of all.
    """
    spread = x.std(0, dtype=np.float64)
    unit = x - x.mean(0, dtype=np.float64).astype(np.float32)
    unit /= np.where(spread > 0, spread, 1).astype(np.float32)
    lengths = np.linalg.norm(unit, axis=1, keepdims=True)
    unit /= np.where(lengths > 0, lengths, 1)
    pairs: list[tuple[int, int, float]] = []
    count, step = 0, max(1, _BLOCK_NUMBERS // len(x))
    for start in range(0, len(x), step):
        cosines = unit[start : start + step] @ unit.T
        i, j = np.nonzero(cosines >= cosine)
        is_later = j > i + start
        i, j = i[is_later], j[is_later]
        count += len(i)
        values = cosines[i, j]
        order = np.argsort(-values, kind="stable")[:most]
        pairs += [
            (int(start + a), int(b), float(value))
            for a, b, value in zip(i[order], j[order], values[order], strict=True)
        ]
    return sorted(pairs, key=lambda pair: -pair[2])[:most], count
