"""Multinomial logistic regression by L-BFGS, on the device that holds the features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe.matrix_products import one_torch_thread
from featx.analysis.probe.minimisation import minimise
from featx.analysis.probe.newton import finish_by_newton
from featx.analysis.probe.preconditioner import SecondMoments
from featx.analysis.probe.regression_targets import ClassTargets, CountTargets
from featx.analysis.probe.softmax_objective import SoftmaxObjective

L2_GRID = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Penalties to try, the strongest first, so that each fit starts close to its minimum."""

PATIENCE = 2
"""Number of consecutive increases of the validation loss after which weaker penalties are
skipped."""

TOLERANCE = 1e-4
"""Largest entry of the gradient at which a fit counts as converged."""

FINAL_TOLERANCE = 1e-6
"""The same for L-BFGS in the final fit of a small matrix in float64, before Newton's method. The
error of the weights is up to gradient / l2, so this is not sufficient for a weak penalty."""

EXACT_NUMBERS = 1 << 23
"""Number of values of a matrix up to which the final fit is in float64."""


@dataclass(frozen=True)
class Fit:
    """One minimum of mean cross-entropy + l2/2 |weight|^2; the bias is not penalised.

    Attributes:
        weight: (C, D) float32, for standardised features.
        bias: (C,) float32.
        max_abs_gradient: largest absolute entry of the gradient at the end, or None if it was
            not computed.
        converged: whether `max_abs_gradient` is at most TOLERANCE, or None if it was not computed.
        iterations: iterations of L-BFGS, or steps of AdamW.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    max_abs_gradient: float | None
    converged: bool | None
    iterations: int


@dataclass(frozen=True)
class Trial:
    """Result of one penalty on the validation rows.

    Attributes:
        l2: strength of the penalty.
        accuracy: accuracy in [0, 1].
        loss: mean cross-entropy.
        fit: the fit.
    """

    l2: float
    accuracy: float
    loss: float
    fit: Fit

    def as_dict(self) -> dict[str, Any]:
        """Return the trial as JSON types, without weights."""
        return {
            "l2": self.l2,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "converged": self.fit.converged,
            "iterations": self.fit.iterations,
        }


def fit_logistic(
    x: torch.Tensor,
    y: torch.Tensor,
    num_classes: int,
    l2: float,
    start: Fit | None = None,
    last: bool = False,
    moments: SecondMoments | None = None,
) -> Fit:
    """Minimise mean cross-entropy + l2/2 |weight|^2 on a matrix in memory.

    A row has one class, or counts of several: with counts t the loss is -sum t log p / sum t over
    all rows and classes, as if each row stood there once for each thing that was counted in it.

    The matrix and its products stay float32. Losses, probabilities and the search are in float64 if
    the device supports it, so that line searches near the minimum do not fail because of rounding.

    Args:
        x: (n, D) float32, standardised.
        y: (n,) int64 classes, or (n, C) float32 counts, on the same device.
        num_classes: C.
        l2: strength of the penalty.
        start: initial weights, or None for zeros.
        last: whether this is the final fit, which is exact and in float64 for a small matrix.
        moments: second moments of `x`, shared by several fits; None for a single one.
    """
    device = x.device
    # Apple GPUs have no float64.
    wide = torch.float32 if device.type == "mps" else torch.float64
    exact = last and x.numel() <= EXACT_NUMBERS
    x = x.to(wide) if exact else x
    weight = torch.zeros((num_classes, x.shape[1]), dtype=wide, device=device)
    bias = torch.zeros(num_classes, dtype=wide, device=device)
    if start is not None:
        weight.copy_(start.weight)
        bias.copy_(start.bias)
    targets = ClassTargets(y) if y.ndim == 1 else CountTargets(y, wide)
    objective = SoftmaxObjective(x, targets, l2, weight, bias)
    with one_torch_thread(device):
        iterations = minimise(
            objective, moments or SecondMoments(x), FINAL_TOLERANCE if exact else TOLERANCE
        )
        if exact:
            finish_by_newton(objective)
        objective()
    largest = objective.max_abs_gradient
    return Fit(weight.float(), bias.float(), largest, largest <= TOLERANCE, iterations)


def sweep(
    x: torch.Tensor,
    y: torch.Tensor,
    num_classes: int,
    strengths: tuple[float, ...],
    judge: Callable[[Fit], tuple[float, float]],
) -> list[Trial]:
    """Fit each penalty, starting from the fit before, until the validation loss keeps rising.

    Args:
        x: (n, D) float32 rows to fit on.
        y: (n,) int64 classes, or (n, C) float32 counts of them.
        num_classes: C.
        strengths: penalties in falling order.
        judge: function fit -> accuracy and loss on the validation rows.
    """
    trials: list[Trial] = []
    moments = SecondMoments(x)
    risen = 0
    for l2 in strengths:
        start = trials[-1].fit if trials else None
        fit = fit_logistic(x, y, num_classes, l2, start, moments=moments)
        accuracy, loss = judge(fit)
        risen = risen + 1 if trials and loss > trials[-1].loss else 0
        trials.append(Trial(l2, accuracy, loss, fit))
        if risen == PATIENCE:
            break
    return trials


def best_trial(trials: list[Trial]) -> Trial:
    """Return the trial with the smallest validation loss.

    The accuracy of a few validation rows takes few values, and penalties that are so strong that
    all probabilities are close to each other often have the highest one.
    """
    return min(trials, key=lambda trial: trial.loss)


def accuracy_and_loss(
    y: npt.NDArray[np.int64], log_probabilities: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """Compute accuracy and mean cross-entropy.

    Args:
        y: (n,) classes.
        log_probabilities: (n, C).
    """
    loss = -log_probabilities[np.arange(len(y)), y].mean()
    return float((log_probabilities.argmax(1) == y).mean()), float(loss)


def note_grid_end(best: float, strengths: Sequence[float]) -> list[str]:
    """Return a note if the best penalty is at an end of the grid: a better one may lie beyond."""
    if len(strengths) == 1 or best not in (strengths[0], strengths[-1]):
        return []
    return [f"the best l2, {best:g}, is the last one of the grid on that side"]
