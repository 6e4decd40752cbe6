"""An engine with a clock of its own, which only says how long a forward pass takes."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch

from featx.engine import Compute, Engine, Formats

Slowdown = Callable[[int], float]
"""Number of a forward pass -> factor by which another program slows it down."""


class Simulated:
    """Passes over images of 2 x 2 pixels; rows of two numbers.

    Args:
        seconds: precision, or "compiled" -> seconds per image.
        slowdown: what other programs do to each pass.
        device: type of its device.
        value: second element of the rows in other precisions or compiled; else it is 1.
        per_batch_s: seconds that each pass takes whatever its size.
        image_bytes: memory that the pass takes for an image.
    """

    time_passes = Engine.time_passes
    backbone = types.SimpleNamespace(preprocess=types.SimpleNamespace(crop=(2, 2)))
    uses_fp32_only = False
    takes_gradients = False
    collector = types.SimpleNamespace(needs_keys=False)
    captures = types.SimpleNamespace(follows_data=False, points=())

    def __init__(
        self,
        seconds: dict[str, float],
        slowdown: Slowdown = lambda number: 1.0,
        device: str = "cpu",
        value: float = 1.0,
        per_batch_s: float = 0.0,
        image_bytes: int = 0,
    ) -> None:
        self.device = types.SimpleNamespace(type=device)
        self.compute = Compute("fp32", False, False, 16)
        self.now = 0.0
        self.batches: list[tuple[str, int]] = []
        self.asked_to_fold: bool | None = None
        self._seconds = seconds
        self._slowdown = slowdown
        self._value = value
        self._per_batch_s = per_batch_s
        self._image_bytes = image_bytes

    def configure_compute(self, compute: Compute, cast_once: bool = True) -> None:
        self.compute = compute

    def formats(self, images: torch.Tensor, fold_batchnorm: bool) -> Formats:
        self.asked_to_fold = fold_batchnorm
        return Formats(True, fold_batchnorm, num_folded=7)

    def bytes_per_image(self, precision: str) -> int:
        return self._image_bytes

    def run(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        mode = "compiled" if self.compute.compile else self.compute.precision
        seconds = self._per_batch_s + self._seconds[mode] * len(images)
        self.now += self._slowdown(len(self.batches)) * seconds
        self.batches.append((mode, len(images)))
        row = torch.tensor([1.0, 1.0 if mode == "fp32" else self._value])
        return {"layer": row.repeat(len(images), 1)}
