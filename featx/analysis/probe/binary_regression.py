"""Logistic regression for several labels of a row: one independent binary classifier per label."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from featx.analysis.probe.lbfgs import MAX_ITERATIONS
from featx.analysis.probe.logistic_regression import EXACT_NUMBERS, FINAL_TOLERANCE
from featx.analysis.probe.matrix_products import threads_for
from featx.base import float64_home


@dataclass(frozen=True)
class BinaryFit:
    """One minimum of the sum over labels of mean binary cross-entropy + l2/2 |weight|^2.

    Attributes:
        weight: (T, D) float64, for standardised features.
        bias: (T,) float64, which is not penalised.
        gradient: largest entry of the gradient at the end.
        iterations: iterations of L-BFGS.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    gradient: float
    iterations: int

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the (n, T) float64 probability of each label from (n, D) features."""
        return (x.to(self.weight) @ self.weight.T + self.bias).sigmoid()


def fit_binary(
    x: torch.Tensor, targets: torch.Tensor, l2: float, start: BinaryFit | None = None
) -> BinaryFit:
    """Minimise the loss of all labels together, which is the minimum for each of them.

    Args:
        x: (n, D) float32, standardised.
        targets: (n, T), 1 or 0.
        l2: strength of the penalty; scikit-learn's C is 1 / (l2 n).
        start: initial weights, or None for zeros.
    """
    home = float64_home(x.device)
    x = x.to(home).double() if x.numel() <= EXACT_NUMBERS else x.to(home)
    targets = targets.to(home).double()
    weight = torch.zeros((targets.shape[1], x.shape[1]), dtype=torch.float64, device=home)
    bias = torch.zeros(targets.shape[1], dtype=torch.float64, device=home)
    if start is not None:
        weight.copy_(start.weight)
        bias.copy_(start.bias)
    search = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MAX_ITERATIONS,
        max_eval=2 * MAX_ITERATIONS,
        tolerance_grad=FINAL_TOLERANCE,
        tolerance_change=1e-14,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def objective() -> torch.Tensor:
        """Compute the loss, and its gradient in weight.grad and bias.grad."""
        logits = (x @ weight.to(x.dtype).T).double() + bias
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, targets, reduction="none"
        )
        residual = (logits.sigmoid() - targets) / len(x)
        weight.grad = (residual.to(x.dtype).T @ x).double() + l2 * weight
        bias.grad = residual.sum(0)
        return losses.sum(1).mean() + l2 / 2 * weight.square().sum()

    with threads_for(x.numel(), x.device):
        search.step(objective)  # type: ignore[no-untyped-call]
        objective()
    gradients = [each.grad.abs().max() for each in (weight, bias) if each.grad is not None]
    iterations = int(search.state[weight].get("n_iter", 0))
    return BinaryFit(weight, bias, float(max(gradients)), iterations)
