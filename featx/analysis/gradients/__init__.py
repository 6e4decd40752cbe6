"""Gradients in training: clipped by value or norm, and alarms that name the layer and the step.

    with featx.gradients.watch(model, clip_value=0.01) as log:
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()  # gradients arrive, clamped
            optimizer.step()  # just before: judged, and clipped by norm
    print(log.table())

Three kinds of hooks, all gone after the block:

* a tensor hook on each parameter clamps the gradient that arrives (`clip_value`);
* a hook before the step of whatever torch.optim optimizer updates these parameters, where all
  gradients of the step are there, however many backward passes they took (`clip_norm`, alarms);
* tensor hooks on what goes into and comes out of each module give the flow of gradients.

Norms stay on the device until the step and are moved in one copy.
"""

from featx.analysis.gradients.alarms import Alarm, GradientAlarm, Limits, Step
from featx.analysis.gradients.log import GradientLog, watch

__all__ = ["Alarm", "GradientAlarm", "GradientLog", "Limits", "Step", "watch"]
