"""Mini-batches of rows in random order, from memory or from the store."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Subset

from featx.analysis.probe.layer_rows import LayerRows
from featx.torch import BlockShuffleSampler, FeatureDataset


class Batches(Protocol):
    """Batches of the rows to train on, in another order each time they are iterated over."""

    def __len__(self) -> int:
        """Return the number of batches of a pass."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield vectors (B, D) float32 and classes (B,) int64, on any device."""


class MemoryBatches:
    """Batches of rows in memory.

    Args:
        whole: (N, D) vectors of all places.
        places: (n,) places to train on.
        y: (N,) class of each place.
        batch_rows: B.
        seed: seed of the orders.
    """

    def __init__(
        self,
        whole: torch.Tensor,
        places: npt.NDArray[np.int64],
        y: npt.NDArray[np.int64],
        batch_rows: int,
        seed: int,
    ) -> None:
        self._whole = whole
        self._places = torch.from_numpy(places)
        self._labels = torch.from_numpy(y)
        self._batch_rows = batch_rows
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return math.ceil(len(self._places) / self._batch_rows)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = self._places[torch.randperm(len(self._places), generator=self._generator)]
        for start in range(0, len(order), self._batch_rows):
            places = order[start : start + self._batch_rows]
            yield self._whole[places.to(self._whole.device)], self._labels[places]


class StreamedBatches:
    """Batches of rows that are read from the store.

    Args:
        rows: rows of the store.
        places: indices of the rows to train on.
        y: (len(rows),) class of each row.
        batch_rows: B.
        seed: seed of the orders.
    """

    def __init__(
        self,
        rows: LayerRows,
        places: npt.NDArray[np.int64],
        y: npt.NDArray[np.int64],
        batch_rows: int,
        seed: int,
    ) -> None:
        self._rows = rows
        self._loader = _shuffled_loader(rows, places, batch_rows, seed)
        self._class_of = torch.full((len(rows.store),), -1, dtype=torch.int64)
        self._class_of[torch.from_numpy(rows.rows)] = torch.from_numpy(y)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for values, numbers in self._loader:
            vectors = self._rows.vectors(values)
            self._rows.check(vectors, numbers.numpy())
            yield vectors, self._class_of[numbers]


def _shuffled_loader(
    rows: LayerRows, places: npt.NDArray[np.int64], batch_rows: int, seed: int
) -> DataLoader[tuple[torch.Tensor, int]]:
    """Return a loader of batches of stored values and their rows, reordered in each epoch."""
    dataset = FeatureDataset(rows.store.root, rows.layer)
    items = np.searchsorted(dataset.rows, rows.rows[places])
    sampler = BlockShuffleSampler(Subset(dataset, items.tolist()), seed=seed)
    return DataLoader(_RowNumberDataset(dataset, items), batch_size=batch_rows, sampler=sampler)


class _RowNumberDataset(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Dataset whose items are (feature, row of the store) instead of (feature, label)."""

    def __init__(self, dataset: FeatureDataset, items: npt.NDArray[np.int64]) -> None:
        self._dataset = dataset
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        chosen = self._items[np.asarray(indices)]
        pairs = self._dataset.__getitems__(chosen.tolist())
        numbers = self._dataset.rows[chosen].tolist()
        return [(value, number) for (value, _), number in zip(pairs, numbers, strict=True)]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.__getitems__([index])[0]
