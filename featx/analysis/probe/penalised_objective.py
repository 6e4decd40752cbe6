"""Objectives of linear classifiers: a mean loss of logits and a penalty of the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from featx.analysis.probe.matrix_products import product

_BLOCK_NUMBERS = 1 << 22
"""Maximum number of values in a block of rows on a CPU: 16 MiB of float32."""


class PenalisedObjective(ABC):
    """Mean loss + l2/2 |weight|^2 over a matrix, at weights that an optimizer changes.

    Args:
        x: (n, D), float32 or in the dtype of the weights.
        l2: strength of the penalty.
        weight: (C, D).
        bias: (C,), which is not penalised.

    Attributes:
        evaluations: number of evaluations so far.
    """

    def __init__(
        self, x: torch.Tensor, l2: float, weight: torch.Tensor, bias: torch.Tensor
    ) -> None:
        self.x = x
        self.l2 = l2
        self.weight = weight
        self.bias = bias
        self.evaluations = 0
        self._known: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @abstractmethod
    def loss_and_residual(
        self, logits: torch.Tensor, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the sum of the losses of some rows, and its gradient in their logits.

        Args:
            logits: (b, C) in the dtype of `x`, which may be overwritten.
            rows: the b rows.

        Returns:
            sum in the dtype of the weights, and (b, C) in the dtype of `x`.
        """

    @abstractmethod
    def of_rows(self, indices: torch.Tensor) -> PenalisedObjective:
        """Return the same objective of some rows, with the same tensors of weights and bias.

        Args:
            indices: (b,) of the rows.
        """

    @abstractmethod
    def activation(self, logits: torch.Tensor) -> torch.Tensor:
        """Convert (n, C) logits to probabilities."""

    def __call__(self) -> torch.Tensor:
        """Compute the loss, and its gradient in weight.grad and bias.grad.

        Computing gradients without autograd needs neither a graph nor a second copy of the logits.
        Logits and residuals are in the dtype of `x`, and their sums in that of the weights.
        """
        x, weight, bias = self.x, self.weight, self.bias
        if self._known is not None:
            known_weight, known_bias, loss = self._known
            if torch.equal(known_weight, weight) and torch.equal(known_bias, bias):
                return loss
        total = torch.zeros((), dtype=weight.dtype, device=weight.device)
        weight_gradient, bias_gradient = torch.zeros_like(weight), torch.zeros_like(bias)
        for rows in self._blocks():
            losses, residual = self.loss_and_residual(self._logits(x[rows]), rows)
            total += losses
            weight_gradient += product(residual.T, x[rows])
            bias_gradient += residual.sum(0, dtype=bias.dtype)
        loss = total / len(x) + self.l2 / 2 * weight.square().sum()
        weight.grad = weight_gradient.div_(len(x)).add_(weight, alpha=self.l2)
        bias.grad = bias_gradient / len(x)
        self._known = weight.clone(), bias.clone(), loss
        self.evaluations += 1
        return loss

    @property
    def cost(self) -> int:
        """Number of multiplications of an evaluation."""
        return 2 * self.x.numel() * len(self.bias)

    @property
    def max_abs_gradient(self) -> float:
        """Largest absolute entry of the gradient at the weights of the last call."""
        assert self.weight.grad is not None
        assert self.bias.grad is not None
        return max(float(self.weight.grad.abs().max()), float(self.bias.grad.abs().max()))

    def probabilities(self) -> torch.Tensor:
        """Compute the (n, C) probabilities at the weights, in the dtype of `x`."""
        return self.activation(self._logits(self.x))

    def mean_curvature(self) -> float:
        """Mean of p (1 - p) over rows and classes."""
        total = 0.0
        for rows in self._blocks():
            p = self.activation(self._logits(self.x[rows]))
            total += float((p - p.square()).sum(dtype=self.weight.dtype))
        return total / (len(self.x) * len(self.bias))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the (b, C) logits of rows at the weights, in the dtype of the rows."""
        return product(x, self.weight.to(x.dtype).T).add_(self.bias.to(x.dtype))

    def _blocks(self) -> list[slice]:
        """Blocks of rows of about the same size, which cover all rows.

        What is computed of a block on a CPU stays in its caches.
        """
        num_rows, width = self.x.shape
        parts = 1
        if self.x.device.type == "cpu":
            parts = min(num_rows, -(-num_rows * max(width, len(self.bias)) // _BLOCK_NUMBERS))
        size = -(-num_rows // parts)
        return [slice(start, start + size) for start in range(0, num_rows, size)]
