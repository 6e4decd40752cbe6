"""Search for the minimum of a penalised objective, with as few passes over all rows as possible.

Three things save passes:

- The search begins on a sample of 4 rows for each feature, if there are many more, and ends there
  long before the minimum of the sample, which is another one. Sizes of samples in such searches are
  the subject of R. H. Byrd, G. M. Chin, J. Nocedal and Y. Wu, Sample size selection in optimization
  methods for machine learning, Mathematical Programming 134, 2012.
- After some evaluations it goes on in variables that are less correlated (`preconditioner`).
- Pairs of steps and changes of the gradient are kept whenever rows or variables change.
"""

from __future__ import annotations

import torch

from featx.analysis.probe.lbfgs import LBFGS
from featx.analysis.probe.penalised_objective import PenalisedObjective
from featx.analysis.probe.preconditioner import (
    LEAST_ROWS_OF_LEADING,
    InverseFactor,
    LeadingDirections,
    SecondMoments,
    Variables,
)

_MAX_FEATURES = 4096
"""Number of features up to which `InverseFactor` is used: two matrices of 128 MiB."""

_LEAST_EVALUATIONS = 30
"""Evaluations of the objective after which a search may go on with `InverseFactor`, if there are no
leading directions. Many fits of features that are hardly correlated end before."""

_LEAST_EVALUATIONS_AFTER_LEADING = 100
"""The same for a search with leading directions."""

_LEAST_EVALUATIONS_BEFORE_LEADING = 5
"""Evaluations before the leading directions are computed, since the curvature changes fast at the
beginning."""

_LEAST_SAVING = 4
"""Cost of `InverseFactor` as a multiple of that of `LeadingDirections` from which the latter is
used."""

_SAMPLE_EVALUATIONS = 16
"""Evaluations of a sample, after which its gradient differs too much from that of all rows."""

_SAMPLE_TOLERANCE = 10
"""Largest entry of a sample's gradient at which its search ends, as a multiple of the tolerance."""

_LEAST_SHARE = 3
"""Number of rows per row of a sample from which a search begins on the sample."""


