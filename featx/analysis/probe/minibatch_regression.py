"""Logistic regression for rows that do not fit into memory: AdamW on mini-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from featx.analysis import gradients
from featx.analysis.probe.batches import StreamedBatches
from featx.analysis.probe.heads import Scaler
from featx.analysis.probe.layer_rows import LayerRows
from featx.analysis.probe.logistic_regression import Fit
from featx.analysis.probe.threads import threads_for

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
