"""Objective of multinomial logistic regression: mean cross-entropy and a penalty."""

from __future__ import annotations

import torch

from featx.analysis.probe.matrix_products import product
from featx.analysis.probe.penalised_objective import PenalisedObjective
from featx.analysis.probe.regression_targets import Targets


class SoftmaxObjective(PenalisedObjective):
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
        super().__init__(x, l2, weight, bias)
        self._targets = targets

    def loss_and_residual(
        self, logits: torch.Tensor, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PenalisedObjective`."""
        wide = self.weight.dtype
        logits -= logits.amax(1, keepdim=True)
        of_targets = self._targets.sum_of_logits(logits, rows, wide)
        p = logits.exp_()
        sums = p.sum(1, keepdim=True)
        p /= sums
        normalisers = self._targets.weighted(sums.to(wide).log_(), rows).sum()
        return normalisers - of_targets, self._targets.residual(p, rows)

    def of_rows(self, indices: torch.Tensor) -> SoftmaxObjective:
        """See `PenalisedObjective`."""
        targets = self._targets.of_rows(indices)
        return SoftmaxObjective(self.x[indices], targets, self.l2, self.weight, self.bias)

    def activation(self, logits: torch.Tensor) -> torch.Tensor:
        """See `PenalisedObjective`."""
        return logits.softmax(1)

    def hessian_vector_product(self, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Multiply the Hessian with weights and biases, for `x` in the dtype of the weights.

        Args:
            p: (n, C) probabilities at which the Hessian is taken.
            v: (C, D + 1) weights, and biases in the last column.
        """
        logits = product(self.x, v[:, :-1].T) + v[:, -1]
        s = p * (logits - (p * logits).sum(1, keepdim=True))
        s = self._targets.weighted(s, slice(None)) / len(self.x)
        return torch.cat([product(s.T, self.x) + self.l2 * v[:, :-1], s.sum(0)[:, None]], dim=1)

    def largest_change(self, weight: torch.Tensor, bias: torch.Tensor) -> float:
        """Return the largest change of a logit by a step, relative to the row's mean logit."""
        logits = product(self.x, weight.T) + bias
        return float((logits - logits.mean(1, keepdim=True)).abs().max())
