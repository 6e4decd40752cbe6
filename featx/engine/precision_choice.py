"""Choice of `precision=auto`: timed trial passes at each precision, over images of the data set.

A measurement can be wrong because another program used the processor meanwhile. So a precision is
refused for its speed only after it and fp32 have been measured in turns several times; the fastest
pass of each counts, as other programs can only slow a pass down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from featx.base import may_have_bf16
from featx.engine.compute import MIN_COSINE, MIN_SPEEDUP, Compute, TimedRows
from featx.engine.engine import Engine
from featx.engine.row_checks import row_cosines
from featx.errors import counted

_SHORT_TIMING_IMAGES = 2
"""Number of images of the short timing, which comes first: a precision may be far slower."""

_TOO_SLOW = 2.0
"""A precision that takes this many times as long as fp32 is not tried on all trial images."""

_FAR_TOO_SLOW = 8.0
"""A precision that takes this many times as long is not measured again: other programs do not slow
a pass down so much."""

ROUNDS = 3
"""Number of times that fp32 and another precision are measured in turns before it is refused."""


@dataclass(frozen=True)
class ChosenPrecision:
    """The fastest precision whose rows stay close to fp32, and why it is taken, in words.

    `measured` has rows of the trial images and seconds per image at it; None if there are none.
    """

    precision: str
    reason: str
    measured: TimedRows | None = None


def choose_precision(
    engine: Engine,
    compute: Compute,
    images: torch.Tensor,
    timed_images: torch.Tensor,
    exact: Mapping[str, torch.Tensor] | None,
) -> ChosenPrecision:
    """Find the fastest precision; the engine is configured with the last one that was measured."""
    if engine.uses_fp32_only:
        return ChosenPrecision("fp32", "other precisions are not measured for heat maps")
    if len(images) == 0:
        return ChosenPrecision("fp32", "no image could be read to measure others")
    if engine.device.type == "cpu" and not may_have_bf16():
        return ChosenPrecision("fp32", "this CPU has no units for bf16")
    return _Measurement(engine, compute, images, timed_images).choose(exact)


class _Measurement:
    """Timed passes of an engine at several precisions."""

    def __init__(
        self, engine: Engine, compute: Compute, images: torch.Tensor, timed_images: torch.Tensor
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._images = images
        self._timed = timed_images
        self._measured: dict[str, TimedRows] = {}

    def choose(self, exact: Mapping[str, torch.Tensor] | None) -> ChosenPrecision:
        """Measure fp32 and the others, and return the fastest one that is close to it."""
        on_cpu = self._engine.device.type == "cpu"
        self._measure("fp32", exact)
        best, reasons = "fp32", []
        for precision in ("bf16",) if on_cpu else ("fp16", "bf16"):
            # Without units for a precision a CPU would take minutes for all trial images.
            if on_cpu and (slower := self._times_slower(precision)) > _TOO_SLOW:
                reasons.append(f"{precision} {slower:.1f} times slower")
                continue
            self._measure(precision)
            cosine = row_cosines(self._measured[precision].rows, self._measured["fp32"].rows)
            if cosine >= MIN_COSINE:
                if best == "fp32":
                    self._repeat_unless_faster(precision)
                if self._gain(precision, best) > MIN_SPEEDUP:
                    best = precision
            gain = self._gain(precision, "fp32")
            reasons.append(_reason(precision, gain, cosine, len(self._images)))
        return ChosenPrecision(best, "; ".join(reasons), self._measured[best])

    def _measure(
        self, precision: str, known_rows: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Compute rows of the trial images and time passes at one precision."""
        self._configure(precision)
        passes = [known_rows] if known_rows else []
        if not passes:
            # More images than a batch of the run may not fit into memory, or into an exported
            # program. The next pass may write to the rows of this one.
            for batch in torch.split(self._images, self._compute.batch_size):
                rows = self._engine.run(batch)
                passes.append({name: value.clone() for name, value in rows.items()})
        rows = {name: torch.cat([each[name].cpu() for each in passes]) for name in passes[0]}
        self._measured[precision] = TimedRows(rows, math.inf)
        self._measure_again(precision)

    def _repeat_unless_faster(self, precision: str) -> None:
        """Measure fp32 and a precision in turns until the precision is faster, or often enough."""
        for _ in range(ROUNDS - 1):
            if self._gain(precision, "fp32") > MIN_SPEEDUP:
                return
            self._measure_again("fp32")
            self._measure_again(precision)

    def _measure_again(self, precision: str) -> None:
        """Time passes at a precision that has been measured; the fastest one of all counts."""
        self._configure(precision)
        measured_before = self._measured[precision]
        of_images = self._timed is self._images
        on_cpu = self._engine.device.type == "cpu"
        measured = self._engine.time_passes(
            self._timed,
            repeats=1 if on_cpu else 3,  # other devices load kernels in the first pass
            known_rows=measured_before.rows if of_images else None,
        )
        seconds = min(measured_before.seconds_per_image, measured.seconds_per_image)
        self._measured[precision] = TimedRows(measured_before.rows, seconds)

    def _times_slower(self, precision: str) -> float:
        """Return the time of a precision as a multiple of fp32's, by passes over two images.

        A value above `_TOO_SLOW` has been measured in turns.
        """
        few_images = self._timed[:_SHORT_TIMING_IMAGES]
        seconds = self._time_briefly(precision, few_images)
        # A batch of two takes longer per image than the trial images, so this refuses nothing yet.
        fp32_s = self._measured["fp32"].seconds_per_image
        if seconds <= _TOO_SLOW * fp32_s:
            return seconds / fp32_s
        fp32_s = self._time_briefly("fp32", few_images)
        for _ in range(ROUNDS - 1):
            if not _TOO_SLOW < seconds / fp32_s < _FAR_TOO_SLOW:
                break
            seconds = min(seconds, self._time_briefly(precision, few_images))
            fp32_s = min(fp32_s, self._time_briefly("fp32", few_images))
        return seconds / fp32_s

    def _time_briefly(self, precision: str, few_images: torch.Tensor) -> float:
        """Seconds per image of the faster of two passes over a few images."""
        # The proof of weight casting is left out: it takes forward passes itself.
        self._configure(precision, cast_once=False)
        return self._engine.time_passes(few_images, repeats=2).seconds_per_image

    def _configure(self, precision: str, cast_once: bool = True) -> None:
        self._engine.configure_compute(replace(self._compute, precision=precision), cast_once)

    def _gain(self, precision: str, other: str) -> float:
        return self._measured[other].seconds_per_image / self._measured[precision].seconds_per_image


def _reason(precision: str, gain: float, cosine: float, num_images: int) -> str:
    on_images = f"on {counted(num_images, 'image')}"
    if cosine < MIN_COSINE:
        # Rounded down: 0.99896 must not be shown as 0.999.
        shown = math.floor(1e5 * cosine) / 1e5
        return (
            f"{precision} {gain:.1f} times as fast, cosine {shown:.5f} < {MIN_COSINE} {on_images}"
        )
    too_little = "" if gain >= MIN_SPEEDUP else f", and {MIN_SPEEDUP} is needed"
    return f"{precision} {gain:.2f} times as fast{too_little}, cosine {cosine:.5f} {on_images}"
