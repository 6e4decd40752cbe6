"""Signal handlers: of this process and this block only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from featx.base import signal_handlers

SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]


def refuse(signum: int, frame: object) -> None:
    raise AssertionError(f"signal {signum} reached a handler of another process")


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Under nohup pytest itself ignores SIGHUP, which blocks of handlers respect."""
    before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_handlers_are_put_back_in_any_order_of_blocks() -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with signal_handlers(dict.fromkeys(SIGNALS, refuse)):
        with contextlib.suppress(ZeroDivisionError), signal_handlers({signal.SIGTERM: print}):
            assert signal.getsignal(signal.SIGTERM) is print
            assert signal.getsignal(signal.SIGHUP) is refuse
            raise ZeroDivisionError
        assert signal.getsignal(signal.SIGTERM) is refuse
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signal_handlers({signal.SIGHUP: refuse}):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_installs_nothing() -> None:
    def handlers() -> list[object]:
        with signal_handlers(dict.fromkeys(SIGNALS, refuse)):
            return [signal.getsignal(signum) for signum in SIGNALS]

    before = [signal.getsignal(signum) for signum in SIGNALS]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handlers).result() == before


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_ends_a_forked_child_as_if_there_were_no_block(signum: signal.Signals) -> None:
    ready, started = os.pipe()
    with signal_handlers({signum: refuse}), signal_handlers({signum: refuse}):
        child = os.fork()
        if not child:
            os.write(started, b"x")
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signum)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signum
        assert signal.getsignal(signum) is refuse
