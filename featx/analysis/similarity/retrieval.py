"""Retrieval: how often the nearest rows of a row have its class, as recall@k and mAP."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.layer_vectors import LayerVectors
from featx.base import choose_device, float64_device
from featx.store import FeatureStore

RECALL_AT = (1, 5, 10)
"""Numbers k of the nearest rows among which recall@k looks for the class."""

MAX_RANKED = 10_000
"""Number of rows up to which mAP is computed, which sorts all rows for each of them."""

_BLOCK_NUMBERS = 1 << 22
"""Number of scores in memory at a time."""


def retrieval_metrics(
    store: FeatureStore, layer: str, metric: str, device: str
) -> dict[str, Any] | None:
    """Retrieve the other labelled rows for each labelled row, by nearness.

    recall@k is the share of queries with a row of their class among the k nearest (H. Jegou et al.,
    Product Quantization for Nearest Neighbor Search, TPAMI 2011); rows of other classes that are as
    near count as nearer. mAP is the mean over queries of the average precision of their ranking, as
    scikit-learn's label_ranking_average_precision_score. A query whose class has no other row is
    left out, but is among the rows that others retrieve. With cosine, vectors of zeros come last.

    Rows are as near as each other if their squared distances |a - b|^2, computed in float64 from
    float32 vectors of D values, differ by no more than their rounding, (D + 4) 2^-52 (|a|^2 +
    |b|^2) each. So copies are as near as each other.

    Args:
        store: open store.
        layer: name of the layer; a map counts as one long vector.
        metric: 'cosine' or 'euclidean'.
        device: 'auto', 'cpu', 'cuda', ...

    Returns:
        queries; queries_left_out; recall, k -> share; map, None if it is not available, and
        not_available, the reason or None. None if no class has two rows.
    """
    labels = np.asarray(store.labels)
    rows = np.flatnonzero(store.ok & (labels >= 0))
    labels = labels[rows]
    counts = np.bincount(labels) if len(labels) else np.zeros(1, np.int64)
    queries = np.flatnonzero(counts[labels] > 1)
    if not len(queries):
        return None
    vectors = LayerVectors(
        store, layer, choose_device(device), rows, unit=metric == "cosine", centre=True
    )
    reason = _why_no_map(len(rows))
    num_nearer, precisions = [], []
    block_rows = max(1, _BLOCK_NUMBERS // len(rows))
    for start in range(0, len(queries), block_rows):
        places = queries[start : start + block_rows]
        scores, rounding = _ranking(vectors, places)
        itself = np.arange(len(places)), places
        scores[itself] = -np.inf
        same = labels[places][:, None] == labels
        same[itself] = False
        nearest = np.where(same, scores - rounding, -np.inf).max(1, keepdims=True)
        num_nearer.append(((scores + rounding >= nearest) & ~same).sum(1))
        if reason is None:
            precisions.append(len(places) * _mean_average_precision(same, scores, rounding))
    ranks = np.concatenate(num_nearer)
    return {
        "queries": len(queries),
        "queries_left_out": len(rows) - len(queries),
        "recall": {str(k): float((ranks < k).mean()) for k in RECALL_AT if k < len(rows)},
        "map": None if reason is not None else float(sum(precisions) / len(queries)),
        "not_available": reason,
    }


def _why_no_map(num_rows: int) -> str | None:
    """Return the reason why mAP is not computed, or None."""
    if importlib.util.find_spec("sklearn") is None:
        return 'scikit-learn is not installed: pip install "featx[evaluation]"'
    if num_rows > MAX_RANKED:
        return f"{num_rows} labelled rows are more than {MAX_RANKED}"
    return None


def _mean_average_precision(
    same: npt.NDArray[np.bool_],
    scores: npt.NDArray[np.float64],
    rounding: npt.NDArray[np.float64],
) -> float:
    """Return the mean average precision of the rows of a block."""
    from sklearn.metrics import label_ranking_average_precision_score

    # The query itself comes last, behind all rows of its class, and changes no precision.
    return float(label_ranking_average_precision_score(same, _ranks(scores, rounding)))


def _ranks(
    scores: npt.NDArray[np.float64], rounding: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Number the scores of each row from the smallest; equal ones have the same number.

    Scores that follow each other are equal if the intervals given by their errors overlap.
    """
    order = np.argsort(scores, axis=1)
    ordered, errors = (np.take_along_axis(each, order, 1) for each in (scores, rounding))
    is_larger = ordered[:, 1:] - errors[:, 1:] > ordered[:, :-1] + errors[:, :-1]
    ranks = np.zeros(scores.shape, np.int64)
    np.put_along_axis(ranks, order[:, 1:], np.cumsum(is_larger, axis=1), 1)
    return ranks


def _ranking(
    vectors: LayerVectors, places: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Compute the nearness of all rows to some rows, and its largest errors.

    A sum of D products in float64 has an error of at most D 2^-53 times the sum of their
    magnitudes, in any order, and 2 |a . b| is at most |a|^2 + |b|^2 (N. J. Higham, Accuracy and
    Stability of Numerical Algorithms, 2002, chapter 3). Products of float32 values are exact.
    """
    query_vectors = vectors.at(torch.from_numpy(places).to(vectors.device))
    home = float64_device(vectors.device)
    wide = query_vectors.to(home).double()
    squares = wide.square().sum(1, keepdim=True)
    share = (vectors.width + 4) * np.finfo(np.float64).eps
    nearness = np.empty((len(places), len(vectors)))
    errors = np.empty_like(nearness)
    for start, block in vectors.blocks(vectors.rows_of(64 << 20)):
        block_vectors = block.to(home).double()
        sums = squares + block_vectors.square().sum(1)
        near = 2 * (wide @ block_vectors.T) - sums
        nearness[:, start : start + len(block)] = near.cpu().numpy()
        errors[:, start : start + len(block)] = (share * sums).cpu().numpy()
    return nearness, errors
