"""Retrieval: how often the nearest rows of a row have its class, as recall@k and mAP."""

from __future__ import annotations

import importlib.util

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.layer_vectors import LayerVectors
from featx.analysis.similarity.nearest_neighbours import FAR_SQUARE, metric_vectors
from featx.base import float64_device, rows_of_block
from featx.store import FeatureStore

RECALL_AT = (1, 5, 10)
"""Numbers k of the nearest rows among which recall@k looks for the class."""

MAX_RANKED = 10_000
"""Number of rows up to which mAP is computed, which sorts all rows for each of them."""

_BITS = 32
"""Bits of a squared distance |a - b|^2, relative to |a|^2 + |b|^2, that decide which row is nearer.
The bits behind them are rounding errors of sums in float64, which differ between copies."""


def retrieval_metrics(
    store: FeatureStore, layer: str, metric: str, device: str, standardise: bool = False
) -> dict[str, object] | None:
    """Retrieve the other labelled rows for each labelled row, by nearness.

    recall@k is the share of queries with a row of their class among the k nearest (H. Jegou et al.,
    Product Quantization for Nearest Neighbor Search, TPAMI 2011); rows of other classes that are as
    near count as nearer. mAP is the mean over queries of the average precision of their ranking, as
    scikit-learn's label_ranking_average_precision_score. A query whose class has no other row is
    left out, but is among the rows that others retrieve. With cosine, vectors of zeros come last,
    and to one of them all rows are as near.

    Squared distances |a - b|^2 are rounded to 2^-32 of |a|^2 + |b|^2, so that copies are as near as
    each other. A map counts as one long vector. Return queries; queries_left_out; recall, k ->
    share; map, None if it is not available, and not_available, the reason or None. Return None if
    no class has two rows.
    """
    labels = np.asarray(store.labels)
    rows = np.flatnonzero(store.ok & (labels >= 0))
    labels = labels[rows]
    counts = np.bincount(labels) if len(labels) else np.zeros(1, np.int64)
    queries = np.flatnonzero(counts[labels] > 1)
    if not len(queries):
        return None
    vectors = metric_vectors(store, layer, metric, device, standardise)
    vectors = vectors.subset(np.searchsorted(vectors.rows, rows))
    reason = None  # why mAP is not computed
    if importlib.util.find_spec("sklearn") is None:
        reason = 'scikit-learn is not installed: pip install "featx[evaluation]"'
    elif len(rows) > MAX_RANKED:
        reason = f"{len(rows)} labelled rows are more than {MAX_RANKED}"
    num_nearer, precisions = [], []
    block_rows = rows_of_block(16 * len(rows))  # scores, and what is compared of them
    for start in range(0, len(queries), block_rows):
        places = queries[start : start + block_rows]
        scores = _nearness(vectors, places, metric == "cosine")
        itself = np.arange(len(places)), places
        scores[itself] = -np.finfo(np.float64).max  # comes last, behind all rows of its class
        same = labels[places][:, None] == labels
        same[itself] = False
        nearest = np.where(same, scores, -np.inf).max(1, keepdims=True)
        num_nearer.append(((scores >= nearest) & ~same).sum(1))
        if reason is None:
            from sklearn.metrics import label_ranking_average_precision_score

            precision = label_ranking_average_precision_score(same, scores)
            precisions.append(len(places) * float(precision))
    ranks = np.concatenate(num_nearer)
    return {
        "queries": len(queries),
        "queries_left_out": len(rows) - len(queries),
        "recall": {str(k): float((ranks < k).mean()) for k in RECALL_AT if k < len(rows)},
        "map": None if reason is not None else float(sum(precisions) / len(queries)),
        "not_available": reason,
    }


def _nearness(
    vectors: LayerVectors, places: npt.NDArray[np.int64], cosine: bool
) -> npt.NDArray[np.float64]:
    """Compute minus the squared distances of some rows to all rows, rounded to _BITS bits."""
    home = float64_device(vectors.device)
    wide = vectors.take(places).to(home).double()
    squares = wide.square().sum(1, keepdim=True)
    nearness = np.empty((len(places), len(vectors)))
    for start, block in vectors.all_blocks(rows_of_block(4 * vectors.width)):
        others = block.to(home).double()
        sums = squares + others.square().sum(1)
        # A power of two: it is the same for copies, whose sums may differ in the last bit.
        step = torch.exp2(sums.clamp_min(1e-300).log2().floor() - _BITS)
        near = ((2 * (wide @ others.T) - sums) / step).round() * step
        nearness[:, start : start + len(block)] = near.cpu().numpy()
    if cosine:  # no row is nearer to a vector of zeros than another
        nearness[(squares > FAR_SQUARE)[:, 0].cpu().numpy()] = 0
    return nearness
