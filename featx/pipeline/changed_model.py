"""Detects a model of the user's code that computes other features than the store has.

It may do so with the same weights: its code can have changed, or something that is neither a weight
nor printed, such as the active adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from featx.errors import StoreMismatchError
from featx.types import Json, ResumeState

if TYPE_CHECKING:
    import torch

    from featx.engine import Engine

RESPONSE = "response"
"""Entry of `Run.resolved` with the values of the response of the model that started the store."""

_NUM_VALUES = 64
"""Largest number of values of a response."""

_SAME_MODEL, _SAME_LOW_PRECISION = 1e-4, 3e-2
"""Largest relative L2 difference between responses of one model, in two processes or on two kinds
of device; the second if its weights are not float32."""

_MODEL_ENTRIES = ("weights_sha256", "transform")
"""Entries of a fingerprint that belong to the model, besides those named model.<name>."""


@dataclass(frozen=True)
class Response:
    """Values that a model returns for fixed noise, evenly spaced over its output, with six digits.

    `limit` is the largest difference from a response of the same model.
    """

    values: list[float]
    limit: float


def response_of(engine: Engine) -> Response | None:
    """Return the response of a model; None if it returns random, non-finite or no values."""
    first, second = _pass_noise(engine), _pass_noise(engine)
    if not first or not all(map(math.isfinite, first)):
        return None
    dtypes = {str(parameter.dtype) for parameter in engine.module.parameters()}
    limit = _SAME_MODEL if dtypes <= {"torch.float32"} else _SAME_LOW_PRECISION
    return Response(first, limit) if _difference(first, second) <= limit else None


def _pass_noise(engine: Engine) -> list[float]:
    """Return values of all tensors that the model returns for two images of noise."""
    import torch

    from featx.base import elements

    x = engine.noise(2)
    with engine.named_failure(x), torch.no_grad():
        output = engine.module(x)
    parts = [
        _spaced(tensor.flatten()).float().cpu()
        for tensor in elements(output).values()
        if tensor.is_floating_point() and tensor.layout == torch.strided
    ]
    values = _spaced(torch.cat(parts)).tolist() if parts else []
    return [float(f"{value:.6g}") for value in values]


def _spaced(values: torch.Tensor) -> torch.Tensor:
    """Return values of a vector, evenly spaced."""
    return values[:: max(1, len(values) // _NUM_VALUES)][:_NUM_VALUES]


def check_response(
    code: str, response: Response | None, fingerprint: Json, state: ResumeState
) -> None:
    """Raise StoreMismatchError if a model has another response than the one that started a store.

    `code` is what makes the model, for the message. Other settings are refused elsewhere.
    """
    before = state.resolved.get(RESPONSE)
    if not before or response is None:
        return
    # Settings of the model or of its input that differ in the two fingerprints.
    names = {*_MODEL_ENTRIES}
    names |= {name for name in {*fingerprint, *state.fingerprint} if name.startswith("model.")}
    if any(fingerprint.get(name) != state.fingerprint.get(name) for name in names):
        return
    difference = _difference(before, response.values)
    if difference > response.limit:
        raise StoreMismatchError(
            f"{state.what} started with another model than {code} makes now, although weights and "
            f"printed layers are the same: what it returns for noise differs by {difference:.2g} "
            f"(relative L2 difference; expected at most {response.limit:g}). Its code may have "
            "changed, or an active adapter, a flag or a constant. Put that back, or extract again "
            "with another out=DIR or overwrite=true."
        )


def _difference(before: Sequence[float], now: Sequence[float]) -> float:
    """Return the L2 difference relative to the longer one; infinite for other numbers of values."""
    if len(before) != len(now):
        return math.inf
    length = max(np.linalg.norm(before), np.linalg.norm(now))
    return float(np.linalg.norm(np.subtract(before, now)) / (length or 1.0))
