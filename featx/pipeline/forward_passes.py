"""Forward passes of a run: one batch at a time, or parallel batches on replicas; order is kept."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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

    One engine computes a batch from end to end with its own number of threads, so the values of a
    batch do not depend on the batches that are computed at the same time. `compute` is called with
    an engine and a batch.
    """

    def __init__(self, context: RunContext, compute: Callable[[Engine, Batch], ComputedT]) -> None:
        self._engine, self._parallelism = context.engine, context.parallelism
        self._compute = compute
        self._engines: list[Engine] = [context.engine]
        self._free: queue.SimpleQueue[Engine] = queue.SimpleQueue()  # engines that no thread uses
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Part, Batch, Future[ComputedT]]] = deque()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Passes[ComputedT]:
        self._engine.model_seconds = self._engine.copy_seconds = 0.0
        if self._parallelism.replicas > 1:
            replicas = self._engine.replicas(self._parallelism.replicas)
            self._engines = self._stack.enter_context(replicas)
        for engine in self._engines:
            self._free.put(engine)
        if self._parallelism.computes_ahead:
            self._pool = ThreadPoolExecutor(len(self._engines), thread_name_prefix="featx-model")
            self._stack.callback(self._abort, self._pool)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _abort(self, pool: ThreadPoolExecutor) -> None:
        """Start no more passes, and wait for those that run."""
        pool.shutdown(wait=False, cancel_futures=True)
        wait([future for *_, future in self._waiting], _LEAVE_S)

    def each(
        self, batches: Iterable[tuple[Part, Batch]]
    ) -> Iterator[tuple[Part, Batch, Callable[[], ComputedT]]]:
        """Yield each part and batch in order, with a function that returns the result of the batch.

        It computes the batch, or waits for the thread that does. With parallel passes, one batch
        more than there are engines is submitted, so that no engine is idle while the caller takes a
        batch.
        """
        for part, batch in batches:
            if self._pool is None:
                yield part, batch, functools.partial(self._compute_with_free_engine, batch)
                continue
            future = self._pool.submit(self._compute_with_free_engine, batch)
            self._waiting.append((part, batch, future))
            if len(self._waiting) > len(self._engines):
                yield self._next()
        while self._waiting:
            yield self._next()

    def _next(self) -> tuple[Part, Batch, Callable[[], ComputedT]]:
        """Remove the oldest submitted batch from the queue."""
        part, batch, future = self._waiting.popleft()
        return part, batch, future.result

    def _compute_with_free_engine(self, batch: Batch) -> ComputedT:
        """Compute a batch on the CUDA stream of a free engine; explain a lack of memory."""
        import torch

        # OpenMP keeps the number of threads per calling thread, so each pool thread sets its own.
        threads = self._parallelism.threads
        if self._pool is not None and threads not in (None, torch.get_num_threads()):
            torch.set_num_threads(threads)
        engine = self._free.get()  # there are as many engines as threads
        try:
            with engine.own_stream():
                return self._compute(engine, batch)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"out of memory on {engine.device} in the middle of the run; there was enough when "
                "it began. Nothing committed is lost; run the same command again when other "
                "programs have left the device, or with a smaller batch_size into a new out."
            ) from error
        finally:
            self._free.put(engine)

    def idle_share(self) -> float:
        """Share of the engines, 0 to 1, that have nothing to compute at this moment."""
        num_busy = sum(not future.done() for *_, future in self._waiting)
        return max(0.0, 1 - num_busy / len(self._engines))

    @property
    def model_seconds(self) -> float:
        """Busy seconds of the model so far, as the mean over the replicas."""
        return float(sum(e.model_seconds for e in self._engines)) / len(self._engines)

    @property
    def copy_seconds(self) -> float:
        """Busy seconds of copies from the device so far, as the mean over the replicas."""
        return float(sum(e.copy_seconds for e in self._engines)) / len(self._engines)
