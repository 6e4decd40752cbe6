"""Checks of captures on the first forward pass that has hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from featx.errors import LayerError, RunError
from featx.layers import CapturePoint, Trace, check_weights


def check_gradients_arrive(
    points: Sequence[CapturePoint], fired: Sequence[str], target: str | int
) -> None:
    """Check that the gradient of the target arrives at each captured gradient."""
    silent = [point.name for point in points if point.is_gradient and point.name not in fired]
    if silent:
        raise LayerError(
            f"{', '.join(silent)}: target={target} has no gradient there, because the output of "
            "the model does not depend on it."
        )


def check_fired(points: Sequence[CapturePoint], fired: Sequence[str]) -> None:
    """Check that each capture fired exactly once."""
    expected = [point.name for point in points]
    if sorted(fired) != sorted(expected):
        raise RunError(
            f"a second forward pass fired {list(fired)}, expected {expected} from the trace. The "
            "model runs different layers for different batches, so its rows are not reproducible."
        )


def calls_in_trace(traced: Trace, modules: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """(name, capture) of each hooked module -> number of its calls in the trace."""
    return {key: len(traced.by_module[traced.names[key[0]]]) for key in modules}


def check_batch_dimension(point: CapturePoint, value: torch.Tensor, batch_size: int) -> None:
    """Check that the first dimension of a captured tensor is the batch."""
    shape = tuple(value.shape)
    if shape[:1] != (batch_size,):
        raise LayerError(
            f"{point.name} has shape {shape} for a batch of {batch_size}: its first dimension is "
            "not the batch, so it has no row per image. Choose a layer around it."
        )
    if point.capture == "attention":
        check_weights(point.name, value)


def check_same_score(with_hooks: torch.Tensor, without_hooks: torch.Tensor) -> None:
    """Check that the hooks for gradients do not change the output of the model."""
    if not torch.allclose(with_hooks, without_hooks, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise LayerError(
            "grad_input is not available here: a layer writes to its input, and later layers read "
            "the changed tensor. Choose grad_output of the layer before."
        )
