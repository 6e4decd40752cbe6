"""Multinomial logistic regression by L-BFGS, on whichever device holds the matrix."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

L2_GRID = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Strengths that are tried, from the strongest on: each start is then near its end."""

PATIENCE = 2
"""Weaker ones are not tried once the validation loss has risen so often in a row."""

TOLERANCE = 1e-4
"""Largest entry of the gradient at which a fit has converged."""

FINAL_TOLERANCE = 1e-6
"""The same for the last fit, of a small matrix, in float64, before Newton's method takes over: the
error of the weights is up to the gradient / l2, so with a weak penalty this is not enough."""

LOGIT_TOLERANCE = 1e-3
"""Largest change of a training row's logit by the last step of Newton's method, which leaves less
than a hundredth of it as error."""

MAX_NEWTON_STEPS = 50

MAX_CG_STEPS = 1000
"""Products with the Hessian in one step of Newton's method, at the most."""

MAX_ITERATIONS = 1000

SMALL_NUMBERS = 1 << 21
"""Of a matrix: a product with it is over before a second thread has helped."""

EXACT_NUMBERS = 1 << 23
"""Of a matrix that the last fit takes in float64."""


@dataclass(frozen=True)
class Fit:
    """One minimum of mean cross-entropy + l2/2 |weight|^2 (the bias is free).

    Attributes:
        weight: (C, D) float32, of standardised features; bias (C,).
        gradient: its largest entry at the end; None where it was not measured.
        converged: whether that is at most TOLERANCE; None where it was not measured.
        iterations: of L-BFGS, or steps of AdamW.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    gradient: float | None
    converged: bool | None
    iterations: int


@dataclass(frozen=True)
class Trial:
    """What one strength gave on the validation rows."""

    l2: float
    accuracy: float
    loss: float
    fit: Fit

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
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
) -> Fit:
    """Minimise on a whole matrix.

    The matrix and its products stay float32; losses, probabilities and the search are in float64,
    where the device has it, so that line searches near the minimum do not fail on rounding.

    Args:
        x: (n, D) float32, standardised.
        y: (n,) int64 on the same device.
        num_classes: C.
        l2: strength.
        start: where to begin; zeros when not given.
        last: of several fits: a small matrix is then taken in float64, up to FINAL_TOLERANCE.
    """
    device = x.device
    # Apple's GPUs have no float64.
    wide = torch.float32 if device.type == "mps" else torch.float64
    exact = last and x.numel() <= EXACT_NUMBERS
    x = x.to(wide) if exact else x
    weight = torch.zeros((num_classes, x.shape[1]), dtype=wide, device=device)
    bias = torch.zeros(num_classes, dtype=wide, device=device)
    if start is not None:
        weight.copy_(start.weight)
        bias.copy_(start.bias)
    objective = _Objective(x, y, l2, weight, bias)
    search = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MAX_ITERATIONS,
        max_eval=2 * MAX_ITERATIONS,
        tolerance_grad=FINAL_TOLERANCE if exact else TOLERANCE,
        tolerance_change=1e-14,
        history_size=10,
        line_search_fn="strong_wolfe",
    )
    with threads_for(x.numel(), device):
        search.step(objective)  # type: ignore[no-untyped-call]
        if exact:
            _finish(objective, l2, weight, bias)
        objective()
    assert weight.grad is not None
    assert bias.grad is not None
    gradient = max(float(weight.grad.abs().max()), float(bias.grad.abs().max()))
    iterations = int(search.state[weight].get("n_iter", 0))
    return Fit(weight.float(), bias.float(), gradient, gradient <= TOLERANCE, iterations)


class _Objective:
    """Mean cross-entropy + l2/2 |weight|^2 over a whole matrix, at weights that a search moves.

    Args:
        x: (n, D), float32 or as wide as the weights.
        y: (n,) int64.
        l2: strength.
        weight, bias: (C, D) and (C,).
    """

    def __init__(
        self, x: torch.Tensor, y: torch.Tensor, l2: float, weight: torch.Tensor, bias: torch.Tensor
    ) -> None:
        self._x = x
        self._y = y
        self._l2 = l2
        self._weight = weight
        self._bias = bias
        self._rows = torch.arange(len(x), device=x.device)

    def __call__(self) -> torch.Tensor:
        """The loss, with its gradient in weight.grad and bias.grad.

        Gradients by hand need neither a graph nor a second copy of the logits.
        """
        x, y, weight, wide = self._x, self._y, self._weight, self._weight.dtype
        logits = (x @ weight.to(x.dtype).T).to(wide) + self._bias
        log_p = logits - logits.logsumexp(1, keepdim=True)
        loss = -log_p[self._rows, y].mean() + self._l2 / 2 * weight.square().sum()
        residual = log_p.exp_()
        residual[self._rows, y] -= 1
        residual /= len(x)
        weight.grad = (residual.to(x.dtype).T @ x).to(wide) + self._l2 * weight
        self._bias.grad = residual.sum(0)
        return loss

    def newton_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(C, D) and (C,): about -H^-1 g, with the Hessian H and the gradient g of the last call.

        Conjugate gradients; the better g is, the better they are solved, so that the steps of
        Newton's method converge faster than linearly.
        """
        x, count = self._x, len(self._x)
        p = (x @ self._weight.T + self._bias).softmax(1)

        def hessian(v: torch.Tensor) -> torch.Tensor:
            logits = x @ v[:, :-1].T + v[:, -1]
            s = p * (logits - (p * logits).sum(1, keepdim=True)) / count
            return torch.cat([s.T @ x + self._l2 * v[:, :-1], s.sum(0)[:, None]], dim=1)

        assert self._weight.grad is not None
        assert self._bias.grad is not None
        residual = -torch.cat([self._weight.grad, self._bias.grad[:, None]], dim=1)
        step, direction = torch.zeros_like(residual), residual.clone()
        square = float(residual.square().sum())
        wanted = square * min(1e-4, math.sqrt(square))
        for _ in range(MAX_CG_STEPS):
            if square <= wanted:
                break
            product = hessian(direction)
            curvature = float((direction * product).sum())
            if not curvature > 0:
                break
            step += square / curvature * direction
            residual -= square / curvature * product
            before, square = square, float(residual.square().sum())
            direction = residual + square / before * direction
        return step[:, :-1], step[:, -1]

    def largest_change(self, weight: torch.Tensor, bias: torch.Tensor) -> float:
        """By how much a step changes a logit of a row, against the row's mean, at the most."""
        logits = self._x @ weight.T + bias
        return float((logits - logits.mean(1, keepdim=True)).abs().max())


