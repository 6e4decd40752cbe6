"""Outages of an object store: how long the requests of a process wait until the server answers."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from featx.errors import ObjectStoreError

MAX_OUTAGE_S = 600.0
"""Seconds that a run waits for a server that does not answer or is overloaded."""

CHECK_INTERVAL_S = 0.5
"""Interval in seconds at which waiting threads check whether the run was told to stop."""

_REPORT_INTERVAL_S = 60.0
"""Least seconds between two reports of an outage."""

logger = logging.getLogger(__name__)

_waits = contextvars.ContextVar("waits", default=True)


@dataclass
class Outage:
    """Whether the server answers this process now; shared by all threads.

    Attributes:
        limits: seconds that requests wait, of each `waiting_limit` that runs now.
        first_failure: time of the first failed request since the last answer, or None.
        last_report: time at which an outage was reported last, or None.
        reported_since: start of the reported outage that has not ended, or None.
        tell_parent: function that takes the arguments of `report` in its place, or None.
    """

    limits: list[float] = field(default_factory=list)
    is_stopped: bool = False
    first_failure: float | None = None
    last_report: float | None = None
    reported_since: float | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    tell_parent: Callable[[str, float], None] | None = None


CURRENT = Outage()


def record_answer() -> None:
    """Record that the server has answered this process; report the end of a reported outage."""
    if CURRENT.first_failure is not None:
        CURRENT.first_failure = None
        report_end()


def report(text: str, since: float) -> None:
    """Log an outage since a time, unless it is in the log, or another was a moment ago."""
    outage, now = CURRENT, time.monotonic()
    with outage.lock:
        is_new = outage.reported_since is None and (
            outage.last_report is None or now - outage.last_report > _REPORT_INTERVAL_S
        )
        if is_new:
            outage.reported_since, outage.last_report = since, now
    if is_new:
        logger.warning("%s", text)


def report_end() -> None:
    """Log the end of the outage that was reported, if any."""
    outage = CURRENT
    with outage.lock:
        since, outage.reported_since = outage.reported_since, None
    if since is not None:
        logger.warning("the object store answers again after %.0f s", time.monotonic() - since)


def wait(error: ObjectStoreError, since: float, pause_s: float) -> bool:
    """Pause before a request that fails since `since` is repeated, if this thread waits at all.

    Return whether to repeat it; false as soon as the limit of `waiting_limit` is over.
    """
    outage, now = CURRENT, time.monotonic()
    limit_s = (outage.limits or [0.0])[-1] if may_wait() else 0.0
    if not limit_s:
        return False
    with outage.lock:
        if outage.first_failure is None:
            outage.first_failure = since
        # Both are needed: another request may be answered, or may have waited before this one.
        since = min(since, outage.first_failure)
        left_s = since + limit_s - now
        if left_s <= 0 or outage.is_stopped:
            return False
    text = (
        f"{error} The run waits until the object store answers, at most {limit_s:.0f} s; nothing "
        "committed is lost."
    )
    (outage.tell_parent or report)(text, since)
    until = now + min(pause_s, left_s)
    while not outage.is_stopped and (left_s := until - time.monotonic()) > 0:
        time.sleep(min(left_s, CHECK_INTERVAL_S))
    return not outage.is_stopped


@contextlib.contextmanager
def waiting_limit(limit_s: float | None = None) -> Iterator[None]:
    """Make the requests of this process wait for a server that does not answer.

    A run uses this, since an error would cost its work. The log gets one line when it starts to
    wait, and one when the server answers again. Several runs of one process may start and end in
    any order.
    """
    outage, limit_s = CURRENT, MAX_OUTAGE_S if limit_s is None else limit_s
    if not outage.limits:  # an outage of an earlier run says nothing about this one
        outage.first_failure = outage.last_report = outage.reported_since = None
    outage.limits.append(limit_s)
    outage.is_stopped = False
    try:
        yield
    finally:
        outage.limits.remove(limit_s)


def wait_in_child(tell_parent: Callable[[str, float], None]) -> None:
    """Make the requests of this forked process wait until it ends.

    Its parent logs the outage: many processes wait for the same server.
    """
    global CURRENT
    CURRENT = Outage(limits=[MAX_OUTAGE_S], tell_parent=tell_parent)


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Make the requests of this thread fail at once, for writes that are useless later."""
    token = _waits.set(False)
    try:
        yield
    finally:
        _waits.reset(token)


def may_wait() -> bool:
    """Return whether requests of this thread may wait; false within `without_waiting`."""
    return _waits.get()


def is_stopped() -> bool:
    """Return whether the run was told to stop: its requests are not repeated."""
    return bool(CURRENT.limits) and CURRENT.is_stopped


def stop_waiting() -> None:
    """Make all waiting requests fail now; takes no lock, so a signal handler may call it."""
    CURRENT.is_stopped = True
