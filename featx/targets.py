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
    return values_of_classes(output, target, target_classes(output, target, labels))


def target_classes(
    output: Any, target: str | int, labels: torch.Tensor | None
) -> torch.Tensor | None:
    """The class whose number is taken, (B,) int64; None where the number is of no class.

    Args:
        output, target, labels: see `target_values`.

    Raises:
        ModelError: the model returns no logits, or has no such class.
    """
    if not isinstance(output, torch.Tensor) or output.ndim != 2:
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ModelError(
            f"gradients need a model that returns logits (B, classes); this one returns {shape}."
        )
    num_classes = output.shape[1]
    if target in ("entropy", "logsumexp"):
        return None
    if isinstance(target, int):
        if target >= num_classes:
            raise ModelError(
                f"target={target}: the model has {num_classes} classes, counted from 0."
            )
        return torch.full((len(output),), target, device=output.device)
    if target == "predicted" or labels is None:
        return output.detach().argmax(1)
    chosen = labels.to(output.device)
    if bool(((chosen < 0) | (chosen >= num_classes)).any()):
        raise ModelError(
            f"target={target}: an image has no label, or one beyond the model's {num_classes} "
            "classes. Labels are numbers of the sub-folders in order of their names; they must "
            "be the classes that the model was trained on."
        )
    return chosen


def values_of_classes(
    output: torch.Tensor, target: str | int, classes: torch.Tensor | None
) -> torch.Tensor:
    """The numbers of classes that were chosen before, such as those of other images' logits.

    Args:
        output: logits (B, classes).
        target: see `target_values`.
        classes: (B,) int64, from `target_classes`.

    Returns:
        (B,) of the logits' dtype.
    """
    if target == "entropy":
        return -(output.softmax(1) * output.log_softmax(1)).sum(1)
    if target == "logsumexp":
        return output.logsumexp(1)
    assert classes is not None
    if target == "loss":
        return F.cross_entropy(output, classes, reduction="none")
    return output.gather(1, classes[:, None])[:, 0]
