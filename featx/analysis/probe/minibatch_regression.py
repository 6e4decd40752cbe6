"""Logistic regression on mini-batches: of rows that do not fit into memory, and of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from featx.analysis.layer_vectors import LayerVectors, as_vectors
from featx.analysis.probe.heads import Attention, Head, Scaler
from featx.analysis.probe.layer_rows import Problem, threads_for
from featx.analysis.probe.logistic_regression import Fit
from featx.analysis.probe.metrics import Ints
from featx.errors import RunError
from featx.torch import BlockShuffleSampler, FeatureDataset

BATCH_ROWS, TOKEN_BATCH_ROWS = 256, 64
"""Rows of a batch: of vectors, and of tokens."""

LEARNING_RATE, TOKEN_LEARNING_RATE = 1e-3, 1e-2
"""Learning rates at the first step when probe.learning_rate is not given."""

CLIP_NORM = 1.0
"""Largest norm of the gradients of a step."""

EPOCHS = 20
"""Number of passes when probe.epochs is not given."""

MIN_STEPS = 1000
"""Minimum number of steps on tokens when probe.epochs is not given; few rows are passed over more
often."""


class Batches:
    """Batches of the rows to train on, in another order in each pass. Streamed features are those
    of the first store only; `y` holds the classes of all its places.
    """

    def __init__(
        self, features: LayerVectors, places: Ints, y: Ints, batch_rows: int, seed: int
    ) -> None:
        self._rows, self._whole = features.parts[0], features.whole
        self._places, self._batch_rows = places, batch_rows
        self._y = torch.from_numpy(y)
        self._generator = torch.Generator().manual_seed(seed)
        if self._whole is None:
            self._dataset = FeatureDataset(self._rows.store.root, self._rows.layer)
            self._items = np.searchsorted(self._dataset.rows, self._rows.rows[places])
            items = Subset(self._dataset, self._items.tolist())
            self._sampler = BlockShuffleSampler(items, seed=seed)

    def __len__(self) -> int:
        return math.ceil(len(self._places) / self._batch_rows)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield vectors (B, D) float32 and classes (B,) int64, on any device."""
        if self._whole is None:
            order = torch.tensor(list(self._sampler))
        else:
            order = torch.randperm(len(self._places), generator=self._generator)
        for chosen in torch.split(order, self._batch_rows):
            places = torch.from_numpy(self._places[chosen.numpy()])
            if self._whole is None:
                vectors = self._read(self._items[chosen.numpy()], places.numpy())
            else:
                vectors = self._whole[places.to(self._whole.device)]
            yield vectors, self._y[places]

    def _read(self, items: Ints, places: Ints) -> torch.Tensor:
        values = torch.stack([value for value, _ in self._dataset.__getitems__(items.tolist())])
        vectors = as_vectors(values, self._rows.pooled)
        self._rows.check(vectors, self._rows.rows[places])
        return vectors


def _train(
    logits_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    parameters: Sequence[nn.Parameter],
    strengths: Sequence[float],
    batches: Batches,
    passes: int,
    rate: float,
) -> int:
    """Minimise cross-entropy + l2/2 squares for S penalties in the same passes; returns the steps.

    `logits_of` returns the logits (S, B, C) of a batch and the sums of squares (S,). The first axis
    of each parameter is that of the penalties, whose gradients are clipped separately. The learning
    rate falls with half a cosine, which ends at 0. AdamW treats every number by itself. Its own
    decay is off, because the penalty is part of the objective.
    """
    num_steps = passes * len(batches)
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
    penalties = torch.tensor(list(strengths), dtype=torch.float32, device=parameters[0].device)
    every = itertools.chain.from_iterable(itertools.repeat(batches, passes))
    with torch.enable_grad():  # callers disable gradients, which other parts do not need
        for step, (rows, labels) in enumerate(every):
            logits, squares = logits_of(rows)
            labels = labels.to(logits.device)
            means = torch.stack([nn.functional.cross_entropy(each, labels) for each in logits])
            optimizer.zero_grad()
            torch.autograd.backward((means + penalties / 2 * squares).sum())
            _clip(parameters, step)
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 + math.cos(math.pi * step / num_steps)) / 2
            optimizer.step()
    return num_steps


