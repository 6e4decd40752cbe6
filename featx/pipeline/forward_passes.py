"""Forward passes of a run: one batch at a time, or parallel batches on replicas; order is kept."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Generic, TypeVar

from featx.errors import RunError
from featx.pipeline.run_context import RunContext
from featx.types import Batch, Part

if TYPE_CHECKING:
    from featx.engine import Engine

ComputedT = TypeVar("ComputedT")
"""Result of a forward pass on one batch."""

_LEAVE_S = 1.0
"""Seconds to wait for running forward passes after an abort; their values are discarded."""


class Passes(Generic[ComputedT]):
    """Forward passes of a run, one at a time or in parallel; a context manager.

    Args:
        context: run context.
        compute: computes the result of a batch with an engine.
    """

    def __init__(self, context: RunContext, compute: Callable[[Engine, Batch], ComputedT]) -> None:
        self._context = context
        self._compute = compute
        self._engines: list[Engine] = [context.engine]
        self._parallel: ParallelPasses[ComputedT] | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Passes[ComputedT]:
        engine, parallelism = self._context.engine, self._context.parallelism
        engine.model_seconds = engine.copy_seconds = 0.0
        if parallelism.replicas > 1:
            self._engines = self._stack.enter_context(engine.replicas(parallelism.replicas))
        if parallelism.computes_ahead:
            parallel = ParallelPasses(self._engines, parallelism.threads, self._compute_on_stream)
            self._parallel = self._stack.enter_context(parallel)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def each(
        self, batches: Iterable[tuple[Part, Batch]]
    ) -> Iterator[tuple[Part, Batch, Callable[[], ComputedT]]]:
        """Iterate over the batches in order.

        Args:
            batches: parts with their batches.

        Yields:
            part, batch, and a function that returns the result of the batch: it computes the batch,
            or waits for the thread that does.
        """
        if self._parallel is not None:
            yield from self._parallel.each(batches)
            return
        for part, batch in batches:
            yield part, batch, functools.partial(self._compute_on_stream, self._engines[0], batch)

    def _compute_on_stream(self, engine: Engine, batch: Batch) -> ComputedT:
        """Compute a batch on the CUDA stream of the engine, if any; explain a lack of memory."""
        from torch import OutOfMemoryError

        try:
            with engine.own_stream():
                return self._compute(engine, batch)
        except OutOfMemoryError as error:
            raise RunError(
                f"out of memory on {engine.device} in the middle of the run; there was enough when "
                "it began. Nothing committed is lost; run the same command again when other "
                "programs have left the device, or with a smaller batch_size into a new out."
            ) from error

    def idle_share(self) -> float:
        """Share of the engines, 0 to 1, that have nothing to compute at this moment."""
        return 1.0 if self._parallel is None else self._parallel.idle_share

    @property
    def model_seconds(self) -> float:
        """Busy seconds of the model so far, as the mean over the replicas."""
        return float(sum(e.model_seconds for e in self._engines)) / len(self._engines)

    @property
    def copy_seconds(self) -> float:
        """Busy seconds of copies from the device so far, as the mean over the replicas."""
        return float(sum(e.copy_seconds for e in self._engines)) / len(self._engines)


class ParallelPasses(Generic[ComputedT]):
    """Computes parallel batches on replicas of an engine; a context manager.

    One engine computes a batch from end to end with `threads` threads, so the values of a batch do
    not depend on the batches that are computed at the same time.

    Args:
        engines: replicas of one engine.
        threads: number of CPU threads that compute one batch, or None on other devices.
        compute: computes the result of a batch with an engine.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        threads: int | None,
        compute: Callable[[Engine, Batch], ComputedT],
    ) -> None:
        self._compute = compute
        self._num_threads = threads
        self._count = len(engines)
        self._free: queue.SimpleQueue[Engine] = queue.SimpleQueue()  # engines that no thread uses
        for engine in engines:
            self._free.put(engine)
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="featx-model")
        self._waiting: deque[tuple[Part, Batch, Future[ComputedT]]] = deque()

    def __enter__(self) -> ParallelPasses[ComputedT]:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait([future for *_, future in self._waiting], _LEAVE_S)

    @property
    def idle_share(self) -> float:
        """Share of the engines, 0 to 1, that have nothing to compute at this moment."""
        num_busy = sum(not future.done() for *_, future in self._waiting)
        return max(0.0, 1 - num_busy / self._count)

    def each(
        self, batches: Iterable[tuple[Part, Batch]]
    ) -> Iterator[tuple[Part, Batch, Callable[[], ComputedT]]]:
        """Iterate over the batches in order, each with a function that waits for its result.

        One batch more than there are engines is submitted, so that no engine is idle while the
        caller takes a batch.
        """
        for part, batch in batches:
            self._waiting.append(
                (part, batch, self._pool.submit(self._compute_with_free_engine, batch))
            )
            if len(self._waiting) > self._count:
                yield self._next()
        while self._waiting:
            yield self._next()

    def _next(self) -> tuple[Part, Batch, Callable[[], ComputedT]]:
        """Remove the oldest submitted batch from the queue."""
        part, batch, future = self._waiting.popleft()
        return part, batch, future.result

    def _compute_with_free_engine(self, batch: Batch) -> ComputedT:
        """Compute a batch in a pool thread, with a free engine."""
        import torch

        # OpenMP keeps the number of threads per calling thread, so each pool thread sets its own.
        if self._num_threads not in (None, torch.get_num_threads()):
            torch.set_num_threads(self._num_threads)
        # A pool thread borrows any free engine; there are as many engines as threads.
        engine = self._free.get()
        try:
            return self._compute(engine, batch)
        finally:
            self._free.put(engine)
