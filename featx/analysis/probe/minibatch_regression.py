"""The same logistic regression for rows that do not fit into memory: AdamW on mini-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from featx.analysis import gradients
from featx.analysis.probe.heads import Scaler
from featx.analysis.probe.labelled_rows import LayerRows
from featx.analysis.probe.logistic_regression import Fit, threads_for
from featx.torch import BlockShuffleSampler, FeatureDataset

BATCH_ROWS = 256


@dataclass(frozen=True)
class Schedule:
    """How long and how fast AdamW goes."""

    epochs: int
    learning_rate: float
    clip_norm: float
    seed: int

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step, from 0: half a cosine, down to nothing."""
        return self.learning_rate * (1 + math.cos(math.pi * step / num_steps)) / 2


@dataclass(frozen=True)
class Streamed:
    """What came of one training: a fit for each strength, and the alarms on the way."""

    fits: list[Fit]
    alarms: list[str]


class _Candidates(nn.Module):
    """One linear layer for each strength, all fed with the same batch."""

    def __init__(self, count: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.heads = [nn.Linear(width, num_classes) for _ in range(count)]
        self.registered = nn.ModuleList(self.heads)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, D) -> (S, B, C)."""
        return torch.stack([head(x) for head in self.heads])

    def objective(
        self, x: torch.Tensor, labels: torch.Tensor, penalties: torch.Tensor
    ) -> torch.Tensor:
        """(S,) mean cross-entropy + penalty/2 |weight|^2 of (B, D) features and (B,) classes."""
        losses = [nn.functional.cross_entropy(each, labels) for each in self(x)]
        squares = [head.weight.square().sum() for head in self.heads]
        return torch.stack(losses) + penalties / 2 * torch.stack(squares)


def fit_streamed(
    rows: LayerRows,
    places: npt.NDArray[np.int64],
    y: npt.NDArray[np.int64],
    num_classes: int,
    scaler: Scaler,
    strengths: Sequence[float],
    schedule: Schedule,
) -> Streamed:
    """Minimise mean cross-entropy + l2/2 |weight|^2 for every strength in one go over the rows.

    The penalty is part of the loss, and AdamW's own decay is off: it would be another objective
    than L-BFGS has. Each strength has an optimizer of its own, so each is clipped by itself.

    Args:
        rows: of the store.
        places: those of them to train on.
        y: (len(rows),) class of each.
        num_classes: C.
        scaler: fitted on `places`.
        strengths: one fit each.
        schedule: how long and how fast.

    Raises:
        GradientAlarm: a gradient is NaN or infinite.
        StoreError: a value is not finite, though its row is marked ok.
    """
    device = scaler.mean.device
    loader = _shuffled(rows, places, schedule.seed)
    class_of = torch.full((len(rows.store),), -1, dtype=torch.int64)
    class_of[torch.from_numpy(rows.rows)] = torch.from_numpy(y)

    model = _Candidates(len(strengths), rows.width, num_classes).to(device)
    optimizers = [
        torch.optim.AdamW(head.parameters(), lr=schedule.learning_rate, weight_decay=0.0)
        for head in model.heads
    ]
    penalties = torch.tensor(list(strengths), device=device)
    num_steps = schedule.epochs * len(loader)
    batches = itertools.chain.from_iterable(itertools.repeat(loader, schedule.epochs))
    watched = gradients.watch(model, clip_norm=schedule.clip_norm, layers=[])
    # All other parts of a probe need no graph and run without.
    threads = threads_for(BATCH_ROWS * rows.width, device)
    with torch.enable_grad(), threads, watched as log:
        for step, (values, numbers) in enumerate(batches):
            vectors = rows.vectors(values)
            rows.check(vectors, numbers.numpy())
            x, labels = scaler(vectors.to(device)), class_of[numbers].to(device)
            losses = model.objective(x, labels, penalties)
            model.zero_grad()
            torch.autograd.backward(losses.sum())
            _descend(optimizers, schedule.rate(step, num_steps))
    fits = [
        Fit(head.weight.detach().clone(), head.bias.detach().clone(), None, None, num_steps)
        for head in model.heads
    ]
    return Streamed(fits, [str(alarm) for alarm in log.alarms])


def _descend(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """One step of each optimizer at a learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def _shuffled(
    rows: LayerRows, places: npt.NDArray[np.int64], seed: int
) -> DataLoader[tuple[torch.Tensor, int]]:
    """Batches of stored values and the rows they are of, each epoch in another order."""
    dataset = FeatureDataset(rows.store.root, rows.layer)
    items = np.searchsorted(dataset.rows, rows.rows[places])
    sampler = BlockShuffleSampler(Subset(dataset, items.tolist()), seed=seed)
    return DataLoader(_Numbered(dataset, items), batch_size=BATCH_ROWS, sampler=sampler)


class _Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A FeatureDataset whose items say which row of the store they are, instead of a label."""

    def __init__(self, dataset: FeatureDataset, items: npt.NDArray[np.int64]) -> None:
        self._dataset = dataset
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        chosen = self._items[np.asarray(indices)]
        found = self._dataset.__getitems__(chosen.tolist())
        numbers = self._dataset.rows[chosen].tolist()
        return [(value, number) for (value, _), number in zip(found, numbers, strict=True)]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.__getitems__([index])[0]
