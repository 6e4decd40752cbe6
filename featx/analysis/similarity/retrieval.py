"""Retrieval: how often the nearest rows of a row have its class, as recall@k and mAP."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.layer_vectors import LayerVectors
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
    squares_of_all = torch.cat(
        [block.square().sum(1) for _, block in vectors.all_blocks(vectors.block_rows)]
    )
    is_ranked, most = len(rows) <= max_ranked, max(RECALL_AT)
    # Without a ranking, few rows at a time leave room for many queries: a layer that does not fit
    # into memory is read once for each block of queries.
    compared = len(rows) if is_ranked else rows_of_block(16 * QUERIES)
    num_nearer: list[Array] = []
    precisions: list[float] = []
    block_rows = min(vectors.block_rows, rows_of_block(16 * compared))
    for start in range(0, len(queries), block_rows):
        places = queries[start : start + block_rows]
        nearest, others = np.full((len(places), 1), np.inf), np.empty((len(places), 0))
        for first in range(0, len(rows), compared):
            span = slice(first, min(len(rows), first + compared))
            distances, squares = _squared_distances(
                vectors, squares_of_all, places, span, metric == "cosine"
            )
            is_other = origins[places][:, None] != origins[span]
            distances[~is_other] = np.inf
            same = is_other & (labels[places][:, None] == labels[span])
            nearest = np.minimum(nearest, np.where(same, distances, np.inf).min(1, keepdims=True))
            others = np.hstack([others, np.where(same, np.inf, distances)])
            others = np.partition(others, min(most, others.shape[1]) - 1, axis=1)[:, :most]
            if is_ranked:
                precisions += map(_average_precision, distances, same, squares)
        num_nearer.append((others <= tie_limit(nearest, squares)).sum(1))
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


def _squared_distances(
    vectors: LayerVectors,
    squares_of_all: torch.Tensor,
    places: npt.NDArray[np.int64],
    span: slice,
    cosine: bool,
) -> tuple[Array, Array]:
    """Compute the (q, m) squared distances of some rows to those of a span, and the (q, 1) |a|^2
    for `tie_limit`.
    """
    queries = vectors.take(places)
    squares = squares_of_all[torch.from_numpy(places).to(squares_of_all.device), None]
    distances = np.empty((len(places), span.stop - span.start))
    step = rows_of_block(8 * vectors.width)
    for start in range(span.start, span.stop, step):
        block = vectors.block(start, min(span.stop, start + step))
        others = squares_of_all[start : start + len(block)]
        found = squares + others - 2 * (queries @ block.T)
        first = start - span.start
        distances[:, first : first + len(block)] = found.clamp_min(0).cpu().numpy()
    if cosine:
        # No row is nearer to a vector of zeros than another.
        distances[(squares > FAR_SQUARE)[:, 0].cpu().numpy()] = 0
        squares = squares.clamp_min(LEAST_SQUARE)
    return distances, squares.cpu().numpy()
