"""Gradient targets: one number per image, from the output of the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from featx.errors import ModelError


def target_values(output: object, target: str | int, labels: torch.Tensor | None) -> torch.Tensor:
    """Compute the differentiable number of each image whose gradient is taken.

    Args:
        output: output of the model; see `logits_of`.
        target: 'label' or 'predicted' for the logit of that class; an index for the logit of a
            fixed class; 'loss' for the cross entropy to the label; 'entropy' of the softmax;
            'logsumexp' of the logits.
        labels: (B,) int64 indices into the classes of the model; None in trial passes, where
            the predicted class takes the place of the label.

    Returns:
        (B,) in the dtype of the logits.

    Raises:
        ModelError: the model returns no logits, or has no such class.
    """
    logits = logits_of(output)
    return values_of_classes(logits, target, target_classes(logits, target, labels))


def logits_of(output: object) -> torch.Tensor:
    """Find the logits, (B, classes), in the output of a model.

    They are the output itself, its entry or attribute `logits` (Hugging Face's ModelOutput, a dict,
    a dataclass, a named tuple), or the only two-dimensional tensor of a tuple or list.

    Raises:
        ModelError: there are none; the message describes the output.
    """
    logits = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif not isinstance(output, torch.Tensor) and hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, tuple | list):
        flat = [x for x in output if isinstance(x, torch.Tensor) and x.ndim == 2]
        logits = flat[0] if len(flat) == 1 else None
    if isinstance(logits, torch.Tensor) and logits.ndim == 2:
        return logits
    raise ModelError(
        "gradients need a model that returns logits (B, classes), by themselves or under the name "
        f"logits; this one returns {_describe(output)}."
    )


def _describe(output: object) -> str:
    """Description of an output for a message: its type, with names and shapes inside."""
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


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def target_classes(
    output: torch.Tensor, target: str | int, labels: torch.Tensor | None
) -> torch.Tensor | None:
    """(B,) int64 class of each image whose number is taken, from (B, classes) logits.

    None for targets that concern no single class; other arguments are as for `target_values`.
    Raises ModelError if the model has no such class.
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
    if bool(((labels < 0) | (labels >= num_classes)).any()):  # on the CPU: no device is awaited
        raise ModelError(
            f"target={target}: an image has no label, or one beyond the model's {num_classes} "
            "classes, counted from 0."
        )
    return labels.to(output.device, non_blocking=True)


def values_of_classes(
    output: torch.Tensor, target: str | int, classes: torch.Tensor | None
) -> torch.Tensor:
    """Compute the (B,) numbers of (B, classes) logits for given classes, in the same dtype.

    The (B,) int64 classes, from `target_classes`, may be those chosen from other images' logits.
    """
    if target == "entropy":
        return -(output.softmax(1) * output.log_softmax(1)).sum(1)
    if target == "logsumexp":
        return output.logsumexp(1)
    assert classes is not None
    if target == "loss":
        return F.cross_entropy(output, classes, reduction="none")
    return output.gather(1, classes[:, None])[:, 0]
