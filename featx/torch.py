"""A store as a torch Dataset."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from featx.store.reader import FeatureStore


class FeatureDataset(Dataset[tuple[torch.Tensor, int]]):
    """The ok rows of one layer with their labels; safe under fork and spawn.

    Args:
        path: the store's folder or its features.h5.
        layer: the dataset's name.

    Items are (feature, label): the row as a tensor in the store's dtype, and its class number, -1
    without one. `rows` tells which row of the store an item is.
    """

    def __init__(self, path: str | os.PathLike[str], layer: str) -> None:
        self.store = FeatureStore(path)
        self.layer = layer
        self.rows = np.flatnonzero(self.store.ok)
        self._features = self.store[layer]
        self._labels = self.store.labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = int(self.rows[index])
        return torch.from_numpy(np.asarray(self._features[row])), int(self._labels[row])

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, Any]]:
        """A whole batch in one read, as DataLoader asks for it."""
        rows = self.rows[indices]
        features = torch.from_numpy(self._features[rows])
        return list(zip(features, self._labels[rows].tolist(), strict=True))
