"""Rows of a layer in two dimensions, by PCA and t-SNE, and similar rows among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.probe import BLOCK_BYTES, LabelledRows, layer_vectors
from featx.errors import ReduceError, StoreError
from featx.store import FeatureStore

COMPONENTS = 50
"""Maximum number of principal components that t-SNE uses as input."""

PERPLEXITY = 30
"""Perplexity of t-SNE for 91 rows or more."""

Matrix = npt.NDArray[np.float64]


NEAREST = 10
"""Number of neighbours of which the share with the same class is computed."""

_BLOCK_NUMBERS = 1 << 24
"""Number of cosines in memory at a time."""


@dataclass(frozen=True)
class RowVectors:
    """Vectors of some rows of a layer, made as in job=probe.

    Attributes:
        layer: name of the layer.
        x: (n, D) float32, or None if there are none.
        width: D, or the number of values of a row without vectors.
        pooled: whether rows were averaged over their positions.
        note: reason why there are none, or ''.
    """

    layer: str
    x: npt.NDArray[np.float32] | None
    width: int
    pooled: bool
    note: str


@dataclass(frozen=True)
class LayerPlot:
    """Embedding plot of one layer, and measurements of its vectors.

    Attributes:
        name: name of the dataset.
        width: number of values of the vector of a row.
        pooled: whether rows are averaged over their positions for that.
        pca: (n, 2) float64 scores of the first two components, or None without a plot.
        explained: share of the variance of each of the two, in [0, 1].
        directions: number of components that hold 90 % of the variance, or None without a plot.
        tsne: (n, 2) float64, or None.
        same_class: (n,) share of the NEAREST rows of the same class for each row, NaN without a
            label; None without a plot or labels.
        note: reason why something is missing, or ''.
    """

    name: str
    width: int
    pooled: bool
    pca: Matrix | None
    explained: tuple[float, float]
    directions: int | None
    tsne: Matrix | None
    same_class: npt.NDArray[np.float64] | None
    note: str

    @property
    def mean_same_class(self) -> float | None:
        """Mean of `same_class` over the rows with a label, or None."""
        if self.same_class is None or np.isnan(self.same_class).all():
            return None
        return float(np.nanmean(self.same_class))


def row_vectors(store: FeatureStore, layer: str, rows: npt.NDArray[np.int64]) -> RowVectors:
    """Read the vectors of some rows."""
    width = int(np.prod(store[layer].shape[1:], dtype=np.int64))
    if len(rows) < 4:
        return RowVectors(layer, None, width, False, f"{len(rows)} rows are too few for a plot.")
    try:
        vectors = layer_vectors(
            LabelledRows(store, rows, store.labels[rows], store.classes, ()), layer
        )
        # Blocks are limited by the size of stored rows, which may be much larger than the vectors.
        step = max(1, BLOCK_BYTES // (4 * max(1, width)))
        blocks = np.array_split(np.arange(len(rows)), -(-len(rows) // step))
        x = np.concatenate([vectors.read(places).numpy() for places in blocks])
    except (ReduceError, StoreError) as error:
        return RowVectors(layer, None, width, False, str(error))
    return RowVectors(layer, x, vectors.width, vectors.pooled is not None, "")


def layer_plot(
    vectors: RowVectors, labels: npt.NDArray[np.int64], seed: int, tsne: bool
) -> LayerPlot:
    """Compute the embedding plot of a layer."""
    name, width, pooled = vectors.layer, vectors.width, vectors.pooled
    if vectors.x is None:
        return LayerPlot(name, width, pooled, None, (0, 0), None, None, None, vectors.note)
    scores, shares = principal_scores(vectors.x, COMPONENTS)
    if not shares.sum() > 0:
        same = "All selected rows have the same vector."
        return LayerPlot(name, width, pooled, None, (0, 0), None, None, None, same)
    explained = float(shares[0]), float(shares[1]) if len(shares) > 1 else 0.0
    # The last sum of the shares may miss 1 by rounding errors.
    directions = min(len(shares), int(np.searchsorted(np.cumsum(shares), 0.9)) + 1)
    plane = np.zeros((len(scores), 2))
    plane[:, : scores.shape[1]] = scores[:, :2]
    embedded = _tsne(scores, plane, seed) if tsne else None
    same_class = same_class_shares(vectors.x, labels) if (labels >= 0).any() else None
    return LayerPlot(name, width, pooled, plane, explained, directions, embedded, same_class, "")


def same_class_shares(
    x: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the share of the NEAREST labelled rows, by cosine, that have the class of each row.

    A row without a label, which is -1, has NaN.
    """
    shares = np.full(len(labels), np.nan)
    labelled = np.flatnonzero(labels >= 0)
    count = min(NEAREST, len(labelled) - 1)
    if count < 1:
        return shares
    unit = x[labelled].astype(np.float64)
    lengths = np.linalg.norm(unit, axis=1, keepdims=True)
    unit /= np.where(lengths > 0, lengths, 1)
    classes = labels[labelled]
    step = max(1, _BLOCK_NUMBERS // len(labelled))
    for start in range(0, len(labelled), step):
        cosines = unit[start : start + step] @ unit.T
        places = np.arange(len(cosines))
        cosines[places, start + places] = -np.inf
        nearest = np.argpartition(-cosines, count - 1, axis=1)[:, :count]
        same = classes[nearest] == classes[start : start + step, None]
        shares[labelled[start : start + step]] = same.mean(1)
    return shares


def principal_scores(x: npt.NDArray[np.floating], count: int) -> tuple[Matrix, Matrix]:
    """Compute the scores of the rows of a matrix on its first principal components, in float64.

    Returns (n, k) scores, and the shares of the variance of all components.

    They come from the eigenvectors of the smaller of X^T X and X X^T. A plot needs no directions;
    `featx.analysis.statistics.covariance` computes these from moments, and makes the largest entry
    of each positive. Here the score of largest magnitude of each component is positive.
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
        return np.zeros((n, k)), np.zeros(min(n, width))
    largest = scores[np.abs(scores).argmax(0), np.arange(k)]
    return scores * np.where(largest < 0, -1.0, 1.0), values[: min(n, width)] / values.sum()


def perplexity_of(num_rows: int) -> float:
    """Return the perplexity of t-SNE, which has to be below the number of rows."""
    return min(PERPLEXITY, (num_rows - 1) / 3)


def _tsne(scores: Matrix, plane: Matrix, seed: int) -> Matrix:
    """Compute (n, 2) t-SNE with scikit-learn from principal components.

    The first two components are the initial positions.

    L. van der Maaten, G. Hinton, Visualizing Data using t-SNE, JMLR 9 (2008).
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    start = plane / max(float(plane[:, 0].std()), 1e-300) * 1e-4
    model = TSNE(
        perplexity=perplexity_of(len(scores)), init=start.astype(np.float32), random_state=seed
    )
    # t-SNE takes a thousand short steps. On a busy machine, threads that wait for each other take 2
    # to 18 times as long as a single one.
    with threadpool_limits(1):
        embedded = model.fit_transform(scores.astype(np.float32))
    return np.asarray(embedded, np.float64)
