"""Nearest rows by faiss: exactly, or far less work and a share of them is missed.

Exact search by faiss spends its time in the same products as `neighbours` (docs/performance.md).
What pays for very many rows is to look at a part of them only. k-means deals the vectors out to
lists, and a row's neighbours are looked for in the lists whose centres are nearest to it (IVF:
Sivic and Zisserman, Video Google, ICCV 2003; as in Johnson, Douze and Jegou, Billion-scale
similarity search with GPUs, 2019). Vectors are kept whole, so the scores of what is found are
exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.similarity import row_vectors as sizes
from featx.analysis.similarity.nearest_neighbours import (
    QUERIES,
    Neighbours,
    in_order,
    nearest_among,
)
from featx.analysis.similarity.row_vectors import Vectors
from featx.base.devices import choose_device
from featx.config import METRICS, check_choice
from featx.errors import ConfigError, MissingExtraError
from featx.store.reader import FeatureStore

SAMPLE = 1000
"""Rows on which it is decided how many lists are looked at, and as many others on which the recall
is then measured."""

ROWS_OF_A_LIST = 64
"""Vectors that k-means takes for each list."""

MARGIN = 2.0

TIE = 1e-6
"""A score that is worse by no more than this is as good: products are rounded."""


class RowIndex:
    """An index of the ok rows of a layer that finds about a share of their nearest rows.

    Args:
        store: open for reading.
        layer: its name; a map counts as one long vector.
        recall: the share of the k nearest rows that is wanted, above 0, up to 1. As many lists
            are looked at as give it on SAMPLE random rows, with MARGIN standard errors to spare;
            for 1 there are no lists, and every pair is looked at.
        k: at most as many as there are other rows.
        metric: cosine or euclidean.
        seed: of k-means and of both samples.
        device: of the exact search for the samples; faiss itself uses the CPU.

    Attributes:
        recall: what was measured on other rows than those used to choose; it may be a little less
            than was wanted.
        measured_on: number of these rows, none for exact search.
        lists: all of them, about 4 sqrt(n).
        looked_at: lists that are looked at for a row.

    Raises:
        MissingExtraError: faiss is not installed.
        ConfigError: no such metric, a recall out of range, or there is no other row.
        LayerError: no such layer.
    """

    def __init__(
        self,
        store: FeatureStore,
        layer: str,
        recall: float,
        k: int = 10,
        metric: str = "cosine",
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self._faiss = _faiss()
        check_choice("metric", metric, METRICS)
        if not 0 < recall <= 1:
            raise ConfigError(f"recall={recall}: expected a share above 0, up to 1.")
        self._cosine = metric == "cosine"
        device_ = choose_device(device)
        self._vectors = Vectors(store, layer, device_, unit=self._cosine, centre=True)
        if len(self._vectors) < 2:
            raise ConfigError(f"{store.root} has one ok row only: it has no neighbours.")
        self._k = min(k, len(self._vectors) - 1)
        rng = np.random.default_rng([seed, 4])
        known = min(len(self._vectors), self._vectors.rows_of(sizes.KEEP_BYTES))
        lists = min(round(4 * math.sqrt(len(self._vectors))), known // ROWS_OF_A_LIST)
        self.lists = 1 if recall == 1 else max(1, lists)
        self.looked_at, self.recall, self.measured_on = 1, 1.0, 0
        self._index = self._built(rng, seed)
        if recall < 1:
            self._choose(recall, rng.permutation(len(self._vectors))[: 2 * SAMPLE])

    def nearest_rows(self, tell: Callable[[int], None] = lambda rows: None) -> Neighbours:
        """The nearest rows of every ok row, as far as they are found: k of each all the same.

        Args:
            tell: is told of every block how many rows are done.
        """
        places = np.arange(len(self._vectors))
        found = [np.empty((0, self._k), np.int64)]
        scores = [np.empty((0, self._k), np.float32)]
        step = min(QUERIES, self._vectors.rows_of(sizes.BLOCK_BYTES))
        for start in range(0, len(places), step):
            part = self._search(places[start : start + step])
            found.append(part.neighbours)
            scores.append(part.scores)
            tell(len(part.rows))
        return Neighbours(
            self._vectors.rows, np.concatenate(found), np.concatenate(scores), self._metric
        )

    @property
    def about(self) -> dict[str, float | int]:
        """What was measured, in JSON types."""
        return {
            "recall": self.recall,
            "measured_on": self.measured_on,
            "lists": self.lists,
            "looked_at": self.looked_at,
        }

    @property
    def _metric(self) -> str:
        return "cosine" if self._cosine else "euclidean"

    def _choose(self, recall: float, samples: npt.NDArray[np.int64]) -> None:
        """How many lists are looked at, by the first half of some places; the rest measures it."""
        half = len(samples) // 2
        exact = nearest_among(self._vectors, samples, self._k, self._metric).scores
        while self.looked_at < self.lists:
            shares = self._shares(samples[:half], exact[:half])
            if shares.mean() - MARGIN * shares.std() / math.sqrt(half) >= recall:
                break
            self.looked_at = min(self.lists, self.looked_at + max(1, self.looked_at // 4))
        self.recall = float(self._shares(samples[half:], exact[half:]).mean())
        self.measured_on = len(samples) - half

    def _built(self, rng: np.random.Generator, seed: int) -> Any:
        """An index of faiss that holds all vectors: IndexFlat for one list, else IndexIVFFlat."""
        vectors, faiss = self._vectors, self._faiss
        faiss.omp_set_num_threads(torch.get_num_threads())
        kind = faiss.METRIC_L2  # of unit vectors, too: cosines are told by their distances
        if self.lists == 1:
            index = faiss.index_factory(vectors.width, "Flat", kind)
        else:
            index = faiss.index_factory(vectors.width, f"IVF{self.lists},Flat", kind)
            index.cp.seed = seed % (1 << 31)
            chosen = np.sort(rng.permutation(len(vectors))[: self.lists * ROWS_OF_A_LIST])
            rows = vectors.at(torch.from_numpy(chosen).to(vectors.device))
            index.train(rows.cpu().numpy())
        for _, block in vectors.blocks(vectors.rows_of(sizes.BLOCK_BYTES)):
            index.add(block.cpu().numpy())
        return index

    def _search(self, places: npt.NDArray[np.int64]) -> Neighbours:
        """The nearest rows of the vectors at some places."""
        if self.lists > 1:
            self._index.nprobe = self.looked_at
        vectors, k = self._vectors, self._k
        queries = torch.from_numpy(places).to(vectors.device)
        x = vectors.at(queries)
        _, at = self._index.search(x.cpu().numpy(), k + 1)
        # The row itself goes last; where it was not found, the worst one goes.
        own = at == places[:, None]
        order = np.argsort(own, axis=1, kind="stable")[:, :k]
        at = np.take_along_axis(at, order, 1)
        short = np.flatnonzero((at < 0).any(1))
        at[short] = 0  # any place will do; they are searched again below
        found_at = torch.from_numpy(at).to(vectors.device)
        ordered, given = in_order(vectors, x, found_at, self._cosine)
        rows, found = vectors.rows[ordered.cpu().numpy()], given.cpu().numpy()
        if len(short):
            # The lists that were looked at hold fewer than k other rows.
            exact = nearest_among(vectors, places[short], k, self._metric)
            rows[short], found[short] = exact.neighbours, exact.scores
        return Neighbours(vectors.rows[places], rows, found, self._metric)

    def _shares(
        self, places: npt.NDArray[np.int64], exact: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float64]:
        """(q,) of each place the share of the k nearest, or of others as near, that was found."""
        found = self._search(places).scores
        last = exact[:, -1:]
        near = found >= last - TIE if self._cosine else found <= last * (1 + TIE)
        shares: npt.NDArray[np.float64] = near.mean(1)
        return shares


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError(
            'similar.recall needs the package faiss: pip install "featx[faiss]".'
        ) from error
    return faiss
