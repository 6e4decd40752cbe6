"""Signals that stop a run after the current batch; complete parts are committed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from featx.base import log_message, signal_handlers
from featx.errors import ShortTraceback
from featx.storage import s3_outage

GRACE_S = 5.0
"""Seconds that a batch may still take after such a signal before it is cut short."""


class Interrupted(ShortTraceback, KeyboardInterrupt):
    """Raised when a signal ends the run; complete parts are committed."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass
class StopRequest:
    """The first signal that has asked the run to stop; 0 before one arrives."""

    signum: int = 0


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM and SIGHUP into a request to stop after the current batch.

    A second signal, or GRACE_S seconds, raises Interrupted at once. Signal handlers exist only in
    the main thread; in other threads nothing is installed. An alarm that the user's program has set
    stays, unless such a signal arrives.
    """
    stop = StopRequest()
    alarm = contextlib.ExitStack()

    def request_stop(signum: int, frame: object) -> None:
        if stop.signum:
            cut_short(signum, frame)
        stop.signum = signum
        alarm.enter_context(signal_handlers({signal.SIGALRM: cut_short}))
        alarm.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        log_message("\nstopping; run the same command again to resume after the last complete part")

    def cut_short(signum: int, frame: object) -> None:
        # The end of the run waits for the commit, which may wait for S3.
        s3_outage.stop_waiting()
        raise Interrupted(stop.signum)

    handlers = {
        signal.SIGINT: request_stop,
        signal.SIGTERM: request_stop,
        signal.SIGHUP: request_stop,
    }
    # The alarm ends after the handlers that set it: one that goes off later would end the process.
    with alarm, signal_handlers(handlers):
        yield stop
