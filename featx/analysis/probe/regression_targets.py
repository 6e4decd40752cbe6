"""Targets of a logistic regression: one class for each row, or counts of several."""

from __future__ import annotations

import copy
from typing import Protocol

import torch


class Targets(Protocol):
    """Targets of the rows of a matrix.

    With targets t of sum 1 (one class) or weights of mean 1 (counts), the cross-entropy of a row
    with logits z is (sum t) logsumexp(z) - sum t z.
    """

    def sum_of_logits(self, logits: torch.Tensor, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Compute the sum of t z of some rows.

        Args:
            logits: (b, C).
            rows: the b rows.
            dtype: dtype of the sum.
        """

    def residual(self, p: torch.Tensor, rows: slice) -> torch.Tensor:
        """Convert (b, C) probabilities of some rows in place to gradients of their losses."""

    def weighted(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        """Multiply (b, ...) values of some rows by their weights sum t, of mean 1."""

    def of_rows(self, indices: torch.Tensor) -> Targets:
        """Return the targets of some rows, weighted as among all rows.

        Args:
            indices: (b,) of the rows.
        """


class ClassTargets:
    """One class for each row.

    Args:
        y: (n,) int64.
    """

    def __init__(self, y: torch.Tensor) -> None:
        self._columns = y[:, None]

    def sum_of_logits(self, logits: torch.Tensor, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """See `Targets`."""
        return logits.gather(1, self._columns[rows]).sum(dtype=dtype)

    def residual(self, p: torch.Tensor, rows: slice) -> torch.Tensor:
        """See `Targets`."""
        columns = self._columns[rows]
        return p.scatter_add_(1, columns, p.new_full((1, 1), -1.0).expand_as(columns))

    def weighted(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        """See `Targets`; every row weighs 1."""
        return values

    def of_rows(self, indices: torch.Tensor) -> ClassTargets:
        """See `Targets`."""
        return ClassTargets(self._columns[indices, 0])


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

    def sum_of_logits(self, logits: torch.Tensor, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """See `Targets`."""
        return torch.dot(self._counts[rows].flatten(), logits.to(dtype).flatten())

    def residual(self, p: torch.Tensor, rows: slice) -> torch.Tensor:
        """See `Targets`."""
        return p.mul_(self._weights[rows]).sub_(self._counts[rows])

    def weighted(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        """See `Targets`; a row weighs as much as its counts sum to."""
        return values * self._weights[rows]

    def of_rows(self, indices: torch.Tensor) -> CountTargets:
        """See `Targets`."""
        part = copy.copy(self)
        part._counts, part._weights = self._counts[indices], self._weights[indices]
        return part