def _clip(parameters: Sequence[nn.Parameter], step: int) -> None:
    """Limit the norm of the gradient of each classifier."""
    grads = [each.grad for each in parameters if each.grad is not None]
    norms = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
    if not bool(norms.isfinite().all()):
        raise RunError(
            f"the gradient in step {step} of the probe is not finite. Lower "
            "probe.learning_rate, or look for extreme values with job=stats."
        )
    factors = (CLIP_NORM / norms.clamp(min=CLIP_NORM)).to(norms)
    for grad in grads:
        grad.mul_(factors.view(-1, *[1] * (grad.ndim - 1)))


def _parameters(*shapes: tuple[int, ...], device: torch.device) -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device)) for shape in shapes
    ]


def fit_streamed(
    problem: Problem, places: Ints, scaler: Scaler, strengths: Sequence[float]
) -> list[Fit]:
    """Minimise mean cross-entropy + l2/2 |weight|^2 for all penalties in the same passes."""
    device, options = scaler.mean.device, problem.options
    count, num_classes, width = len(strengths), problem.num_outputs, problem.features.width
    batches = Batches(problem.features, places, problem.y, BATCH_ROWS, problem.seed)
    weight, bias = _parameters((count, num_classes, width), (count, num_classes), device=device)

    def logits_of(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = scaler(vectors.to(device)) @ weight.transpose(1, 2) + bias[:, None]
        return logits, weight.square().sum((1, 2))

    passes, rate = options.epochs or EPOCHS, options.learning_rate or LEARNING_RATE
    with threads_for(BATCH_ROWS * width, device):
        num_steps = _train(logits_of, [weight, bias], strengths, batches, passes, rate)
    pairs = zip(weight.detach(), bias.detach(), strict=True)
    return [Fit(one.clone(), other.clone(), None, None, num_steps) for one, other in pairs]


def fit_attentive(
    problem: Problem, places: Ints, scaler: Scaler, strengths: Sequence[float]
) -> tuple[list[Head], int]:
    """Minimise mean cross-entropy + l2/2 (|W|^2 + |q|^2) for all penalties in the same passes.
    Return a head for each, and the number of steps.

    For a row with standardised tokens z_1 ... z_T, the logits are W sum_t a_t z_t + b with a =
    softmax_t(z_t . q / sqrt(D)). This is the cross-attention layer with one query of the attentive
    probe of V-JEPA (A. Bardes et al., Revisiting Feature Prediction for Learning Visual
    Representations from Video, TMLR 2024). We differ: there is one head, in which the projections
    of keys and values are contained in q and W, and neither a residual MLP nor layer normalisation
    follows, so that q = 0 is the linear probe of the mean token. The start is W = 0, b = 0, q = 0,
    so that nothing is random but the order of the rows.
    """
    tokens, options, num_classes = problem.tokens, problem.options, problem.num_outputs
    assert tokens is not None, "the probe checks the layers of an attentive probe"
    device, count, width = tokens.device, len(strengths), tokens.width
    batches = Batches(tokens.features, places, problem.y, TOKEN_BATCH_ROWS, problem.seed)
    shapes = (count, num_classes, width), (count, num_classes), (count, width)
    weight, bias, query = _parameters(*shapes, device=device)

    def logits_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = scaler(tokens.layout.tokens(values.to(device)))
        attention = (z @ query.T / math.sqrt(width)).softmax(1)
        pooled = torch.einsum("bts,btd->sbd", attention, z)
        logits = torch.baddbmm(bias[:, None], pooled, weight.transpose(1, 2))
        return logits, weight.square().sum((1, 2)) + query.square().sum(1)

    passes = options.epochs or max(EPOCHS, math.ceil(MIN_STEPS / len(batches)))
    parameters, rate = [weight, bias, query], options.learning_rate or TOKEN_LEARNING_RATE
    with threads_for(TOKEN_BATCH_ROWS * tokens.layout.count * width, device):
        num_steps = _train(logits_of, parameters, strengths, batches, passes, rate)
    parts = zip(weight.detach(), bias.detach(), query.detach(), strict=True)
    heads = [
        Head(scaler, w.clone(), b.clone(), True, attention=Attention(q.clone(), tokens.layout))
        for w, b, q in parts
    ]
    return heads, num_steps
