"""Search for the minimum of a logistic regression, in variables that need few iterations.

With probabilities p, the Hessian of the mean cross-entropy is about a G + l2 I for each class,
where G is the matrix of second moments of the features and a the mean of p (1 - p). This is the
bound of D. Bohning, Multinomial logistic regression algorithm, Ann. Inst. Statist. Math. 44, 1992,
with the mean curvature in place of the largest one. Features of networks are correlated: the
eigenvalues of G differ by factors of 10^4 and more, and L-BFGS needs hundreds of iterations. With
a G + l2 I = L L^T and weights W = V L^-1, the Hessian in V is close to the identity.

The second moments are those of at most 4 D rows, which is exact enough for a search, and costs as
much as a few products with all rows.
"""

from __future__ import annotations

from functools import cached_property

import torch

from featx.analysis.probe.lbfgs import LBFGS, MAX_ITERATIONS
from featx.analysis.probe.matrix_products import product
from featx.analysis.probe.penalised_objective import PenalisedObjective

_MAX_FEATURES = 4096
"""Number of features up to which the factors are made: two matrices of 128 MiB."""

_ROWS_PER_FEATURE = 4

_LEAST_EVALUATIONS = 30
"""Evaluations of the objective after which a search may go on with a preconditioner. Many fits of
features that are hardly correlated end before."""


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
        """(D, D) float64 mean of x x^T over evenly spaced rows."""
        self.is_known = True
        most = _ROWS_PER_FEATURE * self._x.shape[1]
        rows = self._x[:: -(-len(self._x) // most)].contiguous()
        return product(rows.T, rows).double() / len(rows)

    def evaluations_before(self, num_classes: int) -> int | None:
        """Number of evaluations to spend without a preconditioner, or None if there is none.

        As many as its construction costs, so that a fit never takes much more than twice the time
        of the better way; none if an earlier fit of the same matrix has needed it.
        """
        count, width = self._x.shape
        # Apple GPUs have no float64.
        if width > _MAX_FEATURES or self._x.device.type == "mps":
            return None
        if self.is_known:
            return 0
        moments = min(count, _ROWS_PER_FEATURE * width) * width**2
        of_one = 2 * count * width * num_classes
        return max(_LEAST_EVALUATIONS, (moments + width**3) // of_one)


class PreconditionedObjective:
    """The same objective as a function of other variables.

    Args:
        objective: objective at the weights at which the search begins.
        moments: second moments of its features.

    Attributes:
        parameters: variables of the search.
    """

    def __init__(self, objective: PenalisedObjective, moments: SecondMoments) -> None:
        self._objective = objective
        weight = objective.weight
        curvature = max(1e-12, objective.mean_curvature())
        lower = _lower_factor(curvature * moments.matrix, objective.l2)
        identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        self._inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        self._scale = curvature**-0.5
        self._v = weight @ lower
        self._c = objective.bias / self._scale
        self.parameters = [self._v, self._c]

    def __call__(self) -> torch.Tensor:
        """Compute the loss, and its gradient in both kinds of variables."""
        objective = self._objective
        torch.mm(self._v, self._inverse, out=objective.weight)
        torch.mul(self._c, self._scale, out=objective.bias)
        loss = objective()
        assert objective.weight.grad is not None
        assert objective.bias.grad is not None
        self._v.grad = objective.weight.grad @ self._inverse.T
        self._c.grad = objective.bias.grad * self._scale
        return loss


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


def minimise(objective: PenalisedObjective, moments: SecondMoments, tolerance: float) -> int:
    """Minimise an objective by L-BFGS, with a preconditioner if the search is long.

    Args:
        objective: objective at the initial weights, which are changed in place.
        moments: second moments of its features.
        tolerance: largest entry of the gradient at which the search ends.

    Returns:
        number of iterations.
    """
    evaluations = moments.evaluations_before(len(objective.bias))
    iterations = 0
    if evaluations != 0:
        limit = 2 * MAX_ITERATIONS if evaluations is None else evaluations
        search = LBFGS([objective.weight, objective.bias], tolerance, limit)
        search.minimise(objective)
        iterations = search.iterations
        objective()
        if evaluations is None or objective.max_abs_gradient <= tolerance:
            return iterations
    preconditioned = PreconditionedObjective(objective, moments)
    search = LBFGS(preconditioned.parameters, 0.0, 2 * MAX_ITERATIONS)
    search.minimise_until(preconditioned, lambda: objective.max_abs_gradient <= tolerance)
    return iterations + search.iterations
