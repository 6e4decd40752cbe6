"""What the report says of layers: statistics of their values, embedding plots, and similarity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis import float_blocks
from featx.analysis.probe import crop_of, probe_rows
from featx.analysis.similarity import layer_similarity
from featx.analysis.statistics import Moments, feature_axis
from featx.base import one_blas_thread, rows_of_block
from featx.errors import ConfigError, ReduceError, StoreError
from featx.layers import RowLayout, channel_axis, is_heat_map
from featx.store import FeatureStore
from featx.types import Array

COMPONENTS = 50
"""Maximum number of principal components that t-SNE uses as input."""

PERPLEXITY = 30
"""Perplexity of t-SNE for 91 rows or more."""

NEAREST = 10
"""Number of neighbours of which the share with the same class is computed."""

CKA_ROWS = 1000
"""Maximum number of images of which layers are compared; the work grows with its square."""

Matrix = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


def layer_statistics(store: FeatureStore, layer: str, rows: Rows) -> dict[str, object]:
    """Compute the statistics of the finite values of a layer over some rows, in float64. Return
    name, shape (of a row), stored (dtype, capture and reduction as text), norms (minimum, quartiles
    and maximum of the L2 norms of finite rows, or None), mean, std, smallest, largest, zeros (share
    of values that are exactly 0), channels, dead (channels that are 0 at every position of every
    row), what ('channels', or 'numbers' if the channel axis is unknown) and nonfinite (count).
    """
    features = store[layer]
    axis, kind_of_channels = _channels(store, layer)
    width = int(np.prod(features.shape[1:], dtype=np.int64))
    zeros, nonfinite, moments = 0, 0, Moments.empty(1, "diagonal")
    alive = np.zeros(features.shape[axis] if axis else width, bool)
    norms = []
    for values in float_blocks(store, layer, rows):
        finite = np.isfinite(values)
        bad = values.size - int(finite.sum())
        nonfinite += bad
        kept = values[finite] if bad else values
        zeros += int((kept == 0).sum())
        moments = moments.merge(Moments.of(torch.from_numpy(kept.reshape(-1, 1)), "diagonal"))
        channel_values = np.moveaxis(values, axis, -1) if axis else values.reshape(len(values), -1)
        alive |= (channel_values != 0).reshape(-1, channel_values.shape[-1]).any(0)
        is_finite = finite.reshape(len(values), -1).all(1)
        flat = values.reshape(len(values), -1)[is_finite].astype(np.float64)
        norms.append(np.sqrt(np.einsum("nd,nd->n", flat, flat)))
    all_norms, count = np.concatenate(norms), moments.count
    quartiles = [0, 0.25, 0.5, 0.75, 1]
    return {
        "name": layer,
        "shape": tuple(features.shape[1:]),
        "stored": _stored(store, layer),
        "norms": tuple(np.quantile(all_norms, quartiles).tolist()) if len(all_norms) else None,
        "mean": float(moments.mean) if count else float("nan"),
        "std": float(moments.std(ddof=0)) if count else float("nan"),
        "smallest": float(moments.smallest),
        "largest": float(moments.largest),
        "zeros": zeros / count if count else float("nan"),
        "channels": len(alive),
        "dead": int((~alive).sum()),
        "what": kind_of_channels,
        "nonfinite": nonfinite,
    }


def _channels(store: FeatureStore, layer: str) -> tuple[int, str]:
    """Return the channel axis of (n, ...) rows and 'channels', or 0 and 'numbers' if unknown."""
    shape, crop, places = tuple(store[layer].shape[1:]), crop_of(store), store[layer].tokens
    axis = None if places is None else feature_axis(shape, places)
    if axis is not None:
        return axis, "channels"
    attrs = store[layer].attrs
    if (len(shape) == 3 and crop is None) or is_heat_map(shape, attrs.get("capture", "output")):
        return 0, "numbers"
    reduced = str(attrs.get("reduce", ""))
    try:
        return channel_axis(reduced, RowLayout(layer, shape, crop or (1, 1))), "channels"
    except ReduceError:
        return 0, "numbers"


def _stored(store: FeatureStore, layer: str) -> str:
    attrs = store[layer].attrs
    capture, reduced = str(attrs.get("capture", "")), str(attrs.get("reduce", ""))
    parts = [str(store[layer].dtype)]
    parts += [capture] if capture not in ("", "output") else []
    parts += [reduced] if reduced not in ("", "none") else []
    return ", ".join(parts)


@dataclass(frozen=True)
class RowVectors:
    """Vectors (n, D) of some rows of a layer, made as in job=probe, or `note`, the reason why there
    are none. `width` is D, or the number of values of a row without vectors.
    """

    layer: str
    x: npt.NDArray[np.float32] | None
    width: int
    pooled: bool
    note: str


def row_vectors(store: FeatureStore, layer: str, rows: npt.NDArray[np.int64]) -> RowVectors:
    """Read the vectors of some rows."""
    width = int(np.prod(store[layer].shape[1:], dtype=np.int64))
    if len(rows) < 4:
        return RowVectors(layer, None, width, False, "a plot needs 4 rows or more.")
    try:
        vectors = probe_rows(store, layer, rows)
        x = vectors.read(np.arange(len(rows))).numpy()
    except (ReduceError, StoreError) as error:
        return RowVectors(layer, None, width, False, str(error))
    return RowVectors(layer, x, vectors.width, vectors.pooled is not None, "")


def layer_plot(
    vectors: RowVectors,
    labels: npt.NDArray[np.int64],
    images: npt.NDArray[np.int64],
    seed: int,
    tsne: bool,
) -> dict[str, Any]:
    """Compute the embedding plot of a layer. Return name, width and pooled as of `vectors`; pca
    ((n, 2) float64 scores of the first two components, or None), explained (share of the variance
    of each), directions (number of components that hold 90 % of the variance, or None), tsne ((n,
    2) float64, or None), mean_same_class (mean of `same_class_shares`, or None) and note (why
    something is missing).
    """
    plot = {
        "name": vectors.layer,
        "width": vectors.width,
        "pooled": vectors.pooled,
        "pca": None,
        "explained": (0, 0),
        "directions": None,
        "tsne": None,
        "mean_same_class": None,
        "note": vectors.note,
    }
    if vectors.x is None:
        return plot
    scores, shares = principal_scores(vectors.x, COMPONENTS)
    if not shares.sum() > 0:
        return {**plot, "note": "All selected rows have the same vector."}
    plane = np.zeros((len(scores), 2))
    plane[:, : scores.shape[1]] = scores[:, :2]
    same_class = same_class_shares(vectors.x, labels, images)
    return {
        **plot,
        "pca": plane,
        "explained": (float(shares[0]), float(shares[1]) if len(shares) > 1 else 0.0),
        # The last sum of the shares may miss 1 by rounding errors.
        "directions": min(len(shares), int(np.searchsorted(np.cumsum(shares), 0.9)) + 1),
        "tsne": _tsne(scores, plane, seed) if tsne else None,
        "mean_same_class": (None if np.isnan(same_class).all() else float(np.nanmean(same_class))),
    }


def same_class_shares(
    x: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], images: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the share of the NEAREST labelled rows that have the class of each row.

    Nearness is the cosine of values standardised over the labelled rows. Other rows of an image or
    video, which have an equal number in `images`, do not count. A row without a label (-1) has NaN.
    """
    shares = np.full(len(labels), np.nan)
    labelled = np.flatnonzero(labels >= 0)
    count = min(NEAREST, len(labelled) - 1)
    if count < 1:
        return shares
    unit = standardised_units(x[labelled].astype(np.float64))
    classes, images = labels[labelled], images[labelled]
    step = rows_of_block(4 * len(labelled))
    for start in range(0, len(labelled), step):
        cosines = unit[start : start + step] @ unit.T
        cosines[images[start : start + step, None] == images] = -np.inf
        nearest = np.argpartition(-cosines, count - 1, axis=1)[:, :count]
        is_other = np.isfinite(np.take_along_axis(cosines, nearest, axis=1))
        same = is_other & (classes[nearest] == classes[start : start + step, None])
        num_others = np.where(is_other.any(1), is_other.sum(1), np.nan)
        shares[labelled[start : start + step]] = same.sum(1) / num_others
    return shares


