"""Outages of an object store: how long the requests of a process wait until the server answers."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Iterator

from featx.errors import ObjectStoreError

MAX_OUTAGE_S = 600.0
"""Seconds that a run waits for a server that does not answer or is overloaded."""

_CHECK_INTERVAL_S = 0.5
"""Interval in seconds at which waiting threads check whether the run was told to stop."""

_REPORT_INTERVAL_S = 60.0
"""Least seconds between two reports of an outage."""

logger = logging.getLogger(__name__)


class Outage:
    """Whether the server answers this process now; shared by all threads."""

    def __init__(self) -> None:
        self._limits: dict[object, float] = {}  # running `waiting_limit` -> its seconds
        self._lock = threading.Lock()
        self._first_failure: float | None = None  # first failed request since the last answer
        self._last_report: float | None = None  # last report of an outage
        self._is_reported = self._is_stopped = False

    @property
    def limit_s(self) -> float:
        """Seconds that a request waits for the server; 0 outside of `waiting_limit`."""
        limits = list(self._limits.values())
        return limits[-1] if limits else 0.0

    def start(self, limit_s: float) -> object:
        """Set how many seconds requests wait from now on, until `end` of the returned object.

        Several runs of one process may start and end in any order.
        """
        run = object()
        self._limits[run], self._is_stopped = limit_s, False
        return run

    def end(self, run: object) -> None:
        """Forget a limit that `start` has set."""
        del self._limits[run]

    def stop(self) -> None:
        """End every wait; takes no lock, so a signal handler may call it."""
        self._is_stopped = True

    def record_answer(self) -> None:
        """Record that a request got an answer; report the end of a reported outage."""
        if self._first_failure is None:
            return
        with self._lock:
            # Checked again under the lock: only one of several threads reports the end.
            first_failure, self._first_failure = self._first_failure, None
            was_reported, self._is_reported = self._is_reported, False
        if first_failure is not None and was_reported:
            logger.warning(
                "the object store answers again after %.0f s", time.monotonic() - first_failure
            )

    def wait(self, error: ObjectStoreError, since: float, pause_s: float) -> bool:
        """Pause before a request is repeated; see the function `wait`."""
        now = time.monotonic()
        with self._lock:
            if self._first_failure is None:
                self._first_failure = since
            left_s = min(since, self._first_failure) + self.limit_s - now
            if left_s <= 0 or self._is_stopped:
                return False
            is_new = not self._is_reported and (
                self._last_report is None or now - self._last_report > _REPORT_INTERVAL_S
            )
            if is_new:
                self._is_reported, self._last_report = True, now
        if is_new:
            logger.warning(
                "%s The run waits until the object store answers, at most %.0f s; nothing "
                "committed is lost.", error, self.limit_s,
            )  # fmt: skip
        until = now + min(pause_s, left_s)
        while (left_s := until - time.monotonic()) > 0:
            if self._is_stopped:
                return False
            time.sleep(min(left_s, _CHECK_INTERVAL_S))
        return True


_outage = Outage()
_waits = contextvars.ContextVar("waits", default=True)


def record_answer() -> None:
    """Record that the server has answered a request of this process."""
    _outage.record_answer()


def wait(error: ObjectStoreError, since: float, pause_s: float) -> bool:
    """Pause before a request is repeated, if this thread waits within `waiting_limit` at all.

    Returns:
        whether to repeat the request; false as soon as the limit is over.
    """
    return bool(_outage.limit_s and _waits.get()) and _outage.wait(error, since, pause_s)


@contextlib.contextmanager
def waiting_limit(limit_s: float | None = None) -> Iterator[None]:
    """Make the requests of this process wait for a server that does not answer.

    A run uses this, since an error would cost its work. The log gets one line when it starts to
    wait, and one when the server answers again.
    """
    outage = _outage
    run = outage.start(MAX_OUTAGE_S if limit_s is None else limit_s)
    try:
        yield
    finally:
        outage.end(run)


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Make the requests of this thread fail at once, for writes that are useless later."""
    token = _waits.set(False)
    try:
        yield
    finally:
        _waits.reset(token)


def stop_waiting() -> None:
    """Make all waiting requests fail now; a signal handler may call this."""
    _outage.stop()
