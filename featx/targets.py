"""The number whose gradient is taken: one per image, from what the model returns."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from featx.errors import ModelError


def target_values(output: Any, target: str | int, labels: torch.Tensor | None) -> torch.Tensor:
    """One number per image, differentiable.

    Args:
        output: what the model returned; logits (B, classes).
        target: 'label' or 'predicted', the logit of that class; a class by its index; 'loss', the
            cross entropy to the label; 'entropy' of the softmax; 'logsumexp' of the logits.
        labels: (B,) int64, the index of the image's class among the model's; None in a probe, where
            the predicted class stands in.

    Returns:
        (B,) of the logits' dtype.

    Raises:
        ModelError: the model returns no logits, or has no such class.
    """
    if not isinstance(output, torch.Tensor) or output.ndim != 2:
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ModelError(
            f"gradients need a model that returns logits (B, classes); this one returns {shape}."
        )
    num_classes = output.shape[1]
    if target == "entropy":
        return -(output.softmax(1) * output.log_softmax(1)).sum(1)
    if target == "logsumexp":
        return output.logsumexp(1)
    if isinstance(target, int):
        if target >= num_classes:
            raise ModelError(
                f"target={target}: the model has {num_classes} classes, counted from 0."
            )
        return output[:, target]
    predicted = output.detach().argmax(1)
    if target == "predicted" or labels is None:
        chosen = predicted
    else:
        chosen = labels.to(output.device)
        if bool(((chosen < 0) | (chosen >= num_classes)).any()):
            raise ModelError(
                f"target={target}: an image has no label, or one beyond the model's {num_classes} "
                "classes. Labels are numbers of the sub-folders in order of their names; they must "
                "be the classes that the model was trained on."
            )
    if target == "loss":
        return F.cross_entropy(output, chosen, reduction="none")
    return output.gather(1, chosen[:, None])[:, 0]
