"""Threads of which one can be given up: a decoder that hangs cannot be ended, only left behind."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_LEAVE_S = 5.0
"""How long the end of a pool waits for threads that are at work, where nothing else is said."""

_LOOK_S = 1.0

_EXIT_WAIT_S = 60.0
"""How long the end of the interpreter waits for threads without a time limit of their own."""


@dataclass(eq=False)
class _Task:
    """One call, its place of result, and since when it is in its watched section."""

    future: Future[Any]
    work: Callable[..., Any]
    args: tuple[Any, ...]
    again: bool = False
    thread: threading.Thread | None = None
    since: float | None = None
    given_up: bool = False


class _GivenUp(BaseException):
    """Ends a thread whose task another thread has taken over; nothing else may catch it."""


class _Own(threading.local):
    """What a thread of the pool is at; other threads are at nothing."""

    task: _Task | None = None


class ReplaceableThreadPool:
    """A pool that outlives a call that never returns; a context manager.

    Where a call stays longer than `limit_s` in its section `watched`, its thread is left behind, a
    fresh one takes its place, and the call is made once more, with `again` true. Threads are
    daemons: one that was left behind does not keep the process from ending.

    Args:
        count: of threads.
        limit_s: in seconds, None for no limit.
        name: of the threads begins with it.
        leave_s: how long the end of the pool waits for threads that are at work, in seconds.
    """

    def __init__(
        self, count: int, limit_s: float | None, name: str, leave_s: float | None = None
    ) -> None:
        self._count, self._limit_s, self._name = count, limit_s, name
        self._leave_s = _LEAVE_S if leave_s is None else leave_s
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: set[_Task] = set()
        self._threads: list[threading.Thread] = []
        self._own = _Own()
        self._closing = threading.Event()

    def __enter__(self) -> ReplaceableThreadPool:
        for _ in range(self._count):
            self._start(self._serve)
        if self._limit_s is not None:
            self._start(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        """Drop what was not begun, and wait for what was, a while."""
        with self._lock:
            self._closing.set()
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._queue.get_nowait()
                if task is not None:
                    task.future.cancel()
        for _ in self._threads:
            self._queue.put(None)
        left = _joined(self._threads, self._leave_s)
        if left:
            # A daemon thread that asks for the interpreter's lock while the interpreter ends is
            # unwound by force, through the C++ frames of torch: "terminate called without an
            # active exception", SIGABRT. The interpreter waits for a thread that is no daemon.
            limit_s = _EXIT_WAIT_S if self._limit_s is None else self._limit_s
            name = f"{self._name}_exit"
            threading.Thread(target=_joined, args=(left, limit_s), name=name).start()

    @property
    def again(self) -> bool:
        """Whether the call that this thread is at was given up in another thread before."""
        return self._own.task is not None and self._own.task.again

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Call `work` in a thread of the pool."""
        future: Future[T] = Future()
        self._queue.put(_Task(future, work, args))
        return future

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The section of a call that may be given up.

        Until it is left the call must change nothing that others see: what was given up may wake
        up later. It does not come back from this section then.
        """
        task = self._own.task
        assert task is not None, "only calls in a thread of the pool are watched"
        task.since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                task.since = None
                if task.given_up:
                    raise _GivenUp

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"{self._name}_{len(self._threads)}")
        thread.daemon = True
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """What a thread does: calls, one after the other."""
        with contextlib.suppress(_GivenUp):
            while (task := self._queue.get()) is not None:
                if task.again or task.future.set_running_or_notify_cancel():
                    self._call(task)

    def _call(self, task: _Task) -> None:
        self._own.task = task
        task.thread = threading.current_thread()
        self._running.add(task)
        try:
            result = task.work(*task.args)
        except _GivenUp:
            raise
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            task.future.set_exception(error)
        else:
            task.future.set_result(result)
        self._running.discard(task)

    def _look(self) -> None:
        """Give up calls that are over the limit, until the pool ends."""
        assert self._limit_s is not None
        while not self._closing.wait(min(_LOOK_S, self._limit_s / 4)):
            now = time.monotonic()
            for task in list(self._running):
                with self._lock:
                    late = task.since is not None and now - task.since > self._limit_s
                    if late and not self._closing.is_set():
                        self._give_up(task)

    def _give_up(self, task: _Task) -> None:
        """Leave a thread behind; a fresh one makes its call once more."""
        assert task.thread is not None
        task.given_up = True
        self._running.discard(task)
        self._threads.remove(task.thread)
        self._start(self._serve)
        self._queue.put(_Task(task.future, task.work, task.args, again=True))


def _joined(threads: Sequence[threading.Thread], limit_s: float) -> list[threading.Thread]:
    """Wait for threads; returns those that are still at work after `limit_s` seconds in all."""
    until = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
