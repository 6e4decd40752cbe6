"""Retrieval: how often the nearest rows of a row have its class, as recall@k and mAP."""

from __future__ import annotations

import numpy as np
import torch

from featx.analysis.similarity.nearest_neighbours import (
    FAR_SQUARE,
    LEAST_SQUARE,
    QUERIES,
    metric_vectors,
    tie_limit,
)
from featx.base import rows_of_block
from featx.sources import origins_of
from featx.store import FeatureStore
from featx.types import Array

RECALL_AT = (1, 5, 10)
"""Numbers k of the nearest rows among which recall@k looks for the class."""

MAX_RANKED = 10_000
"""Number of rows up to which mAP is computed, which sorts all rows for each of them."""


def retrieval_metrics(
    store: FeatureStore,
    layer: str,
    metric: str,
    device: str,
    standardise: bool,
    max_ranked: int = MAX_RANKED,
) -> dict[str, object] | None:
    """Retrieve the other labelled rows for each labelled row, by nearness.

    recall@k is the share of queries with a row of their class among the k nearest (H. Jegou et al.,
    Product Quantization for Nearest Neighbor Search, TPAMI 2011). mAP is the mean over queries of
    the average precision of their ranking: the mean over the rows of its class of the share of
    their class among all rows that are at most as far. Rows of the same image or video as a query
    (boxes, views, frames) are left out of its ranking, as the splits of job=probe keep them
    together. A query whose class has no other row is left out, but is among the rows that others
    retrieve. With cosine, vectors of zeros come last, and to one of them all rows are as near.

    Rows of other classes that are as near as one of the class count as nearer than it. Rows are as
    near if their squared distances differ by no more than TIE, so that the rounding of sums, which
    depends on the order of rows and values, decides nothing. A map counts as one long vector.

    Returns:
        queries; queries_left_out; left_out: 'image', 'video' or 'image or video' of whose rows a
        ranking has none, or None; recall, k -> share; map, None if it is not available, and
        not_available, the reason or None. None if no class has two rows of different images.
    """
    labels = np.asarray(store.labels)
    rows = np.flatnonzero(store.ok & (labels >= 0))
    labels = labels[rows]
    names, kind = origins_of(store.key_bytes[rows])
    origins = np.unique(names, return_inverse=True)[1]
    pairs = np.unique(np.stack([labels, origins], axis=1), axis=0)
    queries = np.flatnonzero(np.bincount(pairs[:, 0])[labels] > 1)  # images of the class
    if not len(queries):
        return None
    vectors = metric_vectors(store, layer, metric, device, standardise, dtype=torch.float64)
    vectors = vectors.subset(np.searchsorted(vectors.rows, rows))
    blocks = (block for _, block in vectors.all_blocks(vectors.block_rows))
    squares_of_all = np.concatenate([block.square().sum(1).cpu().numpy() for block in blocks])
    is_ranked, most = len(rows) <= max_ranked, max(RECALL_AT)
    # Few rows at a time leave room for many queries, for each block of which all rows are read,
    # unless the layer fits into memory.
    num_compared = rows_of_block(max(16 * QUERIES, 8 * vectors.width))
    num_kept = len(rows) if is_ranked else num_compared
    block_rows = min(vectors.block_rows, rows_of_block(16 * num_kept))
    num_nearer: list[Array] = []
    precisions: list[float] = []
    for start in range(0, len(queries), block_rows):
        places = queries[start : start + block_rows]
        x, squares = vectors.take(places), squares_of_all[places, None]
        nearest, others = np.full((len(places), 1), np.inf), np.empty((len(places), 0))
        ranked: list[tuple[Array, Array]] = []
        for first, block in vectors.all_blocks(num_compared):
            span = slice(first, first + len(block))
            products = (x @ block.T).cpu().numpy()
            distances = (squares + squares_of_all[span] - 2 * products).clip(0)
            if metric == "cosine":  # no row is nearer to a vector of zeros than another
                distances[squares[:, 0] > FAR_SQUARE] = 0
            is_other = origins[places][:, None] != origins[span]
            distances[~is_other] = np.inf
            same = is_other & (labels[places][:, None] == labels[span])
            nearest = np.minimum(nearest, np.where(same, distances, np.inf).min(1, keepdims=True))
            of_block = np.where(same, np.inf, distances)
            of_block.partition(min(most, len(block)) - 1, axis=1)
            others = np.sort(np.hstack([others, of_block[:, :most]]), axis=1)[:, :most]
            if is_ranked:
                ranked.append((distances, same))
        if metric == "cosine":
            squares = squares.clip(LEAST_SQUARE)
        num_nearer.append((others <= tie_limit(nearest, squares)).sum(1))
        if is_ranked:
            of_all = (np.hstack(each) for each in zip(*ranked, strict=True))
            precisions += map(_average_precision, *of_all, squares)
    ranks = np.concatenate(num_nearer)
    return {
        "queries": len(queries),
        "queries_left_out": len(rows) - len(queries),
        "left_out": kind,
        "recall": {str(k): float((ranks < k).mean()) for k in RECALL_AT if k < len(rows)},
        "map": float(np.mean(precisions)) if is_ranked else None,
        "not_available": (
            None if is_ranked else f"{len(rows)} labelled rows are more than {max_ranked}"
        ),
    }


def _average_precision(distances: Array, same: Array, square: Array) -> float:
    """Compute the mean over the rows of the class of their share among the rows that are at most as
    far. `distances` and `same` are (n,); same is false where a distance is infinite.
    """
    order = np.argsort(distances)
    distances, same = distances[order], same[order]
    ends = np.searchsorted(distances, tie_limit(distances[same], square), side="right")
    return float((np.cumsum(same)[ends - 1] / ends).mean())
