"""Multinomial logistic regression by L-BFGS, on the device that holds the features."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe.regression_targets import ClassTargets, CountTargets, Targets

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

LOGIT_TOLERANCE = 1e-3
"""Largest change of a training row's logit in the last step of Newton's method. The remaining error
is below a hundredth of it."""

MAX_NEWTON_STEPS = 50

MAX_CG_STEPS = 1000
"""Maximum number of products with the Hessian in one step of Newton's method."""

MAX_ITERATIONS = 1000

SMALL_NUMBERS = 1 << 21
"""Number of values of a matrix up to which one thread is used: a product with it ends before a
second thread could help."""

EXACT_NUMBERS = 1 << 23
"""Number of values of a matrix up to which the final fit is in float64."""


@dataclass(frozen=True)
class Fit:
    """One minimum of mean cross-entropy + l2/2 |weight|^2; the bias is not penalised.

    Attributes:
        weight: (C, D) float32, for standardised features.
        bias: (C,) float32.
        gradient: largest entry of the gradient at the end, or None if it was not computed.
        converged: whether `gradient` is at most TOLERANCE, or None if it was not computed.
        iterations: iterations of L-BFGS, or steps of AdamW.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    gradient: float | None
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
    objective = _Objective(x, targets, l2, weight, bias)
    search = _LBFGS(
        [weight, bias],
        max_iter=MAX_ITERATIONS,
        max_eval=2 * MAX_ITERATIONS,
        tolerance_grad=FINAL_TOLERANCE if exact else TOLERANCE,
        tolerance_change=1e-14,
        history_size=10,
        line_search_fn="strong_wolfe",
    )
    with threads_for(x.numel(), device):
        _take_first_step(search, objective)
        search.step(objective)  # type: ignore[no-untyped-call]
        if exact:
            _finish(objective, l2, weight, bias)
        objective()
    assert weight.grad is not None
    assert bias.grad is not None
    gradient = max(float(weight.grad.abs().max()), float(bias.grad.abs().max()))
    iterations = int(search.state[weight].get("n_iter", 0))
    return Fit(weight.float(), bias.float(), gradient, gradient <= TOLERANCE, iterations)


def _take_first_step(search: _LBFGS, objective: _Objective) -> None:
    """Let L-BFGS take its first step, along the gradient, with a length of about 1.

    torch tries 1 / |gradient|_1 of the gradient first. With 10^5 weights that is so short that the
    line search extends it several times, with two products each. The length of 1 is that of scipy.
    """
    objective()
    group = search.param_groups[0]
    gradients = [parameter.grad for parameter in group["params"]]
    absolute = sum(float(gradient.abs().sum()) for gradient in gradients)
    length = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    if absolute <= 1:  # torch takes the whole gradient
        return
    whole = {name: group[name] for name in ("max_iter", "lr")}
    group |= {"max_iter": 1, "lr": absolute / length}
    search.step(objective)  # type: ignore[no-untyped-call]
    group |= whole


class _LBFGS(torch.optim.LBFGS):
    """L-BFGS of torch, without the import of torch._dynamo, which takes about two seconds.

    torch (2.14) imports it at the first call of `add_param_group`, only to exclude this method from
    compiling; the function that it wraps is the same without this.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as `torch.optim.Optimizer.add_param_group` does."""
        inherited = torch.optim.Optimizer.add_param_group
        getattr(inherited, "__wrapped__", inherited)(self, param_group)


class _Objective:
    """Mean cross-entropy + l2/2 |weight|^2 over a matrix, at weights that an optimizer changes.

    Args:
        x: (n, D), float32 or in the dtype of the weights.
        targets: classes of the rows, or counts of them.
        l2: strength of the penalty.
        weight: (C, D).
        bias: (C,).
    """

    def __init__(
        self,
        x: torch.Tensor,
        targets: Targets,
        l2: float,
        weight: torch.Tensor,
        bias: torch.Tensor,
    ) -> None:
        self._x = x
        self._targets = targets
        self._l2 = l2
        self._weight = weight
        self._bias = bias
        self._known: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __call__(self) -> torch.Tensor:
        """Compute the loss, and its gradient in weight.grad and bias.grad.

        Computing gradients without autograd needs neither a graph nor a second copy of the logits.
        """
        x, weight, wide = self._x, self._weight, self._weight.dtype
        if self._known is not None:
            known_weight, known_bias, loss = self._known
            if torch.equal(known_weight, weight) and torch.equal(known_bias, self._bias):
                return loss
        logits = _product(x, weight.to(x.dtype).T).to(wide) + self._bias
        log_p = logits - logits.logsumexp(1, keepdim=True)
        loss = self._targets.loss(log_p) + self._l2 / 2 * weight.square().sum()
        residual = self._targets.residual(log_p.exp_())
        residual /= len(x)
        weight.grad = _product(residual.to(x.dtype).T, x).to(wide) + self._l2 * weight
        self._bias.grad = residual.sum(0)
        self._known = weight.clone(), self._bias.clone(), loss
        return loss

    def newton_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute about -H^-1 g, as (C, D) and (C,), with Hessian H and gradient g of the last
        call.

        Conjugate gradients solve the system more exactly the smaller g is, so that Newton's method
        converges superlinearly.
        """
        x, count = self._x, len(self._x)
        p = (x @ self._weight.T + self._bias).softmax(1)

        def hessian(v: torch.Tensor) -> torch.Tensor:
            """Multiply the Hessian with (C, D + 1) weights and bias."""
            logits = x @ v[:, :-1].T + v[:, -1]
            s = self._targets.weighted(p * (logits - (p * logits).sum(1, keepdim=True))) / count
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
        """Return the largest change of a logit by a step, relative to the row's mean logit."""
        logits = self._x @ weight.T + bias
        return float((logits - logits.mean(1, keepdim=True)).abs().max())


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices, by numpy's BLAS where it is faster than that of torch.

    torch comes with MKL, which took 1.2 to 1.4 times as long as numpy's OpenBLAS for these shapes
    on an AMD EPYC. Small products stay with torch, whose number of threads is set.
    """
    if a.device.type != "cpu" or max(a.numel(), b.numel()) <= SMALL_NUMBERS:
        return a @ b
    return torch.from_numpy(a.numpy() @ b.numpy())


def _finish(objective: _Objective, l2: float, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Improve weights near the minimum by Newton's method, in place.

    The line search of torch's L-BFGS rejects steps below 1e-9, which leaves gradients of 1e-8. Each
    step is computed by conjugate gradients as in C.-J. Lin, R. C. Weng and S. S. Keerthi, Trust
    Region Newton Method for Logistic Regression, JMLR 9, 2008, with step halving in place of a
    trust region.
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
            if size * moved <= LOGIT_TOLERANCE:  # the loss cannot decrease any further in float64
                objective()
                return
        loss = found
        if moved <= LOGIT_TOLERANCE:
            return


@contextlib.contextmanager
def threads_for(numbers: int, device: torch.device) -> Iterator[None]:
    """Use one thread inside the block if a matrix on the CPU is small.

    With other busy processes, two threads that wait for each other after every small operation took
    60 times as long.

    Args:
        numbers: number of values of the matrix.
        device: device that computes.
    """
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
    """Fit each penalty, starting from the fit before, until the validation loss keeps rising.

    Args:
        x: (n, D) float32 rows to fit on.
        y: (n,) int64 classes, or (n, C) float32 counts of them.
        num_classes: C.
        strengths: penalties in falling order.
        judge: function fit -> accuracy and loss on the validation rows.
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


def at_the_end(best: float, strengths: Sequence[float]) -> list[str]:
    """Return a note if the best penalty is at an end of the grid: a better one may lie beyond."""
    if len(strengths) == 1 or best not in (strengths[0], strengths[-1]):
        return []
    return [f"the best l2, {best:g}, is the last one of the grid on that side"]
