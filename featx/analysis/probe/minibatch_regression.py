"""Logistic regression on mini-batches: of rows that do not fit into memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from featx.analysis import gradients
from featx.analysis.probe.heads import Scaler
from featx.analysis.probe.layer_rows import LayerRows, threads_for
from featx.analysis.probe.logistic_regression import Fit
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


BATCH_ROWS = 256

EPOCHS = 20
"""Number of passes when probe.epochs is not given."""

LEARNING_RATE = 1e-3
"""Learning rate at the first step when probe.learning_rate is not given."""


@dataclass(frozen=True)
class Schedule:
    """Length and learning rate of a training.

    Attributes:
        epochs: number of passes over the rows, or None for the default.
        learning_rate: initial learning rate.
        clip_norm: limit of the L2 norm of a step's gradients.
        seed: seed of the order of rows.
    """

    epochs: int | None
    learning_rate: float
    clip_norm: float
    seed: int

    def rate(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a step, counted from 0: half a cosine that ends at 0."""
        return self.learning_rate * (1 + math.cos(math.pi * step / num_steps)) / 2


@dataclass(frozen=True)
class Streamed:
    """Result of one training.

    Attributes:
        fits: one fit per penalty.
        alarms: texts of the gradient alarms.
    """

    fits: list[Fit]
    alarms: list[str]


class _Candidates(nn.Module):
    """One linear layer per penalty, all applied to the same batch."""

    def __init__(self, count: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.heads = [nn.Linear(width, num_classes) for _ in range(count)]
        self.registered = nn.ModuleList(self.heads)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all layers: (B, D) -> (S, B, C)."""
        return torch.stack([head(x) for head in self.heads])

    def objective(
        self, x: torch.Tensor, labels: torch.Tensor, penalties: torch.Tensor
    ) -> torch.Tensor:
        """Compute mean cross-entropy + penalty/2 |weight|^2 of each layer, (S,)."""
        squares = torch.stack([head.weight.square().sum() for head in self.heads])
        return penalised_losses(self(x), labels, squares, penalties)


def penalised_losses(
    logits: torch.Tensor, labels: torch.Tensor, squares: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    """Compute mean cross-entropy + penalty/2 squares of several classifiers, (S,)."""
    losses = torch.stack([nn.functional.cross_entropy(each, labels) for each in logits])
    return losses + penalties / 2 * squares


def fit_streamed(
    rows: LayerRows,
    places: npt.NDArray[np.int64],
    y: npt.NDArray[np.int64],
    num_classes: int,
    scaler: Scaler,
    strengths: Sequence[float],
    schedule: Schedule,
) -> Streamed:
    """Minimise mean cross-entropy + l2/2 |weight|^2 for all penalties in the same passes.

    The penalty is part of the loss and AdamW's weight decay is off, because the latter is a
    different objective from that of L-BFGS. Each penalty has its own optimizer, so its gradients
    are clipped separately.
    """
    device = scaler.mean.device
    loader = StreamedBatches(rows, places, y, BATCH_ROWS, schedule.seed)
    model = _Candidates(len(strengths), rows.width, num_classes).to(device)
    optimizers = [
        torch.optim.AdamW(head.parameters(), lr=schedule.learning_rate, weight_decay=0.0)
        for head in model.heads
    ]
    penalties = torch.tensor(list(strengths), device=device)
    passes = schedule.epochs or EPOCHS
    num_steps = passes * len(loader)
    batches = itertools.chain.from_iterable(itertools.repeat(loader, passes))
    watched = gradients.watch(model, clip_norm=schedule.clip_norm, layers=[])
    # Callers disable gradients, which the other parts of a probe do not need.
    threads = threads_for(BATCH_ROWS * rows.width, device)
    with torch.enable_grad(), threads, watched as log:
        for step, (vectors, labels) in enumerate(batches):
            x = scaler(vectors.to(device))
            losses = model.objective(x, labels.to(device), penalties)
            model.zero_grad()
            torch.autograd.backward(losses.sum())
            _descend(optimizers, schedule.rate(step, num_steps))
    fits = [
        Fit(head.weight.detach().clone(), head.bias.detach().clone(), None, None, num_steps)
        for head in model.heads
    ]
    return Streamed(fits, [str(alarm) for alarm in log.alarms])


def _descend(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """Take one step of each optimizer with a learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
