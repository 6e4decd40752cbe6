"""The passes of a run: batches computed one after the other, or several at once, in their order."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any

from featx.base.thread_pool import ReplaceableThreadPool
from featx.errors import RunError
from featx.pipeline.run_context import RunContext
from featx.types import Batch, Part

if TYPE_CHECKING:
    from featx.engine.engine import Engine

_LEAVE_S = 1.0
"""A run that is cut short does not wait longer for passes whose values nobody wants."""


class Passes:
    """The passes of a run: one after the other, or several side by side; a context manager.

    Args:
        prepared: the run.
        compute: (engine, batch) -> what becomes of it.
    """

    def __init__(self, prepared: RunContext, compute: Callable[[Engine, Batch], Any]) -> None:
        self._prepared = prepared
        self._compute = compute
        self._engines: list[Engine] = [prepared.engine]
        self._beside: ParallelPasses | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Passes:
        engine, at_once = self._prepared.engine, self._prepared.at_once
        engine.model_seconds = engine.copy_seconds = 0.0
        if at_once.replicas > 1:
            self._engines = self._stack.enter_context(engine.replicas(at_once.replicas))
        if at_once.ahead:
            beside = ParallelPasses(self._engines, at_once.threads, self._computed)
            self._beside = self._stack.enter_context(beside)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def each(
        self, batches: Iterable[tuple[Part, Batch]]
    ) -> Iterator[tuple[Part, Batch, Callable[[], Any]]]:
        """The batches in their order, each with what computes it, or waits for that."""
        if self._beside is not None:
            yield from self._beside.each(batches)
            return
        for part, batch in batches:
            yield part, batch, functools.partial(self._computed, self._engines[0], batch)

    def _computed(self, engine: Engine, batch: Batch) -> Any:
        from torch import OutOfMemoryError

        try:
            with engine.own_stream():
                return self._compute(engine, batch)
        except OutOfMemoryError as error:
            raise RunError(
                f"out of memory on {engine.device} in the middle of the run; there was enough when "
                "it began. Nothing committed is lost: give the same command again when other "
                "programs have left the device, or with a smaller batch_size into a new out."
            ) from error

    def idle_share(self) -> float:
        """Of the engines, those that have nothing to compute now; 0 to 1."""
        return 1.0 if self._beside is None else self._beside.idle_share

    @property
    def model_seconds(self) -> float:
        """Busy ones of the model so far; the mean of the replicas'."""
        return float(sum(e.model_seconds for e in self._engines)) / len(self._engines)

    @property
    def copy_seconds(self) -> float:
        """Busy ones of copying from the device so far; the mean of the replicas'."""
        return float(sum(e.copy_seconds for e in self._engines)) / len(self._engines)


class ParallelPasses:
    """Computes batches by engines that may be used at the same time; a context manager.

    A batch is computed by one engine from end to end, with `threads` threads, so its values do not
    depend on what is computed beside it.

    Args:
        engines: replicas of one engine.
        threads: that each computes with; None where a device computes.
        compute: (engine, batch) -> what becomes of it.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        threads: int | None,
        compute: Callable[[Engine, Batch], Any],
    ) -> None:
        self._compute = compute
        self._num_threads = threads
        self._count = len(engines)
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for engine in engines:
            self._free.put(engine)
        self._pool = ReplaceableThreadPool(self._count, None, "featx-model", _LEAVE_S)
        self._waiting: deque[tuple[Part, Batch, Future[Any]]] = deque()

    def __enter__(self) -> ParallelPasses:
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
        import torch

        if self._num_threads not in (None, torch.get_num_threads()):
            torch.set_num_threads(self._num_threads)
        engine = self._free.get()
        try:
            return self._compute(engine, batch)
        finally:
            self._free.put(engine)
