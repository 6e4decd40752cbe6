"""Outliers: rows that are far from their nearest rows, in the data set and in their class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.similarity.nearest_neighbours import (
    Neighbours,
    metric_vectors,
    nearest_among,
)
from featx.store import FeatureStore


@dataclass(frozen=True)
class Outliers:
    """Distances of rows to their nearest rows, after each value of a layer was standardised.

    Attributes:
        rows: (n,) int64 rows of the store, in its order.
        distances: (n,) float32 mean distance to the k nearest rows.
        nearest: (n,) int64 nearest row of each.
        class_distances: (n,) float32 mean distance to the k nearest rows of the same class; NaN
            for a row without a label, or without another row of its class.
        metric: 'cosine' (the distance is 1 - cosine) or 'euclidean'.
    """

    rows: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float32]
    nearest: npt.NDArray[np.int64]
    class_distances: npt.NDArray[np.float32]
    metric: str
    k: int


def find_outliers(
    store: FeatureStore,
    layer: str,
    k: int = 10,
    metric: str = "cosine",
    device: str = "auto",
    on_progress: Callable[[int], None] = lambda rows: None,
) -> Outliers:
    """Compute how far each row is from its k nearest rows; the farthest are the outliers.

    Each value is standardised over all rows first. The distances are those of
    sklearn.neighbors.NearestNeighbors on the standardised rows, averaged over the k neighbours.

    Args:
        store: open store; rows that failed are left out.
        layer: name of the layer; a map counts as one long vector.
        k: number of neighbours, limited to the number of other rows.
        metric: 'cosine' or 'euclidean'.
        on_progress: called with the number of rows that are done, twice for labelled rows.

    Raises:
        ConfigError: the metric is unknown, or there is no second row.
        LayerError: the store has no such layer.
    """
    vectors = metric_vectors(store, layer, metric, device, standardise=True)
    found = nearest_among(vectors, np.arange(len(vectors)), k, metric, on_progress)
    class_distances = np.full(len(vectors), np.nan, np.float32)
    labels = store.labels[vectors.rows]
    for label in np.unique(labels[labels >= 0]).tolist():
        places = np.flatnonzero(labels == label)
        if len(places) > 1:
            own = nearest_among(
                vectors.subset(places), np.arange(len(places)), k, metric, on_progress
            )
            class_distances[places] = _mean_distances(own)
        else:
            on_progress(1)
    return Outliers(
        rows=vectors.rows,
        distances=_mean_distances(found),
        nearest=found.neighbours[:, 0],
        class_distances=class_distances,
        metric=metric,
        k=found.neighbours.shape[1],
    )


def _mean_distances(found: Neighbours) -> npt.NDArray[np.float32]:
    """Return the mean distance of each row to its neighbours, (q,)."""
    means: npt.NDArray[np.float32] = found.scores.mean(1, dtype=np.float64).astype(np.float32)
    return 1 - means if found.metric == "cosine" else means
