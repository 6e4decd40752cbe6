"""Progress of a run as a file for Prometheus, which node_exporter's textfile collector reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from featx.base import RunProgress, progress_listener
from featx.errors import ConfigError
from featx.storage import AtomicFolder, is_url

INTERVAL_S = 10.0
"""Seconds between two writes during a run."""

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
"""Name without prefix -> type and help text."""


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
