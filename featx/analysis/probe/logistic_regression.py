"""Linear classifiers of standardised features: logistic regression by scipy's L-BFGS-B."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from featx.analysis.probe.metrics import Ints, Matrix
from featx.base import check_memory, one_blas_thread, rows_of_block

L2_GRID = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Penalties to try, the strongest first, so that each fit starts close to its minimum."""

PATIENCE = 2
"""Number of consecutive increases of the validation loss after which weaker penalties are
skipped."""

TOLERANCE = 1e-4
"""Largest entry of the gradient at which a fit counts as converged."""

FINAL_TOLERANCE = 1e-6
"""The same for the final fit of a small matrix in float64. The error of the weights is up to
gradient / l2, so a weak penalty needs a smaller gradient."""

EXACT_NUMBERS = 1 << 23
"""Number of values of a matrix up to which the final fit is in float64."""

MAX_ITERATIONS = 1000

_SEARCH_VECTORS = 25
"""Number of vectors of all weights that scipy's L-BFGS-B holds: 2 for each of 10 corrections, and
5."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function (n, C) logits, targets -> sum of the losses of the rows."""


def class_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy of (n,) classes, or of (n, C) counts of classes.

    A row with counts t has the loss -sum t log p, as if it stood there once for each thing that was
    counted in it.
    """
    if targets.ndim == 1:
        return functional.cross_entropy(logits, targets, reduction="sum")
    return -(targets * logits.log_softmax(1)).sum()


def label_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the binary cross-entropy of (n, T) labels, 1 or 0, that do not exclude each other."""
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")


@dataclass(frozen=True)
class Fit:
    """One minimum of a mean loss + l2/2 |weight|^2; the bias is not penalised.

    Attributes:
        weight: (C, D) float32, for standardised features.
        bias: (C,) float32.
        max_abs_gradient: largest absolute entry of the gradient at the end, or None if it was
            not computed.
        converged: whether `max_abs_gradient` is at most TOLERANCE, or None if it was not computed.
        iterations: iterations of L-BFGS-B, or steps of AdamW.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    max_abs_gradient: float | None
    converged: bool | None
    iterations: int

    def notes(self, l2: float) -> list[str]:
        """Return a note if L-BFGS-B has not converged."""
        if self.converged is not False:
            return []
        return [
            f"l2={l2:g}: L-BFGS has not converged in {self.iterations} iterations (largest entry "
            f"of the gradient {self.max_abs_gradient:.2g}, wanted {TOLERANCE:g})"
        ]


@dataclass(frozen=True)
class Trial:
    """Result of one penalty on the validation rows."""

    l2: float
    accuracy: float
    loss: float
    fit: Fit

    def as_dict(self) -> dict[str, object]:
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
    num_outputs: int,
    l2: float,
    start: Fit | None = None,
    last: bool = False,
    loss: Loss = class_loss,
) -> Fit:
    """Minimise mean loss + l2/2 |weight|^2 on a matrix in memory, scikit-learn's C = 1 / (l2 n).

    The matrix and its products stay float32. Losses and the search are in float64 if the device
    supports it, so that line searches near the minimum do not fail because of rounding.
    """
    from scipy.optimize import minimize  # takes 0.2 s

    wide = torch.float32 if x.device.type == "mps" else torch.float64  # Apple GPUs have no float64
    is_exact = last and x.numel() <= EXACT_NUMBERS
    x = x.to(wide) if is_exact else x
    y = y.to(wide) if y.is_floating_point() else y
    total = float(y.sum()) if loss is class_loss and y.ndim == 2 else float(len(x))
    block_rows = rows_of_block(16 * num_outputs)  # logits and their gradients in float64
    shape = (num_outputs, x.shape[1] + 1)  # the bias comes last
    check_memory(
        8 * _SEARCH_VECTORS * math.prod(shape),
        f"The weights of {num_outputs} classes and {x.shape[1]} features, as L-BFGS searches them,",
        "Take labels with fewer classes, or job=probe with probe.method=ridge or knn.",
    )
    first = torch.zeros(shape, dtype=torch.float64)
    if start is not None:
        first.copy_(torch.cat([start.weight, start.bias[:, None]], 1))

    def objective(numbers: Matrix) -> tuple[float, Matrix]:
        """Return the value and its gradient."""
        parameters = torch.from_numpy(numbers).view_as(first).to(x.device, wide)
        weight, bias = parameters[:, :-1].to(x.dtype), parameters[:, -1].to(x.dtype)
        gradient = l2 * parameters
        gradient[:, -1] = 0
        value = l2 / 2 * float(parameters[:, :-1].square().sum())
        for begin in range(0, len(x), block_rows):
            rows = slice(begin, begin + block_rows)
            logits = torch.addmm(bias, x[rows], weight.T).to(wide).requires_grad_()
            with torch.enable_grad():  # callers disable gradients
                loss_of_block = loss(logits, y[rows]) / total
            (of_logits,) = torch.autograd.grad(loss_of_block, logits)
            gradient[:, :-1] += of_logits.T.to(x.dtype) @ x[rows]
            gradient[:, -1] += of_logits.sum(0)
            value += float(loss_of_block.detach())
        return value, gradient.cpu().double().numpy().ravel()

    tolerance = min(FINAL_TOLERANCE, 1e-4 * l2) if is_exact else TOLERANCE
    options = {"maxiter": MAX_ITERATIONS, "maxfun": 10 * MAX_ITERATIONS, "maxls": 50}
    # The threads of scipy's BLAS spin between its short operations: on two busy CPUs a probe took
    # five times as long. Those of torch multiply the matrices.
    with one_blas_thread():
        found = minimize(
            objective,
            first.numpy().ravel(),
            jac=True,
            method="L-BFGS-B",
            options={**options, "gtol": tolerance, "ftol": 0.0},
        )
    parameters = torch.from_numpy(found.x).view_as(first).float().to(x.device)
    largest = float(np.abs(found.jac).max())
    weight, bias = parameters[:, :-1].contiguous(), parameters[:, -1].contiguous()
    return Fit(weight, bias, largest, largest <= TOLERANCE, int(found.nit))


def sweep(
    x: torch.Tensor,
    y: torch.Tensor,
    num_outputs: int,
    strengths: Sequence[float],
    judge: Callable[[Fit], tuple[float, float]],
    loss: Loss = class_loss,
) -> list[Trial]:
    """Fit each penalty, starting from the fit before, until the validation loss keeps rising."""
    trials: list[Trial] = []
    risen = 0
    for l2 in strengths:
        start = trials[-1].fit if trials else None
        fit = fit_logistic(x, y, num_outputs, l2, start, loss=loss)
        trial = Trial(l2, *judge(fit), fit)
        risen = risen + 1 if trials and trial.loss > trials[-1].loss else 0
        trials.append(trial)
        if risen == PATIENCE:
            break
    return trials


def accuracy_and_loss(y: Ints, log_probabilities: Matrix) -> tuple[float, float]:
    """Compute accuracy and mean cross-entropy."""
    loss = -log_probabilities[np.arange(len(y)), y].mean()
    return float((log_probabilities.argmax(1) == y).mean()), float(loss)


def note_grid_end(best: float, strengths: Sequence[float]) -> list[str]:
    """Return a note if the best penalty is at an end of the grid: a better one may lie beyond."""
    if len(strengths) == 1 or best not in (strengths[0], strengths[-1]):
        return []
    return [f"the best l2, {best:g}, is the last one of the grid on that side"]
