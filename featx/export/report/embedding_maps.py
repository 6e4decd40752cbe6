"""Two-dimensional maps of the rows of a layer: principal components and t-SNE."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.probe import BLOCK_BYTES, Labelled, layer_rows
from featx.errors import ReduceError, StoreError
from featx.store import FeatureStore

COMPONENTS = 50
"""Maximum number of principal components that t-SNE uses as input."""

PERPLEXITY = 30

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerMap:
    """Maps of one layer.

    Attributes:
        name: name of the dataset.
        width: number of values of the vector that a row becomes.
        pooled: whether rows are averaged over their positions for that.
        pca: (n, 2) float64 scores of the first two components, or None without a map.
        explained: share of the variance of each of the two, in [0, 1].
        tsne: (n, 2) float64, or None.
        note: reason why something is missing, or ''.
    """

    name: str
    width: int
    pooled: bool
    pca: Matrix | None
    explained: tuple[float, float]
    tsne: Matrix | None
    note: str


def layer_map(
    store: FeatureStore, layer: str, rows: npt.NDArray[np.int64], seed: int, tsne: bool
) -> LayerMap:
    """Map some rows of a layer, with vectors made as in job=probe.

    Args:
        store: open store.
        layer: name of the layer.
        rows: (n,) int64, increasing; rows that did not fail.
        seed: seed of t-SNE.
        tsne: whether to compute t-SNE.
    """
    width = int(np.prod(store[layer].shape[1:], dtype=np.int64))
    if len(rows) < 4:
        return LayerMap(layer, width, False, None, (0, 0), None, f"{len(rows)} rows make no map.")
    try:
        taken = layer_rows(Labelled(store, rows, store.labels[rows], store.classes, ()), layer)
        # Blocks are limited by the size of stored rows, which may be much larger than the vectors.
        step = max(1, BLOCK_BYTES // (4 * max(1, width)))
        blocks = np.array_split(np.arange(len(rows)), -(-len(rows) // step))
        vectors = np.concatenate([taken.read(places).numpy() for places in blocks])
    except (ReduceError, StoreError) as error:
        return LayerMap(layer, width, False, None, (0, 0), None, str(error))
    pooled = taken.pooled is not None
    scores, shares = principal_components(vectors, COMPONENTS)
    if not shares.sum() > 0:
        same = "All selected rows have the same vector."
        return LayerMap(layer, taken.width, pooled, None, (0, 0), None, same)
    explained = float(shares[0]), float(shares[1]) if len(shares) > 1 else 0.0
    plane = np.zeros((len(rows), 2))
    plane[:, : scores.shape[1]] = scores[:, :2]
    embedded = _tsne(scores, plane, seed) if tsne else None
    return LayerMap(layer, taken.width, pooled, plane, explained, embedded, "")


def principal_components(x: npt.NDArray[np.floating], count: int) -> tuple[Matrix, Matrix]:
    """Compute the first k principal components of the rows of a matrix in float64.

    They come from the eigenvectors of the smaller of X^T X and X X^T. The sign of a component makes
    its score of largest magnitude positive.

    Args:
        x: (n, D), with any mean.
        count: maximum of k; there are at most min(n, D) components.

    Returns:
        (n, k) scores and (k,) shares of the variance.
    """
    centred = x.astype(np.float64)
    centred -= centred.mean(0)
    n, width = centred.shape
    k = min(count, n, width)
    if width <= n:
        values, vectors = np.linalg.eigh(centred.T @ centred)
        scores = centred @ vectors[:, ::-1][:, :k]
    else:
        values, vectors = np.linalg.eigh(centred @ centred.T)
        scores = vectors[:, ::-1][:, :k] * np.sqrt(values[::-1][:k].clip(0))
    values = values[::-1].clip(0)
    scale = float((x.astype(np.float64) ** 2).sum())
    if values.sum() <= 1e-20 * scale:  # rounding errors only
        return np.zeros((n, k)), np.zeros(k)
    largest = scores[np.abs(scores).argmax(0), np.arange(k)]
    return scores * np.where(largest < 0, -1.0, 1.0), values[:k] / values.sum()


def _tsne(scores: Matrix, plane: Matrix, seed: int) -> Matrix:
    """Compute (n, 2) t-SNE with scikit-learn from principal components.

    The first two components are the initial positions.

    L. van der Maaten, G. Hinton, Visualizing Data using t-SNE, JMLR 9 (2008).
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    start = plane / max(float(plane[:, 0].std()), 1e-300) * 1e-4
    perplexity = min(PERPLEXITY, (len(scores) - 1) / 3)
    model = TSNE(perplexity=perplexity, init=start.astype(np.float32), random_state=seed)
    # t-SNE takes a thousand short steps. On a busy machine, threads that wait for each other take 2
    # to 18 times as long as a single one.
    with threadpool_limits(1):
        embedded = model.fit_transform(scores.astype(np.float32))
    return np.asarray(embedded, np.float64)
