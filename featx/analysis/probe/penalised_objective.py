"""Objectives of linear classifiers: a mean loss of logits and a penalty of the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from featx.analysis.probe.matrix_products import product


class PenalisedObjective(ABC):
    """Mean loss + l2/2 |weight|^2 over a matrix, at weights that an optimizer changes.

    Args:
        x: (n, D), float32 or in the dtype of the weights.
        l2: strength of the penalty.
        weight: (C, D).
        bias: (C,), which is not penalised.
    """

    def __init__(
        self, x: torch.Tensor, l2: float, weight: torch.Tensor, bias: torch.Tensor
    ) -> None:
        self.x = x
        self.l2 = l2
        self.weight = weight
        self.bias = bias
        self._known: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @abstractmethod
    def loss_and_residual(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the mean loss of (n, C) logits, and n times its gradient in them.

        Args:
            logits: (n, C), which may be overwritten.
        """

    @abstractmethod
    def activation(self, logits: torch.Tensor) -> torch.Tensor:
        """Convert (n, C) logits to probabilities."""

    def __call__(self) -> torch.Tensor:
        """Compute the loss, and its gradient in weight.grad and bias.grad.

        Computing gradients without autograd needs neither a graph nor a second copy of the logits.
        """
        x, weight, wide = self.x, self.weight, self.weight.dtype
        if self._known is not None:
            known_weight, known_bias, loss = self._known
            if torch.equal(known_weight, weight) and torch.equal(known_bias, self.bias):
                return loss
        mean, residual = self.loss_and_residual(self._logits())
        loss = mean + self.l2 / 2 * weight.square().sum()
        residual /= len(x)
        weight.grad = product(residual.to(x.dtype).T, x).to(wide) + self.l2 * weight
        self.bias.grad = residual.sum(0)
        self._known = weight.clone(), self.bias.clone(), loss
        return loss

    @property
    def max_abs_gradient(self) -> float:
        """Largest absolute entry of the gradient at the weights of the last call."""
        assert self.weight.grad is not None
        assert self.bias.grad is not None
        return max(float(self.weight.grad.abs().max()), float(self.bias.grad.abs().max()))

    def probabilities(self) -> torch.Tensor:
        """Compute the (n, C) probabilities at the weights, in their dtype."""
        return self.activation(self._logits())

    def mean_curvature(self) -> float:
        """Mean of p (1 - p) over rows and classes."""
        p = self.probabilities()
        return float((p - p.square()).mean())

    def _logits(self) -> torch.Tensor:
        """Compute the (n, C) logits at the weights, in their dtype."""
        logits = product(self.x, self.weight.to(self.x.dtype).T).to(self.weight.dtype)
        return logits + self.bias
