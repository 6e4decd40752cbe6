"""Rows of the report that resemble each other: near-duplicates, and nearest neighbours."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from featx.analysis import read_texts, search
from featx.analysis.probe import MIN_FEATURES, NEAR_COSINE
from featx.analysis.similarity import metric_vectors, nearest_among, origin_numbers
from featx.base import block_sizes, rows_of_block
from featx.config import Config
from featx.export.report.layers import Rows, RowVectors, row_vectors, standardised_units
from featx.export.report.probe_results import TEST, Probes
from featx.store import FeatureStore
from featx.types import Json

PAIRS_SHOWN = 12
"""Maximum number of pairs of near-duplicates."""

HARD_QUERIES = 3
"""Maximum number of queries with few neighbours of their own class."""

RANDOM_QUERIES = 3
"""Number of random queries."""

NEAREST = 6
"""Number of neighbours per query."""


def find_duplicates(
    store: FeatureStore, layers: tuple[str, ...], rows: Rows, images: Rows, probes: Probes
) -> Json:
    """Find near-duplicates among the selected rows, and add those that job=probe found.

    `images` are numbers of the image or video of each row; two rows of one are no pair.
    Returns layer ('' if none was compared), cosine, count of all pairs, and the pairs that are
    shown, with their rows as first and second, cosine of the standardised vectors, and crosses
    (whether exactly one is a test row).
    """
    found = {"layer": "", "cosine": NEAR_COSINE, "pairs": [], "count": 0}
    vectors = _widest_vectors(store, layers, rows, probes)
    if vectors is None or vectors.x is None:
        return found
    places, count = similar_pairs(vectors.x, images, NEAR_COSINE, PAIRS_SHOWN)
    roles = None if probes.predicted is None else probes.predicted.roles
    pairs = []
    for i, j, cosine in places:
        a, b = int(rows[i]), int(rows[j])
        if roles is not None and roles[b] == TEST:  # the test row comes first
            a, b = b, a
        crosses = roles is not None and bool((roles[a] == TEST) != (roles[b] == TEST))
        pairs.append((a, b, cosine, crosses))
    pairs += [(*pair, True) for pair in probes.leaked_pairs]
    distinct = {frozenset((a, b)): (a, b, cosine, crosses) for a, b, cosine, crosses in pairs}
    ordered = sorted(distinct.values(), key=lambda pair: (not pair[3], -pair[2]))[:PAIRS_SHOWN]
    names = ("first", "second", "cosine", "crosses")
    shown = [dict(zip(names, pair, strict=True)) for pair in ordered]
    return {
        **found, "layer": vectors.layer, "pairs": shown, "count": max(count, len(distinct)),
    }  # fmt: skip


def _widest_vectors(
    store: FeatureStore, layers: tuple[str, ...], rows: Rows, probes: Probes
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
    x: npt.NDArray[np.float32], images: Rows, cosine: float, most: int
) -> tuple[list[tuple[int, int, float]], int]:
    """Find pairs of rows of different images whose standardised vectors are almost equal, as
    job=probe does.

    Returns (i, j, cosine) of pairs with i < j, the largest cosine first; and the number of all.
    """
    unit = standardised_units(x)
    pairs: list[tuple[int, int, float]] = []
    count, step = 0, rows_of_block(4 * len(x))
    for start in range(0, len(x), step):
        cosines = unit[start : start + step] @ unit.T
        i, j = np.nonzero(cosines >= cosine)
        is_pair = (j > i + start) & (images[j] != images[i + start])
        i, j = i[is_pair], j[is_pair]
        count += len(i)
        values = cosines[i, j]
        order = np.argsort(-values, kind="stable")[:most]
        pairs += [
            (int(start + a), int(b), float(value))
            for a, b, value in zip(i[order], j[order], values[order], strict=True)
        ]
    return sorted(pairs, key=lambda pair: -pair[2])[:most], count


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
    _, first = np.unique(store.labels[order], return_index=True)
    first_of_classes = order[np.sort(first)]
    chosen: list[int] = np.concatenate([first_of_classes, np.delete(order, first)]).tolist()
    return chosen[:RANDOM_QUERIES]


def neighbours_of(
    store: FeatureStore,
    layer: str,
    ok: Rows,
    hard: list[int],
    random: list[int],
    seed: int,
    device: str,
) -> Json:
    """Search the nearest rows of the queries by the cosine of standardised values, exactly.

    A map counts as one long vector. Rows of the image or video of a query are left out, unless
    there are no others. Return layer, among (number of rows searched), whole (whether
    these are all that did not fail), and hard and random, with the row of each query and its
    neighbours. A neighbour has row, cosine and same: whether both have the same class, None if one
    has no label.
    """
    rows = [*hard, *random]
    width = int(np.prod(store[layer].shape[1:], dtype=np.int64))
    room = max(len(rows) + 1, block_sizes.KEEP_BYTES // (4 * max(1, width)))
    among = ok
    if len(ok) > room:
        chosen = np.random.default_rng(seed).choice(ok, room, replace=False)
        among = np.union1d(chosen, np.array(rows))
    vectors = metric_vectors(store, layer, "cosine", device, standardise=True, rows=among)
    origins, _ = origin_numbers(store, among)
    found = nearest_among(vectors, np.searchsorted(among, rows), NEAREST, origins=origins)
    strips = []
    for row, nearest, scores in zip(rows, found.neighbours, found.scores, strict=True):
        near = [
            {"row": other, "cosine": score, "same": _same(store, row, other)}
            for other, score in zip(nearest.tolist(), scores.tolist(), strict=True)
            if not np.isnan(score)
        ]
        strips.append((row, near))
    return {
        "layer": layer,
        "among": len(among),
        "whole": len(among) == len(ok),
        "hard": strips[: len(hard)],
        "random": strips[len(hard) :],
    }


def nearest_to_texts(
    store: FeatureStore, config: Config
) -> list[tuple[str, list[tuple[int, float]]]]:
    """Return the texts of report.texts, each with rows and cosines of the nearest images."""
    if config.report.texts is None:
        return []
    texts = read_texts("report.texts", config.report.texts)
    rows, cosines = search(store, texts, NEAREST, config.device)
    return [
        (text, list(zip(nearest.tolist(), scores.tolist(), strict=True)))
        for text, nearest, scores in zip(texts, rows, cosines, strict=True)
    ]


def _same(store: FeatureStore, row: int, other: int) -> bool | None:
    """Return whether two rows have the same class, or None if one has no label."""
    a, b = int(store.labels[row]), int(store.labels[other])
    return a == b if a >= 0 and b >= 0 else None
