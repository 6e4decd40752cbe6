"""Exact nearest rows, for which all pairs are compared block by block."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.layer_vectors import FAR, LayerRows, LayerVectors
from featx.base import block_sizes, choose_device, float64_device
from featx.config import METRICS, NeighborsConfig, check_choice
from featx.errors import ConfigError
from featx.sources import origins_of
from featx.store import FeatureStore, open_if_path
from featx.types import Array, Status

FAR_SQUARE = (FAR / 2) ** 2
"""Squared length above which a centred vector stands for a vector of zeros; see
`FAR`."""

TIE = 2.0**-32
"""Difference of two squared distances |a - b|^2 up to which they count as equal, relative to
|a|^2 + |a - b|^2. Rounding errors of sums of thousands of products in float64 are far below it."""

LEAST_SQUARE = 2.0**-64
"""Least |a|^2 of `tie_limit` for unit vectors: near the centre, where |a|^2 is 0, vectors of one
direction still differ by the rounding of their lengths."""

_ValuesT = TypeVar("_ValuesT", torch.Tensor, Array)

QUERIES = 8192
"""Maximum number of rows whose neighbours are searched at a time."""


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Nearest rows of some rows.

    Attributes:
        rows: (q,) int64 rows of the store.
        neighbours: (q, k) int64 rows of the store, the nearest first, without the row itself.
        scores: (q, k) float32 cosines in falling order, or Euclidean distances in rising order.
    """

    rows: npt.NDArray[np.int64]
    neighbours: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    metric: str


def nearest_rows(
    store: FeatureStore | str | os.PathLike[str],
    layer: str,
    k: int = 10,
    metric: str = "cosine",
    *,
    key: str | None = None,
    device: str = "auto",
    standardise: bool = True,
    on_progress: Callable[[int], None] | None = None,
) -> Neighbours:
    """Find the k nearest rows of every row, or of one row.

    Rows that failed are left out. Candidates are found by float32 dot products of vectors minus
    their mean. The scores of the k candidates are computed from differences of vectors, so they are
    accurate for nearly equal rows as well. Rows with equal scores are in the order of the store;
    which of them are among the k is undefined.

    Args:
        store: open store or its path.
        layer: name of the layer; a map counts as one long vector.
        k: number of neighbours, limited to the number of other rows.
        metric: 'cosine' (0 with a vector of zeros) or 'euclidean'.
        key: key of one row, or None for all rows.
        standardise: whether each value has its mean over the rows subtracted and is divided by its
            standard deviation first, as by job=neighbors.
        on_progress: called with the number of rows that are done.

    Raises:
        ConfigError: the metric or the key is unknown, the row failed, or there is no second row.
        LayerError: the store has no such layer.
    """
    store, k = open_if_path(store), NeighborsConfig(k=k).k
    row = None if key is None else row_of(store, key)
    vectors = metric_vectors(store, layer, metric, device, standardise)
    every = np.arange(len(vectors))
    places = every if row is None else np.searchsorted(vectors.rows, [row])
    return nearest_among(vectors, places, k, metric, on_progress)


def nearest_among(
    vectors: LayerVectors,
    places: npt.NDArray[np.int64],
    k: int,
    metric: str = "cosine",
    on_progress: Callable[[int], None] | None = None,
    origins: npt.NDArray[np.int64] | None = None,
) -> Neighbours:
    """Find the k nearest of some vectors for a subset of them; see `nearest_rows`. Raises
    ConfigError if there is no second row.

    Args:
        vectors: vectors of a layer, created with centre=True, and with unit=True for cosine.
        places: (q,) int64 places whose neighbours are wanted.
        origins: (n,) number of each vector; those with equal numbers are no neighbours of each
            other. A row with fewer than k neighbours has NaN as the last scores.
    """
    if len(vectors) < 2:
        raise ConfigError(
            f"{vectors.parts[0].store.root} has one ok row only: it has no neighbours."
        )
    cosine = metric == "cosine"
    k = min(k, len(vectors) - 1)
    numbers = None if origins is None else torch.from_numpy(origins).to(vectors.device)
    best_places, scores = [], []
    step = min(QUERIES, vectors.block_rows)
    for start in range(0, len(places), step):
        query_places = places[start : start + step]
        x, queries = vectors.take(query_places), torch.from_numpy(query_places).to(vectors.device)
        best, best_scores = _nearest(vectors, x, queries, k, cosine, numbers)
        if numbers is not None:  # rows that fill up the k come last
            is_same = numbers[best] == numbers[queries][:, None]
            best_scores = best_scores.masked_fill(is_same, torch.nan)
            order = is_same.byte().sort(dim=1, stable=True).indices
            best, best_scores = best.gather(1, order), best_scores.gather(1, order)
        best_places.append(best.cpu().numpy())
        scores.append(best_scores.cpu().numpy())
        if on_progress is not None:
            on_progress(len(queries))
    return Neighbours(
        vectors.rows[places],
        vectors.rows[np.concatenate(best_places)],
        np.concatenate(scores),
        metric,
    )


