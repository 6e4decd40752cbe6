"""Nearest rows with faiss: approximate, with far fewer comparisons.

Exact search with faiss spends its time in the same dot products as `nearest_rows`
(docs/performance.md). For very many rows, comparing with only a part of them pays off: k-means
assigns the vectors to lists, and the neighbours of a row are searched in the lists with the nearest
centres (IVF: Sivic and Zisserman, Video Google, ICCV 2003; as in Johnson, Douze and Jegou,
Billion-scale similarity search with GPUs, 2019). Vectors are stored uncompressed, so the scores of
the neighbours that are found are exact.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.similarity.nearest_neighbours import (
    QUERIES,
    Neighbours,
    metric_vectors,
    nearest_among,
    sort_neighbours,
)
from featx.base import block_sizes, import_extra
from featx.config import NeighborsConfig
from featx.errors import ConfigError
from featx.store import FeatureStore, open_if_path

NUM_SAMPLED_ROWS = 1000
"""Number of random rows that choose how many lists are searched. The recall is then measured on as
many other rows."""

TRAINING_ROWS_PER_LIST = 64
"""Training vectors of k-means per list."""

NUM_STANDARD_ERRORS = 2.0
"""Standard errors by which the recall on the sample must exceed the requested recall."""

TIE_TOLERANCE = 1e-6
"""Difference of scores that counts as rounding; a neighbour within it is as near as the exact
one."""


class RowIndex:
    """Index of the rows of a layer that finds a requested share of their nearest rows.

    Args:
        store: open store or its path; rows that failed are left out.
        layer: name of the layer; a map counts as one long vector.
        recall: requested share of the k nearest rows, above 0 and below 1. Enough lists are
            searched to exceed it by NUM_STANDARD_ERRORS standard errors on NUM_SAMPLED_ROWS random
            rows.
        k: number of neighbours, limited to the number of other rows.
        metric: 'cosine' or 'euclidean'.
        seed: seed of k-means and of both samples.
        device: device of the exact search for the samples; faiss itself uses the CPU.
        standardise: as of `nearest_rows`.

    Attributes:
        recall: share measured on rows other than those that chose the number of lists. It may be
            slightly below the requested share.
        num_measured_rows: number of these rows.
        num_lists: number of lists, about 4 sqrt(n).
        num_probed_lists: number of lists that are searched per row.

    Raises:
        MissingExtraError: faiss is not installed.
        ConfigError: the metric is unknown, the recall is out of range, or there is no second row.
        LayerError: the store has no such layer.
    """

    def __init__(
        self,
        store: FeatureStore | str | os.PathLike[str],
        layer: str,
        recall: float,
        k: int = 10,
        metric: str = "cosine",
        *,
        seed: int = 0,
        device: str = "auto",
        standardise: bool = True,
    ) -> None:
        self._faiss = import_extra("faiss", "neighbors.recall", "the package faiss", "faiss")
        store, k = open_if_path(store), NeighborsConfig(recall=recall, k=k).k
        self._metric, self._cosine = metric, metric == "cosine"
        self._vectors = metric_vectors(store, layer, metric, device, standardise)
        if len(self._vectors) < 2:
            raise ConfigError(f"{store.root} has one ok row only: it has no neighbours.")
        self._k = min(k, len(self._vectors) - 1)
        rng = np.random.default_rng([seed, 4])
        num_kept = min(len(self._vectors), block_sizes.KEEP_BYTES // (4 * self._vectors.width))
        max_lists = num_kept // TRAINING_ROWS_PER_LIST
        num_lists = min(round(4 * math.sqrt(len(self._vectors))), max_lists)
        self.num_lists, self.num_probed_lists = max(1, num_lists), 1
        self._index = self._build(rng, seed)
        samples = rng.permutation(len(self._vectors))[: 2 * NUM_SAMPLED_ROWS]
        self._choose_num_probed_lists(recall, samples)

    def nearest_rows(self, on_progress: Callable[[int], None] | None = None) -> Neighbours:
        """Search the nearest rows of every row.

        A row for which the lists hold fewer than k others is searched exactly, so every row has k
        neighbours.
        """
        places = np.arange(len(self._vectors))
        step, parts = min(QUERIES, self._vectors.block_rows), list[Neighbours]()
        for start in range(0, len(places), step):
            parts.append(self._search(places[start : start + step]))
            if on_progress is not None:
                on_progress(len(parts[-1].rows))
        neighbours = np.concatenate([part.neighbours for part in parts])
        scores = np.concatenate([part.scores for part in parts])
        return Neighbours(self._vectors.rows, neighbours, scores, self._metric)

    def as_dict(self) -> dict[str, float | int]:
        """Measured recall and numbers of lists as JSON types."""
        return {
            "recall": self.recall,
            "measured_on": self.num_measured_rows,
            "lists": self.num_lists,
            "probed_lists": self.num_probed_lists,
        }

    def _choose_num_probed_lists(self, recall: float, samples: npt.NDArray[np.int64]) -> None:
        """Choose the number of lists to search, and measure the recall."""
        half = len(samples) // 2
        exact = nearest_among(self._vectors, samples, self._k, self._metric).scores
        while self.num_probed_lists < self.num_lists:
            recalls = self._recalls(samples[:half], exact[:half])
            if recalls.mean() - NUM_STANDARD_ERRORS * recalls.std() / math.sqrt(half) >= recall:
                break
            self.num_probed_lists = min(
                self.num_lists, self.num_probed_lists + max(1, self.num_probed_lists // 4)
            )
        self.recall = float(self._recalls(samples[half:], exact[half:]).mean())
        self.num_measured_rows = len(samples) - half

    def _build(self, rng: np.random.Generator, seed: int) -> Any:
        """Build an index of faiss with all vectors: IndexFlat for one list, else IndexIVFFlat."""
        vectors, faiss = self._vectors, self._faiss
        faiss.omp_set_num_threads(torch.get_num_threads())
        kind = faiss.METRIC_L2  # also for cosines: the order of unit vectors is the same
        if self.num_lists == 1:
            index = faiss.index_factory(vectors.width, "Flat", kind)
        else:
            index = faiss.index_factory(vectors.width, f"IVF{self.num_lists},Flat", kind)
            index.cp.seed = seed % (1 << 31)
            places = np.sort(
                rng.permutation(len(vectors))[: self.num_lists * TRAINING_ROWS_PER_LIST]
            )
            index.train(vectors.take(places).cpu().numpy())
        for _, block in vectors.all_blocks(vectors.block_rows):
            index.add(block.cpu().numpy())
        return index

    def _search(self, places: npt.NDArray[np.int64]) -> Neighbours:
        """Search the nearest rows of the vectors at some places."""
        if self.num_lists > 1:
            self._index.nprobe = self.num_probed_lists
        vectors, k = self._vectors, self._k
        x = vectors.take(places)
        _, neighbour_places = self._index.search(x.cpu().numpy(), k + 1)
        # A row is its own nearest neighbour: move it to the end and drop the last entry. If the
        # index did not find the row itself, this drops the worst neighbour.
        is_itself = neighbour_places == places[:, None]
        order = np.argsort(is_itself, axis=1, kind="stable")[:, :k]
        neighbour_places = np.take_along_axis(neighbour_places, order, 1)
        incomplete = np.flatnonzero((neighbour_places < 0).any(1))
        neighbour_places[incomplete] = 0  # placeholder; these rows are searched again below
        candidates = torch.from_numpy(neighbour_places).to(vectors.device)
        sorted_places, sorted_scores = sort_neighbours(vectors, x, candidates, self._cosine)
        rows, scores = vectors.rows[sorted_places.cpu().numpy()], sorted_scores.cpu().numpy()
        if len(incomplete):
            # The searched lists hold fewer than k other rows.
            exact = nearest_among(vectors, places[incomplete], k, self._metric)
            rows[incomplete], scores[incomplete] = exact.neighbours, exact.scores
        return Neighbours(vectors.rows[places], rows, scores, self._metric)

    def _recalls(
        self, places: npt.NDArray[np.int64], exact: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float64]:
        """Compute the recall of each place: the share of its neighbours that are near enough.

        A neighbour counts if it is at least as near as the k-th neighbour of exact search.
        """
        scores = self._search(places).scores
        last = exact[:, -1:]
        is_near = (
            scores >= last - TIE_TOLERANCE if self._cosine else scores <= last * (1 + TIE_TOLERANCE)
        )
        recalls: npt.NDArray[np.float64] = is_near.mean(1)
        return recalls
