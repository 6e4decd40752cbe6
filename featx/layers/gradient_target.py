"""The number whose gradient is taken: one per image, from what the model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from featx.errors import ModelError


def target_values(output: Any, target: str | int, labels: torch.Tensor | None) -> torch.Tensor:
    """One number per image, differentiable.

    Args:
        output: what the model returned; see `logits_of`.
        target: 'label' or 'predicted', the logit of that class; a class by its index; 'loss', the
            cross entropy to the label; 'entropy' of the softmax; 'logsumexp' of the logits.
        labels: (B,) int64, the index of the image's class among the model's; None in a probe, where
            the predicted class stands in.

    Returns:
        (B,) of the logits' dtype.

    Raises:
        ModelError: the model returns no logits, or has no such class.
    """
    logits = logits_of(output)
    return values_of_classes(logits, target, target_classes(logits, target, labels))


def logits_of(output: Any) -> torch.Tensor:
    """The logits (B, classes) in what a model returns.

    That is the tensor itself, the entry or attribute `logits` of an output with names (Hugging
    Face's ModelOutput, a dict, a dataclass, a named tuple), or the only tensor of two dimensions in
    a tuple or list.

    Raises:
        ModelError: there are none; the message says what was found.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif not isinstance(output, torch.Tensor) and hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, tuple | list):
        flat = [x for x in output if isinstance(x, torch.Tensor) and x.ndim == 2]
        found = flat[0] if len(flat) == 1 else None
    if isinstance(found, torch.Tensor) and found.ndim == 2:
        return found
    raise ModelError(
        "gradients need a model that returns logits (B, classes), by themselves or under the name "
        f"logits; this one returns {_described(output)}."
    )


def _described(output: Any) -> str:
    """A returned value for a message: its type, and the shapes and names in it."""
    if isinstance(output, torch.Tensor):
        return f"a tensor {tuple(output.shape)}"
    name = type(output).__name__
    if isinstance(output, Mapping):
        items = dict(output)
    elif isinstance(output, tuple | list):
        return f"a {name} of {', '.join(_shape(x) for x in output[:8]) or 'nothing'}"
    else:
        items = getattr(output, "__dict__", {})
    inside = ", ".join(f"{key} {_shape(x)}" for key, x in list(items.items())[:8])
    return f"a {name} with {inside or 'nothing'}"


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def target_classes(
    output: torch.Tensor, target: str | int, labels: torch.Tensor | None
) -> torch.Tensor | None:
    """The class whose number is taken, (B,) int64; None where the number is of no class.

    Args:
        output: logits (B, classes).
        target, labels: see `target_values`.

    Raises:
        ModelError: the model has no such class.
    """
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
