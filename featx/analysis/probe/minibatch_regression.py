"""Logistic regression on mini-batches: of rows that do not fit into memory, and of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from featx.analysis import gradients
from featx.analysis.probe.heads import Attention, Head, Scaler
from featx.analysis.probe.layer_rows import LayerRows, Tokens, threads_for
from featx.analysis.probe.logistic_regression import Fit
from featx.analysis.probe.metrics import Ints
from featx.errors import RunError
from featx.torch import BlockShuffleSampler, FeatureDataset

BATCH_ROWS, TOKEN_BATCH_ROWS = 256, 64
"""Rows of a batch: of vectors, and of tokens."""

LEARNING_RATE, TOKEN_LEARNING_RATE = 1e-3, 1e-2
"""Learning rates at the first step when probe.learning_rate is not given."""

EPOCHS = 20
"""Number of passes when probe.epochs is not given."""

MIN_STEPS = 1000
"""Minimum number of steps on tokens when probe.epochs is not given; few rows are passed over more
often."""


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


class Batches(Protocol):
    """Batches of the rows to train on, in another order each time they are iterated over."""

    def __len__(self) -> int:
        """Return the number of batches of a pass."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield vectors (B, D) float32 and classes (B,) int64, on any device."""


class MemoryBatches:
    """Batches of some of the (N, D) vectors in memory, with the (N,) classes `y`."""

    def __init__(
        self, whole: torch.Tensor, places: Ints, y: Ints, batch_rows: int, seed: int
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
    """Batches of some rows of a store, with the (n,) classes `y` of all of `rows`."""

    def __init__(self, rows: LayerRows, places: Ints, y: Ints, batch_rows: int, seed: int) -> None:
        self._rows = rows
        dataset = FeatureDataset(rows.store.root, rows.layer)
        items = np.searchsorted(dataset.rows, rows.rows[places])
        sampler = BlockShuffleSampler(Subset(dataset, items.tolist()), seed=seed)
        self._loader = DataLoader(
            _RowNumberDataset(dataset, items), batch_size=batch_rows, sampler=sampler
        )
        self._class_of = torch.full((len(rows.store),), -1, dtype=torch.int64)
        self._class_of[torch.from_numpy(rows.rows)] = torch.from_numpy(y)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for values, numbers in self._loader:
            vectors = self._rows.vectors(values)
            self._rows.check(vectors, numbers.numpy())
            yield vectors, self._class_of[numbers]


class _RowNumberDataset(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Dataset whose items are (feature, row of the store) instead of (feature, label)."""

    def __init__(self, dataset: FeatureDataset, items: Ints) -> None:
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


def _train(
    objective: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Batches,
    passes: int,
    learning_rate: float,
    clip: Callable[[int], None] | None = None,
) -> int:
    """Minimise the objective of several classifiers in the same passes; returns the steps.

    The learning rate falls with half a cosine, which ends at 0. AdamW treats every number by
    itself. Its own decay is off, because the penalty is part of the objective.
    """
    num_steps = passes * len(batches)
    every = itertools.chain.from_iterable(itertools.repeat(batches, passes))
    with torch.enable_grad():  # callers disable gradients, which other parts do not need
        for step, (rows, labels) in enumerate(every):
            losses = objective(rows, labels)
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.autograd.backward(losses.sum())
            if clip is not None:
                clip(step)
            rate = learning_rate * (1 + math.cos(math.pi * step / num_steps)) / 2
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
    return num_steps


def _penalised_losses(
    logits: torch.Tensor, labels: torch.Tensor, squares: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    """Compute mean cross-entropy + penalty/2 squares of several classifiers, (S,)."""
    losses = torch.stack([nn.functional.cross_entropy(each, labels) for each in logits])
    return losses + penalties / 2 * squares


# ---------------------------------------------------------------------------- vectors


@dataclass(frozen=True)
class Streamed:
    """One fit per penalty, and the texts of the gradient alarms."""

    fits: list[Fit]
    alarms: list[str]


class _Candidates(nn.ModuleList):
    """One linear layer per penalty, all applied to the same batch: (B, D) -> (S, B, C)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self])


