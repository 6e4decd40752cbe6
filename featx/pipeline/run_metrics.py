"""Measurements of a run: seconds by stage, speed, and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class StepTimer:
    """Measures steps that follow each other.

    Attributes:
        seconds: step -> seconds, in the order of the steps.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started_at = time.perf_counter()

    def end(self, step: str) -> None:
        """Record the seconds since the last step, or since the timer was made."""
        now = time.perf_counter()
        self.seconds[step], self._started_at = now - self._started_at, now


@dataclass
class RunMetrics:
    """Measurements of a run.

    Attributes:
        seconds: stage -> busy seconds; None if a worker ended before it reported them.
        images_per_second: speed of the run, or None if nothing was left to do.
        bytes_read: bytes of encoded images; None as for seconds.
        bottleneck: sentence on the stage that the others waited for.
        decoder_warnings: reason -> number of images whose decoder gave this warning.
        start_seconds: step before the first batch was computed -> seconds; empty if nothing was
            computed, or if workers compute.
    """

    seconds: dict[str, float | None]
    images_per_second: float | None
    bytes_read: int | None
    bottleneck: str | None
    decoder_warnings: Mapping[str, int] = field(default_factory=dict)
    start_seconds: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Entries of summary.json; numbers are rounded to 3 decimals."""
        return {
            "images_per_second": self.images_per_second and round(self.images_per_second, 3),
            "seconds": {
                stage: None if value is None else round(value, 3)
                for stage, value in self.seconds.items()
            },
            "bytes_read": self.bytes_read,
            "bottleneck": self.bottleneck,
            "decoder_warnings": dict(self.decoder_warnings),
            "start_seconds": {step: round(value, 3) for step, value in self.start_seconds.items()},
        }


def peak_memory_mib() -> int:
    """Peak resident memory of this process so far, in MiB."""
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20
