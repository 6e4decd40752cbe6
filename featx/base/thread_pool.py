"""A thread pool that replaces threads whose call hangs.

A thread cannot be ended from outside, so a thread that hangs in a decoder is abandoned and
replaced by a new one. Handing a call to a thread costs about 20 µs of the interpreter's time, so
short calls are submitted in groups.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

_END_LIMIT_S = 5.0
"""Seconds that the end of a pool waits for running calls by default."""

_CHECK_INTERVAL_S = 1.0
"""Largest number of seconds between two checks for calls that are over the time limit."""

_EXIT_WAIT_S = 60.0
"""Seconds that the end of the interpreter waits for threads of pools without a time limit."""


@dataclass(eq=False, slots=True)
class _Task:
    """Calls that one thread makes one after the other, and their state.

    Attributes:
        future: future that receives the results.
        work: function to call.
        calls: its arguments, for each call.
        is_group: whether the future receives the list of results, not the result of the only call.
        results: results of the calls that have ended.
        is_retry_of_task: whether a call of this task was given up in another thread, which has left
            the remaining calls to this one.
        is_retry_of_call: whether the current call is the one that was given up.
        thread: thread that makes the calls.
        since: time (monotonic) at which the current call entered its timed section; None outside
            it.
        given_up: whether another thread has taken over the task.
    """

    future: Future[Any]
    work: Callable[..., Any]
    calls: Sequence[tuple[Any, ...]]
    is_group: bool = True
    results: list[Any] = field(default_factory=list)
    is_retry_of_task: bool = False
    is_retry_of_call: bool = False
    thread: threading.Thread | None = None
    since: float | None = None
    given_up: bool = False


class _GivenUp(BaseException):
    """Ends a thread whose call was given up.

    It is a BaseException so that no `except Exception` catches it.
    """


class _TimedSection:
    """The section of a call that may be given up, see `ReplaceableThreadPool.timed_section`."""

    __slots__ = ("_lock", "_task")

    def __init__(self, task: _Task, lock: threading.Lock) -> None:
        self._task = task
        self._lock = lock

    def __enter__(self) -> None:
        self._task.since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            # Under the lock of `_give_up_late_calls`: a call either leaves its section or is given
            # up, never both.
            self._task.since = None
            if self._task.given_up:
                raise _GivenUp


class _ThreadState(threading.local):
    """The task of the calling thread; None outside the pool."""

    task: _Task | None = None


class ReplaceableThreadPool:
    """A thread pool that survives calls that never return; a context manager.

    If a call stays in its `timed_section` for longer than `limit_s`, its thread is abandoned, a new
    one takes its place, and the call is repeated once with `is_retry_of_call` true. Threads are
    daemons, so an abandoned one does not keep the process alive.

    Args:
        count: number of threads.
        limit_s: seconds that a call may spend in its timed section, or None for no limit.
        name: beginning of the names of the threads.
        end_limit_s: seconds that the end of the pool waits for running calls, or None for the
            default.
    """

    def __init__(
        self, count: int, limit_s: float | None, name: str, end_limit_s: float | None = None
    ) -> None:
        self._count, self._limit_s, self._name = count, limit_s, name
        self._end_limit_s = _END_LIMIT_S if end_limit_s is None else end_limit_s
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: set[_Task] = set()
        self._threads: list[threading.Thread] = []
        self._state = _ThreadState()
        self._closing = threading.Event()

    def __enter__(self) -> ReplaceableThreadPool:
        for _ in range(self._count):
            self._start(self._serve)
        if self._limit_s is not None:
            self._start(self._give_up_late_calls)
        return self

    def __exit__(self, *error: object) -> None:
        """Cancel calls that have not started, and wait for running ones for a limited time."""
        with self._lock:
            # `_give_up_late_calls` holds this lock, so no thread is added to the pool after this.
            self._closing.set()
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._queue.get_nowait()
                if task is not None:
                    task.future.cancel()
        for _ in self._threads:
            self._queue.put(None)
        running = _join(self._threads, self._end_limit_s)
        if running:
            # A daemon thread that requests the interpreter's lock during finalisation is unwound by
            # force through the C++ frames of torch: "terminate called without an active exception",
            # SIGABRT. The interpreter waits for threads that are no daemons, so one of these joins
            # the remaining threads.
            limit_s = _EXIT_WAIT_S if self._limit_s is None else self._limit_s
            name = f"{self._name}_exit"
            threading.Thread(target=_join, args=(running, limit_s), name=name).start()

    @property
    def is_retry_of_call(self) -> bool:
        """Whether the call of the calling thread was given up in another thread before."""
        return self._state.task is not None and self._state.task.is_retry_of_call

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Call `work` in a thread of the pool.

        Args:
            work: function to call.
            args: its arguments.
        """
        future: Future[T] = Future()
        self._queue.put(_Task(future, work, (args,), is_group=False))
        return future

    def submit_group(
        self, work: Callable[..., T], calls: Sequence[tuple[Any, ...]]
    ) -> Future[list[T]]:
        """Call `work` several times, one after the other, in a thread of the pool.

        The first exception ends the group and is the exception of its future.

        Args:
            work: function to call.
            calls: arguments of each call.

        Returns:
            Future of the results, in the order of `calls`.
        """
        future: Future[list[T]] = Future()
        self._queue.put(_Task(future, work, calls))
        return future

    def timed_section(self) -> _TimedSection:
        """Context manager for the section of a call that may be given up.

        Inside it, the call must change nothing that others see: a call that was given up may
        continue later, and then ends when it leaves the section.
        """
        task = self._state.task
        assert task is not None, "only calls in a thread of the pool have timed sections"
        return _TimedSection(task, self._lock)

    def _start(self, work: Callable[[], None]) -> None:
        """Start a daemon thread of the pool."""
        thread = threading.Thread(target=work, name=f"{self._name}_{len(self._threads)}")
        thread.daemon = True
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """Run calls one after the other; the main function of a thread."""
        with contextlib.suppress(_GivenUp):
            while (task := self._queue.get()) is not None:
                # The future of a repeated task is already in the state "running".
                if task.is_retry_of_task or task.future.set_running_or_notify_cancel():
                    self._call(task)

    def _call(self, task: _Task) -> None:
        """Make the remaining calls of a task and set the result of its future."""
        self._state.task = task
        task.thread = threading.current_thread()
        self._running.add(task)
        try:
            for args in task.calls[len(task.results) :]:
                if task.results and self._closing.is_set():
                    raise CancelledError
                task.results.append(task.work(*args))
                task.is_retry_of_call = False
        except _GivenUp:
            raise
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            task.future.set_exception(error)
        else:
            task.future.set_result(task.results if task.is_group else task.results[0])
        self._running.discard(task)

    def _give_up_late_calls(self) -> None:
        """Give up calls that are over the time limit, until the pool ends."""
        assert self._limit_s is not None
        while not self._closing.wait(min(_CHECK_INTERVAL_S, self._limit_s / 4)):
            now = time.monotonic()
            for task in list(self._running):
                with self._lock:
                    late = task.since is not None and now - task.since > self._limit_s
                    if late and not self._closing.is_set():
                        self._give_up(task)

    def _give_up(self, task: _Task) -> None:
        """Abandon the thread of a task, and leave the remaining calls to a new one.

        The abandoned thread adds no result, as its call ends when it leaves its timed section.
        """
        assert task.thread is not None
        task.given_up = True
        self._running.discard(task)
        self._threads.remove(task.thread)
        self._start(self._serve)
        self._queue.put(
            _Task(
                task.future,
                task.work,
                task.calls,
                task.is_group,
                task.results,
                is_retry_of_task=True,
                is_retry_of_call=True,
            )
        )


def _join(threads: Sequence[threading.Thread], limit_s: float) -> list[threading.Thread]:
    """Join threads for `limit_s` seconds in all; returns those that are still running."""
    until = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