def standardised_units(x: Array) -> Array:
    """Standardise the columns of (n, D) values, and divide each row by its length.

    Columns of one value and rows of zeros stay zero.
    """
    spread = x.std(0, dtype=np.float64)
    unit: Array = x - x.mean(0, dtype=np.float64).astype(x.dtype)
    unit /= np.where(spread > 0, spread, 1).astype(x.dtype)
    lengths = np.linalg.norm(unit, axis=1, keepdims=True)
    unit /= np.where(lengths > 0, lengths, 1)
    return unit


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

    # t-SNE does not depend on the scale of its input, but scikit-learn's float32 squares and its
    # search for the perplexity do.
    spread = max(float(plane[:, 0].std()), 1e-300)
    start = plane / spread * 1e-4
    model = TSNE(
        perplexity=perplexity_of(len(scores)), init=start.astype(np.float32), random_state=seed
    )
    # t-SNE takes a thousand short steps. On a busy machine, threads that wait for each other take 2
    # to 18 times as long as a single one.
    with one_blas_thread(), threadpool_limits(1, user_api="openmp"):
        embedded = model.fit_transform((scores / spread).astype(np.float32))
    return np.asarray(embedded, np.float64)


def similarity_of(
    store: FeatureStore, layers: tuple[str, ...], rows: int, seed: int, device: str
) -> dict[str, object]:
    """Compare layers by debiased linear CKA over random images.

    Returns layers, debiased (table of the values, None if undefined), rows, and note (why there is
    no comparison).
    """
    nothing = {"layers": layers, "debiased": [], "rows": 0}
    if len(layers) < 2:
        return {**nothing, "note": "There is only one layer, so none can be compared."}
    try:
        similarity = layer_similarity(
            store,
            None,
            layers,
            num_rows=min(rows, CKA_ROWS),
            seed=seed,
            device=device,
            measures=["cka_debiased"],
        )
    except ConfigError as error:
        return {**nothing, "note": str(error)}
    debiased = [
        [None if np.isnan(value) else round(value, 4) for value in row]
        for row in similarity.measures["cka_debiased"].tolist()
    ]
    return {
        "layers": similarity.layers,
        "debiased": debiased,
        "rows": similarity.num_rows,
        "note": "",
    }