class PreconditionedObjective:
    """The same objective as a function of other variables.

    Args:
        objective: objective at the weights at which the search begins.
        variables: variables of the search.

    Attributes:
        objective: the objective in weights and bias, which may be replaced.
        parameters: variables of the weights and of the bias.
    """

    def __init__(self, objective: PenalisedObjective, variables: Variables) -> None:
        self.objective = objective
        self._variables = variables
        self._v = variables.from_weight(objective.weight)
        self._c = objective.bias / variables.scale
        self.parameters = [self._v, self._c]

    def __call__(self) -> torch.Tensor:
        """Compute the loss, and its gradient in both kinds of variables."""
        objective = self.objective
        objective.weight.copy_(self._variables.to_weight(self._v))
        torch.mul(self._c, self._variables.scale, out=objective.bias)
        loss = objective()
        assert objective.weight.grad is not None
        assert objective.bias.grad is not None
        self._v.grad = self._variables.gradient(objective.weight.grad)
        self._c.grad = objective.bias.grad * self._variables.scale
        return loss

    def step(self, of_weights: torch.Tensor) -> torch.Tensor:
        """Convert a step in weights and bias, as one vector, to one in the variables."""
        weight, bias = self._split(of_weights)
        variables = self._variables
        return torch.cat([variables.from_weight(weight).flatten(), bias / variables.scale])

    def gradient(self, of_weights: torch.Tensor) -> torch.Tensor:
        """Convert a gradient in weights and bias, as one vector, to one in the variables."""
        weight, bias = self._split(of_weights)
        variables = self._variables
        return torch.cat([variables.gradient(weight).flatten(), bias * variables.scale])

    def _split(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split a vector into values of the weights and of the bias."""
        count = self._v.numel()
        return values[:count].view_as(self._v), values[count:]


class Search:
    """L-BFGS whose objective and variables can change while its curvature is kept.

    Args:
        objective: objective at the initial weights, which are changed in place.
    """

    def __init__(self, objective: PenalisedObjective) -> None:
        self._objective = objective
        self._changed: PreconditionedObjective | None = None
        self._lbfgs = LBFGS([objective.weight, objective.bias])

    @property
    def is_changed(self) -> bool:
        """Whether the variables are other ones than weights and bias."""
        return self._changed is not None

    @property
    def iterations(self) -> int:
        """Number of iterations so far."""
        return self._lbfgs.iterations

    def run(self, tolerance: float, limit: int | None = None) -> bool:
        """Search until an entry of the gradient is small, or for some evaluations.

        Args:
            tolerance: largest entry of the gradient in weights and bias at which the search ends.
            limit: number of evaluations of the objective at which it also ends.

        Returns:
            whether nothing is left to do: not if the limit was reached.
        """
        objective = self._objective

        def is_over() -> bool:
            return limit is not None and objective.evaluations >= limit

        self._lbfgs.minimise(
            self._changed or objective,
            lambda: objective.max_abs_gradient <= tolerance or is_over(),
            first_step=1.0 if self._changed is None else None,
        )
        return objective.max_abs_gradient <= tolerance or not is_over()

    def change_objective(self, objective: PenalisedObjective) -> None:
        """Go on with an objective of the same weights for other rows."""
        self._objective = objective
        if self._changed is None:
            self._lbfgs.change_objective(objective)
        else:
            self._changed.objective = objective
            self._lbfgs.change_objective(self._changed)

    def change_variables(self, variables: Variables) -> None:
        """Go on in other variables, after a search in the weights themselves."""
        changed = PreconditionedObjective(self._objective, variables)
        search = LBFGS(changed.parameters)
        search.take_over(self._lbfgs, changed.step, changed.gradient)
        self._changed, self._lbfgs = changed, search


def minimise(objective: PenalisedObjective, moments: SecondMoments, tolerance: float) -> int:
    """Minimise an objective by L-BFGS.

    Args:
        objective: objective at the initial weights, which are changed in place.
        moments: second moments of its features.
        tolerance: largest entry of the gradient at which the search ends.

    Returns:
        number of iterations, with those on a sample.
    """
    of_factor = _evaluations_before_factor(objective, moments)
    of_leading = _evaluations_before_leading(objective, moments)
    iterations = 0
    if of_factor != 0:
        search = Search(objective)
        if of_leading is not None:
            # A search that begins elsewhere begins closer to the minimum than a sample leads.
            begins_at_zero = not (objective.weight.any() or objective.bias.any())
            if begins_at_zero and _LEAST_SHARE * len(moments.sampled_rows) <= len(objective.x):
                sample = objective.of_rows(moments.sampled_rows)
                search = _search_on_sample(sample, of_leading, tolerance)
                search.change_objective(objective)
            if not search.is_changed:
                if search.run(tolerance, of_leading):
                    return search.iterations
                search.change_variables(LeadingDirections(objective.of_rows(moments.sampled_rows)))
            if of_factor is not None:
                of_factor = max(of_factor, _LEAST_EVALUATIONS_AFTER_LEADING)
        if search.run(tolerance, of_factor):
            return search.iterations
        iterations = search.iterations
    search = Search(objective)
    search.change_variables(InverseFactor(objective, moments))
    search.run(tolerance)
    return iterations + search.iterations


def _search_on_sample(sample: PenalisedObjective, of_leading: int, tolerance: float) -> Search:
    """Return a search that has begun on a sample and can go on with all rows.

    Args:
        sample: objective of the sample.
        of_leading: evaluations before the leading directions.
        tolerance: largest entry of the gradient of all rows at which the search ends.
    """
    search = Search(sample)
    least = _SAMPLE_TOLERANCE * tolerance
    is_short = search.run(least, min(of_leading, _SAMPLE_EVALUATIONS))
    if not is_short and of_leading < _SAMPLE_EVALUATIONS:
        search.change_variables(LeadingDirections(sample))
        search.run(least, _SAMPLE_EVALUATIONS)
    return search


def _evaluations_before_factor(objective: PenalisedObjective, moments: SecondMoments) -> int | None:
    """Return after how many evaluations `InverseFactor` is used, or None if it never is.

    As many as its construction costs, so that a fit never takes much more than twice the time of
    the better way; none if an earlier fit of the same matrix has needed it.
    """
    # Apple GPUs have no float64.
    if objective.x.shape[1] > _MAX_FEATURES or objective.x.device.type == "mps":
        return None
    return 0 if moments.is_known else max(_LEAST_EVALUATIONS, moments.cost // objective.cost)


def _evaluations_before_leading(
    objective: PenalisedObjective, moments: SecondMoments
) -> int | None:
    """Return after how many evaluations `LeadingDirections` is used, or None if it never is.

    It never is for a few hundred features, where `InverseFactor` costs little.
    """
    cost = moments.cost_of_leading
    if (
        objective.x.device.type == "mps"
        or moments.cost < _LEAST_SAVING * cost
        or len(objective.x) < LEAST_ROWS_OF_LEADING
    ):
        return None
    return max(_LEAST_EVALUATIONS_BEFORE_LEADING, cost // objective.cost)
