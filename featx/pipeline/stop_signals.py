"""SIGINT and SIGTERM: a run stops after its batch, and what is whole is committed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from featx.base.console import log_message
from featx.base.supervisor import is_echo
from featx.storage import s3_client

GRACE_S = 5.0
"""How long a batch may go on after SIGINT or SIGTERM before it is cut short."""


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end; what was whole is committed."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM end the run after the batch; a second one, or GRACE_S later, at once."""
    stop: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(signum: int, frame: object) -> None:
        if is_echo(signum):
            return
        if stop:
            cut_short(signum, frame)
        stop.append(signum)
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        log_message("\nstopping; the same command goes on from the last whole part")

    def cut_short(signum: int, frame: object) -> None:
        if stop:
            s3_client.stop_waiting()  # a commit that waits for an object store would keep us here
            raise Interrupted(stop[0])

    handlers = {signal.SIGINT: note, signal.SIGTERM: note, signal.SIGALRM: cut_short}
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)