def fit_streamed(
    rows: LayerRows,
    places: Ints,
    y: Ints,
    num_classes: int,
    scaler: Scaler,
    strengths: Sequence[float],
    schedule: Schedule,
) -> Streamed:
    """Minimise mean cross-entropy + l2/2 |weight|^2 for all penalties in the same passes.

    Each penalty has its own optimizer, so its gradients are clipped separately.
    """
    device = scaler.mean.device
    batches = StreamedBatches(rows, places, y, BATCH_ROWS, schedule.seed)
    layers = [nn.Linear(rows.width, num_classes).to(device) for _ in strengths]
    model = _Candidates(layers)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    penalties = torch.tensor(list(strengths), device=device)

    def objective(vectors: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = scaler(vectors.to(device))
        squares = torch.stack([layer.weight.square().sum() for layer in layers])
        return _penalised_losses(model(x), labels.to(device), squares, penalties)

    rate = schedule.learning_rate
    optimizers = [torch.optim.AdamW(each.parameters(), rate, weight_decay=0.0) for each in layers]
    watched = gradients.watch(model, clip_norm=schedule.clip_norm, layers=[])
    with threads_for(BATCH_ROWS * rows.width, device), watched as log:
        num_steps = _train(objective, optimizers, batches, schedule.epochs or EPOCHS, rate)
    fits = [
        Fit(layer.weight.detach().clone(), layer.bias.detach().clone(), None, None, num_steps)
        for layer in layers
    ]
    return Streamed(fits, [str(alarm) for alarm in log.alarms])


# ---------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Training:
    """One head per penalty, and the number of steps."""

    heads: list[Head]
    num_steps: int


def fit_attentive(
    tokens: Tokens,
    places: Ints,
    y: Ints,
    num_classes: int,
    scaler: Scaler,
    strengths: Sequence[float],
    schedule: Schedule,
) -> Training:
    """Minimise mean cross-entropy + l2/2 (|W|^2 + |q|^2) for all penalties in the same passes.

    For a row with standardised tokens z_1 ... z_T, the logits are W sum_t a_t z_t + b with a =
    softmax_t(z_t . q / sqrt(D)). This is the cross-attention layer with one query of the attentive
    probe of V-JEPA (A. Bardes et al., Revisiting Feature Prediction for Learning Visual
    Representations from Video, TMLR 2024). We differ: there is one head, in which the projections
    of keys and values are contained in q and W, and neither a residual MLP nor layer normalisation
    follows, so that q = 0 is the linear probe of the mean token. The start is W = 0, b = 0, q = 0,
    so that nothing is random but the order of the rows.
    """
    features, device, count = tokens.features, tokens.device, len(strengths)
    batches: Batches
    if features.whole is not None:
        batches = MemoryBatches(features.whole, places, y, TOKEN_BATCH_ROWS, schedule.seed)
    else:
        rows = features.parts[0]  # training rows are in the first store
        of_rows = y[: len(rows.rows)]
        batches = StreamedBatches(rows, places, of_rows, TOKEN_BATCH_ROWS, schedule.seed)
    shapes = (count, num_classes, tokens.width), (count, num_classes), (count, tokens.width)
    weight, bias, query = (nn.Parameter(torch.zeros(each, device=device)) for each in shapes)
    penalties = torch.tensor(list(strengths), device=device)

    def objective(values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        z = scaler(tokens.layout.tokens(values.to(device)))
        attention = (z @ query.T / math.sqrt(tokens.width)).softmax(1)
        pooled = torch.einsum("bts,btd->sbd", attention, z)
        logits = torch.baddbmm(bias[:, None], pooled, weight.transpose(1, 2))
        squares = weight.square().sum((1, 2)) + query.square().sum(1)
        return _penalised_losses(logits, labels.to(device), squares, penalties)

    def clip(step: int) -> None:
        """Limit the norm of the gradient of each classifier."""
        grads = [each.grad for each in (weight, bias, query) if each.grad is not None]
        norms = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
        if not bool(norms.isfinite().all()):
            raise RunError(
                f"probe.method=attentive: the gradient in step {step} is not finite. Lower "
                "probe.learning_rate, or look for extreme values with job=stats."
            )
        factors = (schedule.clip_norm / norms.clamp(min=schedule.clip_norm)).to(norms)
        for grad in grads:
            grad.mul_(factors.view(-1, *[1] * (grad.ndim - 1)))

    rate = schedule.learning_rate
    optimizer = torch.optim.AdamW([weight, bias, query], rate, weight_decay=0.0)
    passes = schedule.epochs or max(EPOCHS, math.ceil(MIN_STEPS / len(batches)))
    with threads_for(TOKEN_BATCH_ROWS * tokens.layout.count * tokens.width, device):
        num_steps = _train(objective, [optimizer], batches, passes, rate, clip)
    heads = [
        Head(
            scaler,
            weight[i].detach().clone(),
            bias[i].detach().clone(),
            probabilities=True,
            attention=Attention(query[i].detach().clone(), tokens.layout),
        )
        for i in range(count)
    ]
    return Training(heads, num_steps)
