"""Newton's method for the last digits of a small logistic regression."""

from __future__ import annotations

import math

import torch

from featx.analysis.probe.softmax_objective import SoftmaxObjective

LOGIT_TOLERANCE = 1e-3
"""Largest change of a training row's logit in the last step of Newton's method. The remaining error
is below a hundredth of it."""

MAX_NEWTON_STEPS = 50

MAX_CG_STEPS = 1000
"""Maximum number of products with the Hessian in one step of Newton's method."""


def finish_by_newton(objective: SoftmaxObjective) -> None:
    """Improve weights near the minimum by Newton's method, in place.

    The line search of torch's L-BFGS rejects steps below 1e-9, which leaves gradients of 1e-8. Each
    step is computed by conjugate gradients as in C.-J. Lin, R. C. Weng and S. S. Keerthi, Trust
    Region Newton Method for Logistic Regression, JMLR 9, 2008, with step halving in place of a
    trust region.
    """
    weight, bias = objective.weight, objective.bias
    loss = float(objective())
    for _ in range(MAX_NEWTON_STEPS):
        step_weight, step_bias = _newton_step(objective)
        moved = objective.largest_change(step_weight, step_bias)
        size = 1.0
        while True:
            weight += size * step_weight
            bias += size * step_bias
            found = float(objective())
            if found <= loss:
                break
            weight -= size * step_weight
            bias -= size * step_bias
            size /= 2
            if size * moved <= LOGIT_TOLERANCE:  # the loss cannot decrease any further in float64
                objective()
                return
        loss = found
        if moved <= LOGIT_TOLERANCE:
            return


def _newton_step(objective: SoftmaxObjective) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute about -H^-1 g, as (C, D) and (C,), with Hessian H and gradient g of the last call.

    Conjugate gradients solve the system more exactly the smaller g is, so that Newton's method
    converges superlinearly.
    """
    p = objective.probabilities()
    assert objective.weight.grad is not None
    assert objective.bias.grad is not None
    residual = -torch.cat([objective.weight.grad, objective.bias.grad[:, None]], dim=1)
    step, direction = torch.zeros_like(residual), residual.clone()
    square = float(residual.square().sum())
    wanted = square * min(1e-4, math.sqrt(square))
    for _ in range(MAX_CG_STEPS):
        if square <= wanted:
            break
        product = objective.hessian_vector_product(p, direction)
        curvature = float((direction * product).sum())
        if not curvature > 0:
            break
        step += square / curvature * direction
        residual -= square / curvature * product
        before, square = square, float(residual.square().sum())
        direction = residual + square / before * direction
    return step[:, :-1], step[:, -1]
