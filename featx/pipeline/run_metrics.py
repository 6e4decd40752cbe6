"""Measurements of a run: seconds by stage, speed, memory, and the stage that limits it.

The progress of a run is also written to a file for Prometheus, which node_exporter's textfile
collector reads.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from featx.base import WAITING_SHARE, RunProgress, progress_listener
from featx.errors import ConfigError
from featx.storage import AtomicFolder, is_url

SLOW_RATIO = 1.4
"""Seconds of the model for an image, over those of the trial, from which on a run says so."""

LONG_RUN_S = 5.0
"""Seconds from which on the first batches no longer dominate the seconds of the model."""

INTERVAL_S = 10.0
"""Seconds between two writes of the metrics file during a run."""

_METRICS = {
    "images": ("gauge", "Number of images of the run."),
    "images_done": ("gauge", "Number of images that are finished, failed ones included."),
    "images_failed": ("gauge", "Number of images that failed since the process began."),
    "images_per_second": ("gauge", "Images per second since the process began."),
    "remaining_seconds": ("gauge", "Estimated seconds until the end; NaN while it is unknown."),
    "image_wait_seconds_total": ("counter", "Seconds for which the device waited for images."),
    "run_active": ("gauge", "1 while the run is at work, 0 after its end."),
    "run_succeeded": ("gauge", "1 if the last run ended without an error, otherwise 0."),
}
"""Name in the metrics file, without prefix -> type and help text."""


@dataclass
class StepTimer:
    """Measures the seconds of steps that follow each other, in their order."""

    seconds: dict[str, float] = field(default_factory=dict)
    _started_at: float = field(default_factory=time.perf_counter)

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

    def as_dict(self) -> dict[str, object]:
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


@dataclass
class RunOutcome:
    """Outcome of a run: underflow rows by layer, and the peak memory of the largest worker."""

    metrics: RunMetrics
    underflow_rows: Counter[str]
    peak_memory_mib: int


def peak_memory_mib() -> int:
    """Peak resident memory of this process so far, in MiB."""
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20


def bottleneck(
    seconds: Mapping[str, float],
    elapsed_s: float,
    decoders: int,
    device: str,
    precision: str,
    model_ratio: float = 1.0,
) -> str:
    """Describe the stage that the others waited for, its share of the time, and what would help."""
    wait_share = seconds["wait"] / elapsed_s
    if wait_share > WAITING_SHARE:
        stage = max(("read", "decode"), key=lambda stage: seconds[stage])
        busy = f"{seconds[stage] / elapsed_s:.1f} of {decoders} decoders busy, "
        busy += f"{wait_share:.0%} of the time "
        return {
            "read": f"reading images: {busy}waited for; a faster disk or network would help",
            "decode": f"decoding: {busy}waited for; more CPU cores would help",
        }[stage]
    known = ("model", "copy", "write", "statistics")
    stage = max((s for s in known if s in seconds), key=lambda stage: seconds[stage])
    model = "a GPU or an earlier layer" if device == "cpu" else "compile=true or an earlier layer"
    if precision == "fp32":
        model += ", or precision=auto,"
    text = {
        "model": f"the model: {{share:.0%}} of the time; {model} would help",
        "copy": "copying from the device: {share:.0%} of the time; a reduction moves less",
        "write": "writing: {share:.0%} of the time; a reduction leaves less to write",
        "statistics": "summing up: {share:.0%} of the time; a reduction or "
        "stats.covariance=diagonal leaves less to sum",
    }[stage]
    sentence = text.format(share=seconds[stage] / elapsed_s)
    if stage == "model" and model_ratio >= SLOW_RATIO and elapsed_s >= LONG_RUN_S:
        sentence += f"; an image took {model_ratio:.1f} times as long as in the trial before the "
        sentence += "run, as if other programs used the device"
    return sentence


class MetricsFile:
    """File with the metrics of one run, replaced as a whole at each write.

    Metrics whose value is not known yet are left out. Errors of the disk do not end the run.
    """

    def __init__(self, path: Path, store: str, clock: Callable[[], float] = time.monotonic) -> None:
        if not path.parent.is_dir():
            raise ConfigError(
                f"log.metrics={path}: there is no folder {path.parent}. It has to be the folder "
                "that node_exporter reads (--collector.textfile.directory)."
            )
        self._path = path
        # Escaped as the text format of Prometheus requires.
        self._label = store.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._clock = clock
        self._written_at: float | None = None
        self._values: dict[str, float] = {}

    def begin(self) -> None:
        """Write that the run is at work."""
        self._values = {"run_active": 1}
        self._write()

    def update(self, progress: RunProgress) -> None:
        """Take the progress, and write it unless the last write is younger than INTERVAL_S."""
        self._values |= {
            "images": progress.total,
            "images_done": progress.done,
            "images_failed": progress.failures,
            "images_per_second": progress.images_per_second,
            "remaining_seconds": progress.seconds_left,
            "image_wait_seconds_total": progress.waiting_s,
        }
        if self._written_at is None or self._clock() - self._written_at >= INTERVAL_S:
            self._write()
            self._written_at = self._clock()

    def end(self, rows: int | None) -> None:
        """Write the last progress, and how the run ended."""
        if rows is not None:
            self._values |= {"images": rows, "images_done": rows}
        self._values |= {"run_active": 0, "run_succeeded": int(rows is not None)}
        self._write()

    def _write(self) -> None:
        lines = []
        for name, (kind, text) in _METRICS.items():
            if name in self._values:
                number = f"{self._values[name]:.12g}".replace("nan", "NaN")
                lines += [
                    f"# HELP featx_{name} {text}",
                    f"# TYPE featx_{name} {kind}",
                    f'featx_{name}{{store="{self._label}"}} {number}',
                ]
        text = "\n".join(lines) + "\n"
        AtomicFolder(self._path.parent).write_best_effort(self._path, text)


@contextlib.contextmanager
def metrics_of(path: str | None, out: str) -> Iterator[dict[str, object]]:
    """Write the progress of a run to the file `log.metrics`, if that is given.

    Yields an empty dict for the summary of the run.
    """
    summary: dict[str, Any] = {}
    if path is None:
        yield summary
        return
    out = out if is_url(out) else str(Path(out).absolute())
    file = MetricsFile(Path(path).absolute(), out)
    file.begin()
    try:
        with progress_listener(file.update):
            yield summary
    finally:
        file.end(summary.get("rows"))
