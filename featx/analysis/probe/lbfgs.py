"""L-BFGS of torch with the first step of scipy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

MAX_ITERATIONS = 1000

_MAX_LINE_EVALUATIONS = 25
"""Maximum number of evaluations in one iteration."""


class LBFGS(torch.optim.LBFGS):
    """L-BFGS of torch for a few tensors, without the import of torch._dynamo.

    That import takes about two seconds. torch (2.14) does it at the first call of
    `add_param_group`, only to exclude this method from compiling; the function that it wraps is the
    same without this.

    Args:
        parameters: tensors to change, in place.
    """

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(
            parameters,
            max_iter=1,
            max_eval=_MAX_LINE_EVALUATIONS,
            tolerance_grad=0.0,
            tolerance_change=1e-14,
            history_size=10,
            line_search_fn="strong_wolfe",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as `torch.optim.Optimizer.add_param_group` does."""
        inherited = torch.optim.Optimizer.add_param_group
        getattr(inherited, "__wrapped__", inherited)(self, param_group)

    @property
    def iterations(self) -> int:
        """Number of iterations so far."""
        return int(self.state[self.param_groups[0]["params"][0]].get("n_iter", 0))

    def minimise(
        self,
        objective: Callable[[], torch.Tensor],
        is_done: Callable[[], bool],
        first_step: float | None = None,
    ) -> None:
        """Search for the minimum, or go on with it, until `is_done`.

        torch tries a first step of length 1 / |gradient|_1 of the gradient. With 10^5 weights that
        is so short that the line search extends it several times, with two products each.

        Args:
            objective: computes the loss and sets the gradients. It is called a second time at the
                variables that a step has found, and should know the result.
            is_done: asked before the first step and after each.
            first_step: length of the first step, as in scipy, or None for the whole gradient. A
                gradient with a sum of absolute values below 1 is always taken whole.
        """
        loss = float(objective())
        rate = 1.0
        if self.iterations == 0:
            gradients = self._gradients()
            absolute = sum(float(gradient.abs().sum()) for gradient in gradients)
            square = sum(float(gradient.square().sum()) for gradient in gradients)
            if absolute > 1:
                rate = absolute if first_step is None else absolute * first_step / math.sqrt(square)
        while self.iterations < MAX_ITERATIONS and not is_done():
            self._iterate(objective, rate)
            rate = 1.0
            before, loss = loss, float(objective())
            if not loss < before:
                return

    def change_objective(self, objective: Callable[[], torch.Tensor]) -> None:
        """Go on with another objective of the same variables, whose Hessian is similar.

        Without this, the next change of the gradient would contain the difference between both.

        Args:
            objective: computes the loss and sets the gradients.
        """
        before = torch.cat([gradient.flatten() for gradient in self._gradients()])
        objective()
        after = torch.cat([gradient.flatten() for gradient in self._gradients()])
        state = self.state[self.param_groups[0]["params"][0]]
        if self.iterations:
            state["prev_flat_grad"] = state["prev_flat_grad"] + after - before

    def take_over(
        self,
        other: LBFGS,
        converted_step: Callable[[torch.Tensor], torch.Tensor],
        converted_gradient: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Go on with the steps and gradients of a search in other variables.

        The product of a step and a change of the gradient is the same in all variables, so the
        estimate of the Hessian stays positive definite.

        Args:
            other: search whose place this one takes.
            converted_step: converts a step in the variables of `other`, as one vector.
            converted_gradient: the same for gradients.
        """
        if other.iterations == 0:
            return
        theirs = other.state[other.param_groups[0]["params"][0]]
        state = self.state[self.param_groups[0]["params"][0]]
        state |= theirs
        # torch (2.14) calls the changes of the gradient `old_dirs`.
        state["d"] = converted_step(theirs["d"])
        state["old_stps"] = [converted_step(step) for step in theirs["old_stps"]]
        state["prev_flat_grad"] = converted_gradient(theirs["prev_flat_grad"])
        state["old_dirs"] = [converted_gradient(change) for change in theirs["old_dirs"]]

    def _gradients(self) -> list[torch.Tensor]:
        """Gradients at the current variables."""
        return [parameter.grad for parameter in self.param_groups[0]["params"]]

    def _iterate(self, objective: Callable[[], torch.Tensor], rate: float) -> None:
        """Do one iteration, whose first trial is `rate` of the step that torch would try."""
        self.param_groups[0]["lr"] = rate
        self.step(objective)  # type: ignore[no-untyped-call]
