"""Logistic regression on an average of tokens, weighted by attention to one learned query."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from featx.analysis.probe.heads import Attention, Head, Scaler
from featx.analysis.probe.layer_rows import Tokens, threads_for
from featx.analysis.probe.minibatch_regression import (
    EPOCHS,
    Batches,
    MemoryBatches,
    Schedule,
    StreamedBatches,
    penalised_losses,
)
from featx.errors import RunError

BATCH_ROWS = 64

LEARNING_RATE = 1e-2
"""Learning rate at the first step when probe.learning_rate is not given."""

MIN_STEPS = 1000
"""Minimum number of steps when probe.epochs is not given; few rows are passed over more often."""


class _Candidates(nn.Module):
    """One classifier per penalty: logits of the weighted average of standardised tokens.

    For a row with standardised tokens z_1 ... z_T, the logits are W sum_t a_t z_t + b with a =
    softmax_t(z_t . q / sqrt(D)). This is the cross-attention layer with one query of the attentive
    probe of V-JEPA (A. Bardes et al., Revisiting Feature Prediction for Learning Visual
    Representations from Video, TMLR 2024). We differ: there is one head, in which the projections
    of keys and values are contained in q and W, and neither a residual MLP nor layer normalisation
    follows, so that q = 0 is the linear probe of the mean token.
    """

    def __init__(self, count: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, num_classes, width))
        self.bias = nn.Parameter(torch.zeros(count, num_classes))
        self.query = nn.Parameter(torch.zeros(count, width))

    def objective(
        self, tokens: torch.Tensor, labels: torch.Tensor, penalties: torch.Tensor
    ) -> torch.Tensor:
        """Compute mean cross-entropy + penalty/2 (|W|^2 + |q|^2) of each classifier, (S,)."""
        weights = (tokens @ self.query.T / math.sqrt(tokens.shape[2])).softmax(1)
        pooled = torch.einsum("bts,btd->sbd", weights, tokens)
        logits = torch.baddbmm(self.bias[:, None], pooled, self.weight.transpose(1, 2))
        squares = self.weight.square().sum((1, 2)) + self.query.square().sum(1)
        return penalised_losses(logits, labels, squares, penalties)

    def clip(self, norm: float, step: int) -> None:
        """Limit the norm of the gradient of each classifier."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norms = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
        if not bool(norms.isfinite().all()):
            raise RunError(
                f"probe.method=attentive: the gradient in step {step} is not finite. Lower "
                "probe.learning_rate, or look for extreme values with job=stats."
            )
        factors = (norm / norms.clamp(min=norm)).to(norms)
        for grad in grads:
            grad.mul_(factors.view(-1, *[1] * (grad.ndim - 1)))


@dataclass(frozen=True)
class Training:
    """Heads of one training.

    Attributes:
        heads: one head per penalty.
        num_steps: steps of AdamW.
    """

    heads: list[Head]
    num_steps: int


def fit_attentive(
    tokens: Tokens,
    places: npt.NDArray[np.int64],
    y: npt.NDArray[np.int64],
    num_classes: int,
    scaler: Scaler,
    strengths: Sequence[float],
    schedule: Schedule,
) -> Training:
    """Minimise mean cross-entropy + l2/2 (|W|^2 + |q|^2) for all penalties in the same passes.

    The start is W = 0, b = 0, q = 0, so that nothing is random but the order of the rows.
    """
    batches = _batches(tokens, places, y, schedule.seed)
    passes = schedule.epochs or max(EPOCHS, math.ceil(MIN_STEPS / len(batches)))
    num_steps = passes * len(batches)
    model = _Candidates(len(strengths), tokens.width, num_classes).to(tokens.device)
    # AdamW treats every number by itself, so that one optimizer serves all classifiers. Its own
    # decay is off, because the penalty is part of the loss.
    optimizer = torch.optim.AdamW(model.parameters(), schedule.learning_rate, weight_decay=0.0)
    penalties = torch.tensor(list(strengths), device=tokens.device)
    every = itertools.chain.from_iterable(itertools.repeat(batches, passes))
    threads = threads_for(BATCH_ROWS * tokens.layout.count * tokens.width, tokens.device)
    with torch.enable_grad(), threads:  # callers disable gradients
        for step, (rows, labels) in enumerate(every):
            z = scaler(tokens.layout.tokens(rows.to(tokens.device)))
            losses = model.objective(z, labels.to(tokens.device), penalties)
            model.zero_grad()
            torch.autograd.backward(losses.sum())
            model.clip(schedule.clip_norm, step)
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step, num_steps)
            optimizer.step()
    found = zip(model.weight.detach(), model.bias.detach(), model.query.detach(), strict=True)
    heads = [
        Head(
            scaler,
            weight.clone(),
            bias.clone(),
            probabilities=True,
            attention=Attention(query.clone(), tokens.layout),
        )
        for weight, bias, query in found
    ]
    return Training(heads, num_steps)


def _batches(
    tokens: Tokens, places: npt.NDArray[np.int64], y: npt.NDArray[np.int64], seed: int
) -> Batches:
    """Return batches of rows, from memory if the tokens are there."""
    features = tokens.features
    if features.whole is not None:
        return MemoryBatches(features.whole, places, y, BATCH_ROWS, seed)
    rows = features.parts[0]  # training rows are in the first store
    return StreamedBatches(rows, places, y[: len(rows.rows)], BATCH_ROWS, seed)
