"""Gradients in training: clipping by value or norm, and alarms that name the layer and the step.

    with featx.gradients.watch(model, clip_value=0.01) as log:
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()  # gradients are clamped as they arrive
            optimizer.step()  # gradients are judged, and clipped by norm, just before
    print(log.table())

Three kinds of hooks exist, and all of them are removed at the end of the block:

* a tensor hook on each parameter clamps the gradient that arrives (`clip_value`);
* a hook before the step of any torch.optim optimizer that updates these parameters, when all
  gradients of the step have arrived, after any number of backward passes (`clip_norm`, alarms);
* tensor hooks on the inputs and outputs of each module record the flow of gradients.

Norms stay on the device until the step and are copied to the CPU together.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
