"""Variables in which the minimum of a logistic regression is found in few iterations.

With probabilities p, the Hessian of the mean cross-entropy is about a G + l2 I for each class,
where G is the matrix of second moments of the features and a the mean of p (1 - p). This is the
bound of D. Bohning, Multinomial logistic regression algorithm, Ann. Inst. Statist. Math. 44, 1992,
with the mean curvature in place of the largest one. Features of networks are correlated: the
eigenvalues of G differ by factors of 10^4 and more, and L-BFGS needs many iterations. With weights
W = V T and T^T (a G + l2 I) T = I, the Hessian in V is close to the identity.

There are two such T, and a search uses the cheaper one first:

- `LeadingDirections` knows the largest eigenvalues of G only and takes all others for equal. Rows
  are weighted by their sums of p (1 - p), since rows whose class is certain have no curvature.
- `InverseFactor` knows all of G, which pays off in long searches with weak penalties.

The second moments are those of at most 4 D rows, which is exact enough for a search.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch

from featx.analysis.probe.matrix_products import product
from featx.analysis.probe.penalised_objective import PenalisedObjective

_ROWS_PER_FEATURE = 4

_DIRECTIONS = 64
"""Number of leading directions."""

_EXTRA_DIRECTIONS = 16
"""Directions that are computed in addition, so that the leading ones are accurate."""

_PRODUCTS = 4
"""Products with the rows that find the leading directions."""

LEAST_ROWS_OF_LEADING = 2 * _DIRECTIONS
"""Number of rows from which leading directions are computed."""


class SecondMoments:
    """Second moments of the features of a matrix, computed when they are needed first.

    Args:
        x: (n, D) standardised.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self.is_known = False

    @cached_property
    def matrix(self) -> torch.Tensor:
        """(D, D) float64 mean of x x^T over the sampled rows."""
        self.is_known = True
        rows = self._x[self.sampled_rows]
        return product(rows.T, rows).double() / len(rows)

    @cached_property
    def sampled_rows(self) -> torch.Tensor:
        """Indices of at most 4 D random rows, the same ones for every search."""
        count, width = self._x.shape
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(count, generator=generator)[: _ROWS_PER_FEATURE * width]
        return chosen.sort().values.to(self._x.device)

    @property
    def cost(self) -> int:
        """Number of multiplications for the matrix and its factor."""
        count, width = self._x.shape
        return min(count, _ROWS_PER_FEATURE * width) * width**2 + width**3

    @property
    def cost_of_leading(self) -> int:
        """Number of multiplications for the leading directions."""
        count, width = self._x.shape
        columns = _DIRECTIONS + _EXTRA_DIRECTIONS
        return _PRODUCTS * min(count, _ROWS_PER_FEATURE * width) * width * columns


class Variables(ABC):
    """Variables V of a search, with weights W = V T.

    Attributes:
        scale: bias divided by its variable.
    """

    scale: float

    @abstractmethod
    def from_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Convert weights to variables, both (C, D)."""

    @abstractmethod
    def to_weight(self, variables: torch.Tensor) -> torch.Tensor:
        """Convert variables to weights, both (C, D)."""

    @abstractmethod
    def gradient(self, of_weight: torch.Tensor) -> torch.Tensor:
        """Convert the gradient in the weights to that in the variables, both (C, D)."""


class InverseFactor(Variables):
    """T = L^-1 with L L^T = a G + l2 I.

    Args:
        objective: objective at the current weights.
        moments: second moments of its features.
    """

    def __init__(self, objective: PenalisedObjective, moments: SecondMoments) -> None:
        curvature = max(1e-12, objective.mean_curvature())
        self._lower: torch.Tensor = _lower_factor(curvature * moments.matrix, objective.l2)
        identity = torch.eye(len(self._lower), dtype=self._lower.dtype, device=self._lower.device)
        self._inverse: torch.Tensor = torch.linalg.solve_triangular(
            self._lower, identity, upper=False
        )
        self.scale = curvature**-0.5

    def from_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Variables`."""
        return product(weight, self._lower)

    def to_weight(self, variables: torch.Tensor) -> torch.Tensor:
        """See `Variables`."""
        return product(variables, self._inverse)

    def gradient(self, of_weight: torch.Tensor) -> torch.Tensor:
        """See `Variables`."""
        return product(of_weight, self._inverse.T)


class LeadingDirections(Variables):
    """T = (a G + l2 I)^-1/2, with the smaller eigenvalues of G replaced by the largest of them.

    The eigenvectors come from subspace iteration (N. Halko, P. G. Martinsson and J. A. Tropp,
    Finding structure with randomness, SIAM Review 53, 2011, algorithm 4.4).

    Args:
        objective: objective of a sample of the rows, at the current weights.
    """

    def __init__(self, objective: PenalisedObjective) -> None:
        p = objective.probabilities()
        curvatures = (p - p.square()).sum(1, keepdim=True)
        curvature = max(1e-12, float(curvatures.mean()) / p.shape[1])
        x = objective.x * (curvatures / (curvature * p.shape[1] * len(p))).sqrt_()
        eigenvalues, self._directions = _leading_eigenvectors(x, objective.weight.dtype)
        factors = (curvature * eigenvalues + objective.l2).rsqrt_()
        self._factors, self._other = factors[:-1], float(factors[-1])
        self.scale = curvature**-0.5

    def from_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Variables`."""
        return self._scaled(weight, 1 / self._factors, 1 / self._other)

    def to_weight(self, variables: torch.Tensor) -> torch.Tensor:
        """See `Variables`."""
        return self._scaled(variables, self._factors, self._other)

    def gradient(self, of_weight: torch.Tensor) -> torch.Tensor:
        """See `Variables`; T is symmetric."""
        return self.to_weight(of_weight)

    def _scaled(self, values: torch.Tensor, factors: torch.Tensor, other: float) -> torch.Tensor:
        """Multiply (C, D) values by `factors` along the directions, and by `other` elsewhere."""
        along = (values @ self._directions).mul_(factors - other)
        return torch.addmm(values, along, self._directions.T, beta=other)


def _lower_factor(matrix: torch.Tensor, l2: float) -> torch.Tensor:
    """Return L with L L^T = matrix + l2 I.

    Second moments in float32 may have slightly negative eigenvalues; a penalty that is too weak for
    them is increased, which a preconditioner may do.
    """
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    lower: torch.Tensor
    while True:
        lower, failed = torch.linalg.cholesky_ex(matrix + l2 * identity)
        if not failed:
            return lower
        l2 *= 10


def _leading_eigenvectors(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the largest eigenvalues of x^T x in falling order, and eigenvectors of all but one.

    Returns:
        (K + 1,) eigenvalues and (D, K) eigenvectors, both in `dtype`.
    """
    generator = torch.Generator().manual_seed(0)
    columns = _DIRECTIONS + _EXTRA_DIRECTIONS
    basis = torch.randn((x.shape[1], columns), generator=generator).to(x)
    for _ in range(_PRODUCTS // 2):
        basis = torch.linalg.qr(basis).Q
        image = product(x.T, product(x, basis))
        basis, before = image, basis
    eigenvalues, rotation = torch.linalg.eigh((before.T @ image).to(dtype))
    leading = rotation.flip(1)[:, :_DIRECTIONS]
    return eigenvalues.flip(0)[: _DIRECTIONS + 1].clamp(min=0), before.to(dtype) @ leading