def nearest_to(
    store: FeatureStore | str | os.PathLike[str],
    layer: str,
    features: Array,
    k: int = 10,
    metric: str = "cosine",
    *,
    device: str = "auto",
    standardise: bool = True,
    projection: npt.NDArray[np.float32] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Find the k nearest rows of features that are not rows of the store; see `nearest_rows`.

    Args:
        store: open store or its path.
        features: (q, ...) finite rows of this layer, as `featx.embed` computes them.
        k: number of neighbours, limited to the number of rows.
        projection: (D, P) matrix by which the (n, D) rows of the store are multiplied first, into
            the space of (q, P) features; None if they are in it.

    Returns:
        (q, k) int64 rows of the store and (q, k) float32 scores, the nearest first.

    Raises:
        ConfigError: the metric is unknown, or the features have another shape or are not finite.
        LayerError: the store has no such layer.
    """
    store, k, features = open_if_path(store), NeighborsConfig(k=k).k, np.asarray(features)
    shape = tuple(store[layer].shape[1:])
    compared = features if projection is None else projection.T
    if compared.shape[1:] != shape or not np.isfinite(features).all():
        raise ConfigError(
            f"features have the shape {compared.shape}; expected finite numbers of the shape "
            f"({', '.join(map(str, ('n', *shape)))}), as {layer} of {store.root} has them."
        )
    vectors = metric_vectors(store, layer, metric, device, standardise, projection=projection)
    rows = torch.from_numpy(features).to(vectors.device).to(torch.float32)
    x = vectors.prepare(rows.reshape(len(rows), vectors.width))
    no_places = torch.full((len(x),), -1, dtype=torch.int64, device=vectors.device)
    k = min(k, len(vectors))
    places, scores = _nearest(vectors, x, no_places, k, metric == "cosine")
    return vectors.rows[places.cpu().numpy()], scores.cpu().numpy()


def origin_numbers(
    store: FeatureStore, rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64] | None, str | None]:
    """Number the images and videos that rows were taken from.

    Return (n,) numbers, and 'image', 'video' or 'image or video'; or None and None if no two rows
    have one in common, or all have the same.
    """
    origins, kind = origins_of(store.key_bytes[rows])
    numbers = np.unique(origins, return_inverse=True)[1]
    if kind is None or len(rows) == 0 or numbers.max() in (0, len(rows) - 1):
        return None, None
    return numbers, kind


def metric_vectors(
    store: FeatureStore,
    layer: str,
    metric: str,
    device: str,
    standardise: bool,
    rows: npt.NDArray[np.int64] | None = None,
    projection: npt.NDArray[np.float32] | None = None,
    dtype: torch.dtype = torch.float32,
) -> LayerVectors:
    """Return the vectors of a layer as a search by a metric needs them."""
    check_choice("metric", metric, METRICS)
    chosen = choose_device(device)
    return LayerVectors(
        [LayerRows(store, layer, np.flatnonzero(store.ok) if rows is None else rows)],
        float64_device(chosen) if dtype == torch.float64 else chosen,
        unit=metric == "cosine",
        centre=True,
        standardise=standardise,
        projection=projection,
        dtype=dtype,
    )


def tie_limit(distances: _ValuesT, squares: _ValuesT) -> _ValuesT:
    """Return the largest squared distances that count as equal to some of a row with |a|^2."""
    return distances + TIE * (squares + distances)


def row_of(store: FeatureStore, key: str) -> int:
    """Return the row of a key."""
    try:
        row = store.row(key)
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from error
    if not store.ok[row]:
        reason = Status(int(store.status[row])).label
        raise ConfigError(f"{key} has no features: its row {row} is recorded as {reason}.")
    return row


def _best_of_blocks(
    scored_blocks: Iterable[tuple[torch.Tensor, torch.Tensor]],
    query_places: torch.Tensor,
    k: int,
    origins: torch.Tensor | None,
) -> torch.Tensor:
    """Select the (q, k) places with the best scores of many queries over blocks of candidates."""
    none, device = (len(query_places), 0), query_places.device
    best = torch.full(none, -torch.inf, dtype=torch.float32, device=device)
    places = torch.zeros(none, dtype=torch.int64, device=device)
    for block_places, scores in scored_blocks:
        if origins is None:
            columns = torch.searchsorted(block_places, query_places)
            columns = columns.clamp_max(len(block_places) - 1)
            in_block = (block_places[columns] == query_places).nonzero()[:, 0]
            scores[in_block, columns[in_block]] = -torch.inf
        else:
            scores[origins[query_places][:, None] == origins[block_places]] = -torch.inf
        top = scores.topk(min(k, scores.shape[1]), dim=1)
        places = torch.cat([places, block_places[top.indices]], dim=1)
        best, order = torch.cat([best, top.values], dim=1).topk(
            min(k, best.shape[1] + top.values.shape[1]), dim=1
        )
        places = places.gather(1, order)
    return places


def _nearest(
    vectors: LayerVectors,
    x: torch.Tensor,
    query_places: torch.Tensor,
    k: int,
    cosine: bool,
    origins: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, k) places and (q, k) scores of the rows nearest to (q, D) vectors. Rows of the
    same origin are among them only if there are too few others.
    """
    num_scores = block_sizes.BLOCK_BYTES // 2  # of two blocks, in float32
    home = float64_device(x.device)
    block_rows = min(vectors.block_rows, max(1, num_scores // max(1, len(x))))

    def scored_blocks(
        queries: torch.Tensor, in_float64: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the places of a block, and their scores; a larger score is nearer."""
        for start, block in vectors.all_blocks(block_rows):
            if in_float64:
                wide, wide_block = queries.to(home).double(), block.to(home).double()
                scores = -torch.cdist(wide, wide_block).to(queries)
            else:
                # -|x - y|^2 + |x|^2: the term |x|^2 is the same for all y and does not change the
                # order.
                squares = (block * block).sum(1)
                scores = torch.addmm(-squares, queries, block.T, alpha=2)
                if cosine and (squares > FAR_SQUARE).any():  # vectors of zeros: cosine 0
                    zero_scores = (queries * queries).sum(1, keepdim=True) - 2
                    scores = torch.where(squares > FAR_SQUARE, zero_scores, scores)
            yield torch.arange(start, start + len(block), device=x.device), scores

    places = _best_of_blocks(scored_blocks(x, in_float64=False), query_places, k, origins)
    if not cosine:
        # The scores have the rounding of |x|^2 in float32, which hides much smaller distances.
        is_lost = 4 * _distances(vectors, x, places[:, -1:])[:, 0] < x.norm(dim=1)
        if is_lost.any():
            blocks = scored_blocks(x[is_lost], in_float64=True)
            places[is_lost] = _best_of_blocks(blocks, query_places[is_lost], k, origins)
    return sort_neighbours(vectors, x, places, cosine)


def sort_neighbours(
    vectors: LayerVectors, x: torch.Tensor, places: torch.Tensor, cosine: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the final scores and sort neighbours: the nearest first, equal ones by row. Return
    (q, k) places and scores.
    """
    scores = distances = _distances(vectors, x, places)
    if cosine:
        is_zero = (distances > FAR / 2) | ((x * x).sum(1, keepdim=True) > FAR_SQUARE)
        distances[is_zero] = math.sqrt(2)  # a cosine of 0
        scores = (1 - distances * distances / 2).clamp(-1, 1).masked_fill(is_zero, 0)
    places, order = places.sort(dim=1)
    distances, scores = distances.gather(1, order), scores.gather(1, order)
    # Sorted by distance, which distinguishes rows whose cosines are all 1 in float32.
    order = distances.sort(dim=1, stable=True).indices
    return places.gather(1, order), scores.gather(1, order) * vectors.scale


def _distances(vectors: LayerVectors, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Compute the distances between (q, D) vectors and the vectors at (q, k) places, as (q, k)."""
    distances = torch.empty(places.shape, dtype=torch.float32, device=x.device)
    step = max(1, vectors.block_rows // places.shape[1])
    for start in range(0, len(x), step):
        part = places[start : start + step]
        neighbours = vectors.at(part.reshape(-1)).reshape(*part.shape, vectors.width)
        distances[start : start + step] = (neighbours - x[start : start + step, None]).norm(dim=2)
    return distances
