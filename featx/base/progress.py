"""Progress of a run on stderr: a bar in a terminal or notebook, otherwise regular lines."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from tqdm.auto import tqdm

from featx.base.console import log_event, log_message, shows_bars
from featx.base.text import printable, size_text, time_text

PLAIN_INTERVAL_S = 10.0
"""Seconds between two lines if there is no bar."""

WAITING_SHARE = 0.2
"""Share of the run time from which waiting for images is shown as the bottleneck."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run at one moment.

    Attributes:
        done: number of finished images, also those of earlier processes.
        failures: number of images that failed since this process began.
        images_per_second: images since this process began, by its time; 0 before the first.
        waiting_s: seconds for which the device waited for images.
    """

    total: int
    done: int
    failures: int
    images_per_second: float
    waiting_s: float

    @property
    def seconds_left(self) -> float:
        """Estimated remaining seconds; NaN if the speed is unknown."""
        left = self.total - self.done
        if not left:
            return 0.0
        return left / self.images_per_second if self.images_per_second else float("nan")


_listener: ContextVar[Callable[[RunProgress], None] | None] = ContextVar("listener", default=None)
"""Called by `Progress` after each batch."""


@contextlib.contextmanager
def progress_listener(listener: Callable[[RunProgress], None]) -> Iterator[None]:
    """Call a function after each batch of the runs in this block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar that leaves nothing behind in the process of a user.

    tqdm itself starts a thread that never ends, and makes a lock of multiprocessing, after which
    `multiprocessing.set_start_method` is refused.
    """

    monitor_interval = 0


_Bar.set_lock(threading.RLock())


class Progress:
    """Shows images per second, time left, failures and the bottleneck of a run.

    `done` of the `total` images are already finished.
    """

    def __init__(self, total: int, done: int) -> None:
        self._has_bar = shows_bars()
        self._total = total
        self._done = done
        self._started_at = self._last_line_at = time.perf_counter()
        self._first = done
        self._failures = 0
        self._waiting = 0.0
        self._listener = _listener.get()
        # Without the thread, tqdm itself must look at the time in each step (miniters).
        self._bar = _Bar(
            total=total,
            initial=done,
            unit=" images",
            disable=not self._has_bar,
            smoothing=0.1,
            miniters=1,
        )

    def __enter__(self) -> Progress:
        if self._listener is not None:
            self._listener(self.now())
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self) -> None:
        """Start the clock: the time of the preparation before does not count."""
        self._started_at = self._last_line_at = time.perf_counter()
        self._bar.unpause()

    def now(self) -> RunProgress:
        """Return the progress at this moment."""
        elapsed_s = time.perf_counter() - self._started_at
        rate = (self._done - self._first) / max(1e-9, elapsed_s)
        return RunProgress(self._total, self._done, self._failures, rate, self._waiting)

    def step(
        self, images: int, failures: int, waited_s: float | None, is_earlier: bool = False
    ) -> None:
        """Add a finished batch.

        The device waited `waited_s` for images; None if workers computed. Images that were computed
        before the clock was started (`is_earlier`) do not count for the speed.
        """
        self._done += images
        if is_earlier:
            self._first += images
            if self._has_bar:
                self._bar.initial += images
        self._failures += failures
        self._waiting += waited_s or 0.0
        if self._listener is not None:
            self._listener(self.now())

        share = self._waiting / max(1e-9, time.perf_counter() - self._started_at)
        stage: str | None = "reading images" if share > WAITING_SHARE else "the model"
        if waited_s is None:
            stage = None
        limit = f", limited by {stage}" if stage else ""
        if self._has_bar:
            self._bar.set_postfix_str(f"{self._failures} failed{limit}", refresh=False)
            self._bar.update(images)
        elif time.perf_counter() - self._last_line_at > PLAIN_INTERVAL_S:
            self._last_line_at = time.perf_counter()
            now = self.now()
            log_event(
                f"{now.done} of {now.total} images, {now.images_per_second:.1f} images/s, "
                f"{time_text(now.seconds_left)} left, {now.failures} failed{limit}",
                event="progress",
                done=now.done,
                total=now.total,
                failures=now.failures,
                images_per_second=round(now.images_per_second, 3),
                bottleneck=stage,
            )

    def log(self, text: str) -> None:
        """Print a line about the run above the bar."""
        if self._has_bar:
            with contextlib.suppress(OSError):  # as log_message does
                _Bar.write(printable(text, kept="\n\t"), file=sys.stderr)
        else:
            log_message(text)


class CountProgress:
    """Shows the count, speed and time left of something other than images.

    The unit is "B" for bytes, otherwise a plural such as "rows".
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._total = self._done = 0
        self._started_at = self._last_line_at = time.perf_counter()
        self._bar = _Bar(
            unit=unit,
            unit_scale=unit == "B",
            unit_divisor=1024,
            disable=not shows_bars(),
            miniters=1,
        )

    def __enter__(self) -> CountProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, total: int) -> None:
        """Set the expected total."""
        self._total = total
        self._bar.reset(total)

    def step(self, count: int) -> None:
        """Add to the count."""
        self._done += count
        self._bar.update(count)
        now = time.perf_counter()
        if self._bar.disable and now - self._last_line_at > PLAIN_INTERVAL_S:
            self._last_line_at = now
            rate = self._done / (now - self._started_at)
            left = time_text(max(0, self._total - self._done) / rate)
            done, total, speed = map(self._text, (self._done, self._total, rate))
            log_message(f"{done} of {total}, {speed}/s, {left} left")

    def _text(self, count: float) -> str:
        """A count with its unit."""
        return size_text(count) if self._unit == "B" else f"{count:.0f} {self._unit}"