def _finish(objective: _Objective, l2: float, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Move weights that are near the minimum to it, by Newton's method.

    The line search of torch's L-BFGS gives up on steps below 1e-9, which leaves gradients of 1e-8.
    Each step is solved by conjugate gradients, as in C.-J. Lin, R. C. Weng and S. S. Keerthi, Trust
    Region Newton Method for Logistic Regression, JMLR 9, 2008, with halved steps for a trust
    region.
    """
    loss = float(objective())
    for _ in range(MAX_NEWTON_STEPS):
        step_weight, step_bias = objective.newton_step()
        moved = objective.largest_change(step_weight, step_bias)
        size = 1.0
        while True:
            weight += size * step_weight
            bias += size * step_bias
            found = float(objective())
            if found <= loss:
                break
            weight -= size * step_weight
            bias -= size * step_bias
            size /= 2
            if size * moved <= LOGIT_TOLERANCE:  # the loss has no more digits
                objective()
                return
        loss = found
        if moved <= LOGIT_TOLERANCE:
            return


@contextlib.contextmanager
def threads_for(numbers: int, device: torch.device) -> Iterator[None]:
    """One thread where a matrix of so many numbers gives little to do: beside other busy processes,
    two that wait for each other after every small operation took 60 times as long."""
    before = torch.get_num_threads()
    if device.type == "cpu" and numbers <= SMALL_NUMBERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sweep(
    x: torch.Tensor,
    y: torch.Tensor,
    num_classes: int,
    strengths: tuple[float, ...],
    judge: Callable[[Fit], tuple[float, float]],
) -> list[Trial]:
    """Fit each strength, from the one before; stop where it gets worse.

    Args:
        x, y: rows to fit on.
        num_classes: C.
        strengths: falling.
        judge: a fit -> accuracy and loss on the validation rows.
    """
    trials: list[Trial] = []
    risen = 0
    for l2 in strengths:
        fit = fit_logistic(x, y, num_classes, l2, trials[-1].fit if trials else None)
        accuracy, loss = judge(fit)
        risen = risen + 1 if trials and loss > trials[-1].loss else 0
        trials.append(Trial(l2, accuracy, loss, fit))
        if risen == PATIENCE:
            break
    return trials


def best_trial(trials: list[Trial]) -> Trial:
    """The most accurate on the validation rows; of equals the one with the smallest loss."""
    return max(trials, key=lambda trial: (trial.accuracy, -trial.loss))


def accuracy_and_loss(
    y: npt.NDArray[np.int64], log_probabilities: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """Accuracy and mean cross-entropy of (n, C) logarithms of probabilities."""
    loss = -log_probabilities[np.arange(len(y)), y].mean()
    return float((log_probabilities.argmax(1) == y).mean()), float(loss)
