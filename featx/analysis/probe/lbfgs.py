"""L-BFGS of torch with the first step of scipy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

MAX_ITERATIONS = 1000


class LBFGS(torch.optim.LBFGS):
    """L-BFGS of torch for a few tensors, without the import of torch._dynamo.

    That import takes about two seconds. torch (2.14) does it at the first call of
    `add_param_group`, only to exclude this method from compiling; the function that it wraps is the
    same without this.

    Args:
        parameters: tensors to change, in place.
        tolerance: largest entry of the gradient at which the search ends.
        max_evaluations: number of evaluations of the objective after which it ends.
    """

    def __init__(
        self, parameters: list[torch.Tensor], tolerance: float, max_evaluations: int
    ) -> None:
        super().__init__(
            parameters,
            max_iter=MAX_ITERATIONS,
            max_eval=max_evaluations,
            tolerance_grad=tolerance,
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

    def minimise(self, objective: Callable[[], torch.Tensor]) -> None:
        """Search for the minimum, with a first step of length 1 along the gradient, as scipy does.

        torch tries a step of length 1 / |gradient|_1 of the gradient. With 10^5 weights that is so
        short that the line search extends it several times, with two products each.

        Args:
            objective: computes the loss and sets the gradients.
        """
        objective()
        gradients = self._gradients()
        absolute = sum(float(gradient.abs().sum()) for gradient in gradients)
        if absolute > 1:  # otherwise torch takes the whole gradient
            square = sum(float(gradient.square().sum()) for gradient in gradients)
            self._iterate(objective, absolute / math.sqrt(square))
        self.step(objective)  # type: ignore[no-untyped-call]

    def minimise_until(
        self, objective: Callable[[], torch.Tensor], is_done: Callable[[], bool]
    ) -> None:
        """Search for the minimum, with the whole gradient as the first step, until `is_done`.

        Args:
            objective: computes the loss and sets the gradients. It is called a second time at the
                variables that a step has found, and should know the result.
            is_done: asked after each step.
        """
        loss = float(objective())
        rate = max(1.0, sum(float(gradient.abs().sum()) for gradient in self._gradients()))
        for _ in range(MAX_ITERATIONS):
            self._iterate(objective, rate)
            rate = 1.0
            before, loss = loss, float(objective())
            if is_done() or not loss < before:
                return

    def _gradients(self) -> list[torch.Tensor]:
        """Gradients at the current variables."""
        return [parameter.grad for parameter in self.param_groups[0]["params"]]

    def _iterate(self, objective: Callable[[], torch.Tensor], rate: float) -> None:
        """Do one iteration, whose first trial is `rate` of the step that torch would try."""
        group = self.param_groups[0]
        usual = {name: group[name] for name in ("max_iter", "lr")}
        group |= {"max_iter": 1, "lr": rate}
        self.step(objective)  # type: ignore[no-untyped-call]
        group |= usual
