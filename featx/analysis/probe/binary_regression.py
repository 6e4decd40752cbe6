"""Logistic regression for several labels of a row: one independent binary classifier per label."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from featx.analysis.probe.logistic_regression import EXACT_NUMBERS, FINAL_TOLERANCE
from featx.analysis.probe.matrix_products import one_torch_thread
from featx.analysis.probe.minimisation import minimise
from featx.analysis.probe.penalised_objective import PenalisedObjective
from featx.analysis.probe.preconditioner import SecondMoments
from featx.base import float64_device


@dataclass(frozen=True)
class BinaryFit:
    """One minimum of the sum over labels of mean binary cross-entropy + l2/2 |weight|^2.

    Attributes:
        weight: (T, D) float64, for standardised features.
        bias: (T,) float64, which is not penalised.
        max_abs_gradient: largest absolute entry of the gradient at the end.
        iterations: iterations of L-BFGS.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    max_abs_gradient: float
    iterations: int


class BinaryObjective(PenalisedObjective):
    """Sum over labels of mean binary cross-entropy, + l2/2 |weight|^2.

    Args:
        x: (n, D), float32 or in the dtype of the weights.
        targets: (n, T), 1 or 0.
        l2: strength of the penalty.
        weight: (T, D).
        bias: (T,).
    """

    def __init__(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        l2: float,
        weight: torch.Tensor,
        bias: torch.Tensor,
    ) -> None:
        super().__init__(x, l2, weight, bias)
        self._targets = targets.to(x.dtype)

    def loss_and_residual(
        self, logits: torch.Tensor, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PenalisedObjective`."""
        targets = self._targets[rows]
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, targets, reduction="none"
        )
        return losses.sum(dtype=self.weight.dtype), logits.sigmoid_().sub_(targets)

    def of_rows(self, indices: torch.Tensor) -> BinaryObjective:
        """See `PenalisedObjective`."""
        targets = self._targets[indices]
        return BinaryObjective(self.x[indices], targets, self.l2, self.weight, self.bias)

    def activation(self, logits: torch.Tensor) -> torch.Tensor:
        """See `PenalisedObjective`."""
        return logits.sigmoid()


class LabelledMatrix:
    """Rows with several labels, on which several penalties are fitted.

    Args:
        x: (n, D) float32, standardised.
        targets: (n, T), 1 or 0.
    """

    def __init__(self, x: torch.Tensor, targets: torch.Tensor) -> None:
        home = float64_device(x.device)
        self._x = x.to(home).double() if x.numel() <= EXACT_NUMBERS else x.to(home)
        self._targets = targets.to(home).double()
        self._moments = SecondMoments(self._x)

    def fit(self, l2: float, start: BinaryFit | None = None) -> BinaryFit:
        """Minimise the loss of all labels together, which is the minimum for each of them.

        Args:
            l2: strength of the penalty; scikit-learn's C is 1 / (l2 n).
            start: initial weights, or None for zeros.
        """
        x, targets = self._x, self._targets
        weight = torch.zeros((targets.shape[1], x.shape[1]), dtype=torch.float64, device=x.device)
        bias = torch.zeros(targets.shape[1], dtype=torch.float64, device=x.device)
        if start is not None:
            weight.copy_(start.weight)
            bias.copy_(start.bias)
        objective = BinaryObjective(x, targets, l2, weight, bias)
        with one_torch_thread(x.device):
            iterations = minimise(objective, self._moments, FINAL_TOLERANCE)
            objective()
        return BinaryFit(weight, bias, objective.max_abs_gradient, iterations)
