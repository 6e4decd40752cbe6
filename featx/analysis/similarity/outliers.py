"""Outliers of a store: rows that are far from their nearest rows, or from those of their class."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.similarity.nearest_neighbours import (
    Neighbours,
    metric_vectors,
    nearest_among,
    origin_numbers,
)
from featx.config import NeighborsConfig
from featx.store import FeatureStore, open_if_path
from featx.types import rows_by_label


@dataclass(frozen=True, eq=False)
class Outliers:
    """Distances of rows to their nearest rows, after each value of a layer was standardised.

    Attributes:
        rows: (n,) int64 rows of the store, in its order.
        distances: (n,) float32 mean distance to the k nearest rows, or to all if there are fewer.
        nearest: (n,) int64 nearest row of each.
        class_distances: (n,) float32 mean distance to the k nearest rows of the same class; NaN
            for a row without a label, or if its class has no other row that counts.
        metric: 'cosine' (the distance is 1 - cosine) or 'euclidean'.
        k: number of neighbours, at most that of the other rows that count.
        left_out: 'image', 'video' or 'image or video' if rows of one are no neighbours of each
            other; None if all are.
    """

    rows: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float32]
    nearest: npt.NDArray[np.int64]
    class_distances: npt.NDArray[np.float32]
    metric: str
    k: int
    left_out: str | None


def find_outliers(
    store: FeatureStore | str | os.PathLike[str],
    layer: str,
    k: int = 10,
    metric: str = "cosine",
    device: str = "auto",
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Outliers:
    """Compute how far each row is from its k nearest rows; the farthest are the outliers.

    Each value is standardised over all rows first. The distances are those of
    sklearn.neighbors.NearestNeighbors on the standardised rows, averaged over the k neighbours.
    Boxes, views and frames of one image or video are no neighbours of each other, unless the store
    has rows of no other.

    Args:
        store: open store or its path; rows that failed are left out.
        layer: name of the layer; a map counts as one long vector.
        k: number of neighbours, limited to the number of other rows.
        metric: 'cosine' or 'euclidean'.
        on_progress: called with the number of rows that are done, twice for labelled rows.

    Raises:
        ConfigError: the metric is unknown, or there is no second row.
        LayerError: the store has no such layer.
    """
    store, k = open_if_path(store), NeighborsConfig(k=k).k
    vectors = metric_vectors(store, layer, metric, device, standardise=True)
    origins, kind = origin_numbers(store, vectors.rows)
    found = nearest_among(vectors, np.arange(len(vectors)), k, metric, on_progress, origins)
    class_distances = np.full(len(vectors), np.nan, np.float32)
    labels = store.labels[vectors.rows]
    labelled = np.flatnonzero(labels >= 0)
    for members in rows_by_label(labels[labelled]):
        places = labelled[members]
        if len(places) > 1:
            own = nearest_among(
                vectors.subset(places),
                np.arange(len(places)),
                k,
                metric,
                on_progress,
                None if origins is None else origins[places],
            )
            class_distances[places] = _mean_distances(own)
        elif on_progress is not None:
            on_progress(1)
    return Outliers(
        rows=vectors.rows,
        distances=_mean_distances(found),
        nearest=found.neighbours[:, 0],
        class_distances=class_distances,
        metric=metric,
        k=int((~np.isnan(found.scores)).sum(1).max()),
        left_out=kind,
    )


def _mean_distances(found: Neighbours) -> npt.NDArray[np.float32]:
    """Return the (q,) mean distances to the neighbours, NaN without one."""
    is_known = ~np.isnan(found.scores)
    sums, counts = found.scores.sum(1, dtype=np.float64, where=is_known), is_known.sum(1)
    means = np.divide(sums, counts, where=counts > 0, out=np.full(len(sums), np.nan))
    distances: npt.NDArray[np.float32] = means.astype(np.float32)
    return 1 - distances if found.metric == "cosine" else distances
