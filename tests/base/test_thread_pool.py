"""Threads that can be given up: every call has its one result, whatever hangs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from featx.base import ReplaceableThreadPool

NAME = "featx-test"


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    until = time.monotonic() + 5
    while alive() and time.monotonic() < until:
        time.sleep(0.01)
    assert alive() == []


def test_calls_are_made_and_their_errors_are_raised() -> None:
    def divide(a: int, b: int) -> float:
        return a / b

    with ReplaceableThreadPool(3, None, NAME) as threads:
        futures = [threads.submit(divide, i, 4) for i in range(100)]
        assert [future.result() for future in futures] == [i / 4 for i in range(100)]
        with pytest.raises(ZeroDivisionError):
            threads.submit(divide, 1, 0).result()
        assert threads.submit(lambda: threads.is_retry_of_call).result() is False
        assert threads.is_retry_of_call is False
        assert len(alive()) == 3
    assert alive() == []


def test_a_call_that_hangs_is_made_again_elsewhere_and_the_others_continue() -> None:
    """It may wake up later: what it would have done then is not done."""
    wake, late = threading.Event(), []

    def work(number: int) -> tuple[int, bool]:
        if number == 3 and not threads.is_retry_of_call:
            with threads.timed_section():
                wake.wait(20)
            late.append(number)
        return number, threads.is_retry_of_call

    with ReplaceableThreadPool(2, 0.2, NAME) as threads:
        futures = [threads.submit(work, number) for number in range(50)]
        results = [future.result(10) for future in futures]
        assert results == [(number, number == 3) for number in range(50)]
        wake.set()
        more = [threads.submit(work, number).result(10) for number in range(4, 9)]
        assert more == [(number, False) for number in range(4, 9)]
    assert late == []


def test_a_group_is_made_in_order_by_one_thread_and_its_first_error_ends_it() -> None:
    made = []

    def work(a: int, b: int) -> float:
        made.append((a, threading.get_ident()))
        return a / b

    with ReplaceableThreadPool(3, None, NAME) as threads:
        groups = [threads.submit_group(work, [(i + j, 4) for j in range(5)]) for i in (0, 100)]
        assert [group.result(10) for group in groups] == [
            [(i + j) / 4 for j in range(5)] for i in (0, 100)
        ]
        assert len({thread for a, thread in made if a < 100}) == 1
        assert [a for a, _ in made if a < 100] == list(range(5))
        made.clear()
        with pytest.raises(ZeroDivisionError):
            threads.submit_group(work, [(7, 1), (8, 0), (9, 1)]).result(10)
        assert [a for a, _ in made] == [7, 8]
        assert threads.submit_group(work, []).result(10) == []


def test_a_group_whose_call_hangs_is_resumed_at_that_call() -> None:
    """The calls before it are not repeated, and only the one that hung is called a retry."""
    wake, made = threading.Event(), []

    def work(number: int) -> tuple[int, bool]:
        made.append(number)
        if number in (3, 4) and not threads.is_retry_of_call:
            with threads.timed_section():
                wake.wait(20)
        return number, threads.is_retry_of_call

    with ReplaceableThreadPool(1, 0.2, NAME) as threads:
        group = threads.submit_group(work, [(number,) for number in range(8)])
        results = group.result(10)
        wake.set()
    assert results == [(number, number in (3, 4)) for number in range(8)]
    assert made == [0, 1, 2, 3, 3, 4, 4, 5, 6, 7]


def test_the_end_of_the_pool_ends_a_group_after_its_current_call() -> None:
    started, release, made = threading.Event(), threading.Event(), []

    def work(number: int) -> None:
        made.append(number)
        started.set()
        release.wait(10)

    with ReplaceableThreadPool(1, None, NAME) as threads:
        group = threads.submit_group(work, [(number,) for number in range(5)])
        started.wait(10)
        threading.Timer(0.1, release.set).start()
    assert made == [0]
    with pytest.raises(CancelledError):
        group.result(0)


def test_as_many_threads_as_before_when_all_were_given_up() -> None:
    wake, barrier = threading.Event(), threading.Barrier(3)

    def work() -> bool:
        if not threads.is_retry_of_call:
            with threads.timed_section():
                wake.wait(20)
        return threads.is_retry_of_call

    with ReplaceableThreadPool(3, 0.1, NAME) as threads:
        assert [f.result(10) for f in [threads.submit(work) for _ in range(3)]] == [True] * 3
        waits = [threads.submit(barrier.wait, 10) for _ in range(3)]
        assert sorted(future.result(10) for future in waits) == [0, 1, 2]
        started_at = time.monotonic()
    assert time.monotonic() - started_at < 2, "it waited for threads that were given up"
    wake.set()


def test_only_the_watched_section_counts() -> None:
    def work() -> bool:
        with threads.timed_section():
            pass
        time.sleep(0.4)
        return threads.is_retry_of_call

    with ReplaceableThreadPool(1, 0.1, NAME) as threads:
        assert threads.submit(work).result(10) is False


def test_no_limit_waits() -> None:
    def work() -> bool:
        with threads.timed_section():
            time.sleep(0.3)
        return threads.is_retry_of_call

    with ReplaceableThreadPool(1, None, NAME) as threads:
        assert threads.submit(work).result(10) is False


def test_what_was_not_started_is_dropped_at_the_end() -> None:
    release = threading.Event()
    with ReplaceableThreadPool(1, None, NAME) as threads:
        first = threads.submit(release.wait, 10)
        rest = [threads.submit(time.sleep, 0) for _ in range(10)]
        while not first.running():
            time.sleep(0.01)
        threading.Timer(0.1, release.set).start()
    assert first.result(0) is True
    for future in rest:
        with pytest.raises(CancelledError):
            future.result(0)


def test_the_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featx.base.thread_pool._END_LIMIT_S", 0.2)
    release = threading.Event()
    with ReplaceableThreadPool(1, None, NAME) as threads:
        threads.submit(release.wait, 20)
        time.sleep(0.05)
        started_at = time.monotonic()
    assert 0.1 < time.monotonic() - started_at < 5
    release.set()


def test_a_process_ends_with_a_thread_left_behind() -> None:
    """In C code, where no exception reaches it; ThreadPoolExecutor would wait for it at the end."""
    program = (
        "import ctypes\n"
        "from featx.base.thread_pool import ReplaceableThreadPool\n"
        "def work():\n"
        "    if threads.is_retry_of_call: return 'again'\n"
        "    with threads.timed_section(): ctypes.CDLL(None).sleep(1000)\n"
        "with ReplaceableThreadPool(2, 0.2, 'x') as threads: print(threads.submit(work).result(20))"
    )
    done: Any = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "again\n", "")
