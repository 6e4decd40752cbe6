"""Targets of a logistic regression: one class for each row, or counts of several."""

from __future__ import annotations

from typing import Protocol

import torch


class Targets(Protocol):
    """What the rows of a matrix are to be predicted as."""

    def loss(self, log_p: torch.Tensor) -> torch.Tensor:
        """Compute the mean cross-entropy of (n, C) log-probabilities."""

    def residual(self, p: torch.Tensor) -> torch.Tensor:
        """Convert (n, C) probabilities in place to n times the gradient in the logits."""

    def weighted(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of (n, C) values by their weights, of mean 1."""


class ClassTargets:
    """One class for each row.

    Args:
        y: (n,) int64.
    """

    def __init__(self, y: torch.Tensor) -> None:
        self._y = y
        self._rows = torch.arange(len(y), device=y.device)

    def loss(self, log_p: torch.Tensor) -> torch.Tensor:
        """See `Targets`."""
        return -log_p[self._rows, self._y].mean()

    def residual(self, p: torch.Tensor) -> torch.Tensor:
        """See `Targets`."""
        p[self._rows, self._y] -= 1
        return p

    def weighted(self, values: torch.Tensor) -> torch.Tensor:
        """See `Targets`; every row weighs 1."""
        return values


class CountTargets:
    """Counts of classes in each row.

    Args:
        counts: (n, C), not all 0.
        dtype: dtype of the weights and losses.
    """

    def __init__(self, counts: torch.Tensor, dtype: torch.dtype) -> None:
        # Divided by their mean, so that the loss is a mean over rows as that of classes.
        self._counts = counts.to(dtype)
        self._counts *= len(counts) / self._counts.sum()
        self._weights = self._counts.sum(1, keepdim=True)

    def loss(self, log_p: torch.Tensor) -> torch.Tensor:
        """See `Targets`."""
        return -torch.dot(self._counts.flatten(), log_p.flatten()) / len(log_p)

    def residual(self, p: torch.Tensor) -> torch.Tensor:
        """See `Targets`."""
        return p.mul_(self._weights).sub_(self._counts)

    def weighted(self, values: torch.Tensor) -> torch.Tensor:
        """See `Targets`; a row weighs as much as its counts sum to."""
        return values * self._weights
