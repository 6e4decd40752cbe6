"""Several batches computed at once, in threads of one process, and taken in their order."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch

from featx.loading.threads import Threads
from featx.types import Batch, Part

_LEAVE_S = 1.0
"""A run that is cut short does not wait longer for passes whose values nobody wants."""


class SideBySide:
    """Computes batches by engines that may be used at the same time; a context manager.

    A batch is computed by one engine from end to end, with `threads` threads, so its values do not
    depend on what is computed beside it.

    Args:
        engines: replicas of one engine.
        threads: that each computes with.
        compute: (engine, batch) -> what becomes of it.
    """

    def __init__(
        self, engines: Sequence[Any], threads: int, compute: Callable[[Any, Batch], Any]
    ) -> None:
        self._compute = compute
        self._num_threads = threads
        self._count = len(engines)
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for engine in engines:
            self._free.put(engine)
        self._pool = Threads(self._count, None, "featx-model", _LEAVE_S)
        self._waiting: deque[tuple[Part, Batch, Future[Any]]] = deque()

    def __enter__(self) -> SideBySide:
        self._pool.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.__exit__(kind, error, traceback)

    @property
    def idle_share(self) -> float:
        """Of the engines, those that have nothing to compute now; 0 to 1."""
        at_work = sum(not future.done() for *_, future in self._waiting)
        return max(0.0, 1 - at_work / self._count)

    def each(
        self, batches: Iterable[tuple[Part, Batch]]
    ) -> Iterator[tuple[Part, Batch, Callable[[], Any]]]:
        """The batches in their order, each with what waits for the end of its computation.

        One more than there are engines are begun, so that none of them waits while a batch is
        taken.
        """
        for part, batch in batches:
            self._waiting.append((part, batch, self._pool.submit(self._computed, batch)))
            if len(self._waiting) > self._count:
                yield self._next()
        while self._waiting:
            yield self._next()

    def _next(self) -> tuple[Part, Batch, Callable[[], Any]]:
        part, batch, future = self._waiting.popleft()
        return part, batch, future.result

    def _computed(self, batch: Batch) -> Any:
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        engine = self._free.get()
        try:
            return self._compute(engine, batch)
        finally:
            self._free.put(engine)
