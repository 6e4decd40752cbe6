"""Objective of multinomial logistic regression: mean cross-entropy and a penalty."""

from __future__ import annotations

import torch

from featx.analysis.probe.matrix_products import product
from featx.analysis.probe.regression_targets import Targets


class SoftmaxObjective:
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
        self.x = x
        self._targets = targets
        self.l2 = l2
        self.weight = weight
        self.bias = bias
        self._known: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __call__(self) -> torch.Tensor:
        """Compute the loss, and its gradient in weight.grad and bias.grad.

        Computing gradients without autograd needs neither a graph nor a second copy of the logits.
        """
        x, weight, wide = self.x, self.weight, self.weight.dtype
        if self._known is not None:
            known_weight, known_bias, loss = self._known
            if torch.equal(known_weight, weight) and torch.equal(known_bias, self.bias):
                return loss
        logits = product(x, weight.to(x.dtype).T).to(wide) + self.bias
        log_p = logits - logits.logsumexp(1, keepdim=True)
        loss = self._targets.loss(log_p) + self.l2 / 2 * weight.square().sum()
        residual = self._targets.residual(log_p.exp_())
        residual /= len(x)
        weight.grad = product(residual.to(x.dtype).T, x).to(wide) + self.l2 * weight
        self.bias.grad = residual.sum(0)
        self._known = weight.clone(), self.bias.clone(), loss
        return loss

    @property
    def gradient(self) -> float:
        """Largest entry of the gradient at the weights of the last call."""
        assert self.weight.grad is not None
        assert self.bias.grad is not None
        return max(float(self.weight.grad.abs().max()), float(self.bias.grad.abs().max()))

    def probabilities(self) -> torch.Tensor:
        """Compute the (n, C) probabilities at the weights, in their dtype."""
        logits = product(self.x, self.weight.to(self.x.dtype).T).to(self.weight.dtype)
        return (logits + self.bias).softmax(1)

    def mean_curvature(self) -> float:
        """Mean of p (1 - p) over rows and classes."""
        p = self.probabilities()
        return float((p - p.square()).mean())

    def hessian(self, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Multiply the Hessian with weights and biases, for `x` in the dtype of the weights.

        Args:
            p: (n, C) probabilities at which the Hessian is taken.
            v: (C, D + 1) weights, and biases in the last column.
        """
        logits = self.x @ v[:, :-1].T + v[:, -1]
        s = self._targets.weighted(p * (logits - (p * logits).sum(1, keepdim=True))) / len(self.x)
        return torch.cat([s.T @ self.x + self.l2 * v[:, :-1], s.sum(0)[:, None]], dim=1)

    def largest_change(self, weight: torch.Tensor, bias: torch.Tensor) -> float:
        """Return the largest change of a logit by a step, relative to the row's mean logit."""
        logits = self.x @ weight.T + bias
        return float((logits - logits.mean(1, keepdim=True)).abs().max())
