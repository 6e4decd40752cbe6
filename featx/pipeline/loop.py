"""The loop over the parts of a run: load batches, compute them, commit parts, measure.

Forward passes compute one batch at a time, or parallel batches on replicas; order is kept.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from featx.base import Progress, log_message
from featx.errors import RunError, counted
from featx.pipeline.row_failures import Rows, refuse_failures
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import RunMetrics, StepTimer, bottleneck
from featx.pipeline.stop_signals import Interrupted, stop_signals
from featx.pipeline.timeline import Timeline
from featx.storage import is_url, s3_outage
from featx.types import Array, Batch, Failure, Part

if TYPE_CHECKING:
    from featx.engine import Engine
    from featx.storage import AtomicFolder
    from featx.store import Heartbeat

ComputedT = TypeVar("ComputedT")
"""Result of a forward pass on one batch."""

_LEAVE_S = 1.0
"""Seconds to wait for running forward passes after an abort; their values are discarded."""


class RunObserver:
    """Base class of observers; every method does nothing until a subclass overrides it.

    Batches and parts are reported only if the process of the command computes them, not for
    workers. `wants_parts` tells whether the run waits for each commit in order to report it.
    """

    wants_parts = False

    def batch_computed(
        self, batch: Batch, features: Mapping[str, Array], failures: Sequence[Failure]
    ) -> None:
        """Called after each batch of n rows, which padding follows.

        `features` are (n, ...) arrays in the store's dtype, by the names of the datasets.
        """

    def part_committed(self, part: Part, seconds: Mapping[str, float]) -> None:
        """Called after each committed part, with the busy seconds of each stage of the run."""

    def run_finished(self) -> None:
        """Called when the run has ended without an error, while the model is still loaded."""


class PartRows(Protocol):
    """Rows of a part that is being computed, or their sums."""

    @property
    def part(self) -> Part:
        """Rows of the part."""

    def add(self, batch: Batch, rows: Rows) -> None:
        """Add the next batch; batches arrive in order and from one thread."""


PartRowsT = TypeVar("PartRowsT", bound=PartRows)


class PartSink(Protocol[PartRowsT]):
    """Parts that a run has to compute, how their rows are computed, and where they are committed.

    `PartRowsT` is the type of the rows of one part. `seconds` are the busy seconds so far of stages
    that only this sink has.
    """

    seconds: Mapping[str, float]

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Number of rows that the finished output has."""

    @property
    @abstractmethod
    def num_committed(self) -> int:
        """Number of rows in committed parts."""

    @property
    @abstractmethod
    def num_failed(self) -> int:
        """Number of failed rows in committed parts."""

    @abstractmethod
    def missing(self) -> Iterable[Part]:
        """Parts that are still to be computed; the loop requests the next one when it needs it."""

    @abstractmethod
    def compute(self, engine: Engine, batch: Batch) -> Rows:
        """Compute the rows of one batch; called from several threads with different engines."""

    @abstractmethod
    def begin_part(self, part: Part) -> PartRowsT:
        """Begin a part, whose batches follow."""

    @abstractmethod
    def commit(self, rows: PartRowsT) -> object:
        """Commit a part; called in another thread while batches are added to the next part."""


def run_parts(
    context: RunContext,
    sink: PartSink[PartRowsT],
    disk: AtomicFolder | None = None,
    observer: RunObserver | None = None,
    heartbeat: Heartbeat | None = None,
    shows_progress: bool = True,
) -> RunMetrics:
    """Compute and commit the missing parts.

    Args:
        disk: folder for the profiler trace of profile=true, or None if there is no folder.
        observer: notified of each batch and each committed part.
        heartbeat: records the part that is computed, and each commit.
        shows_progress: whether stderr shows the progress of the run.

    Raises:
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
        TooManyFailuresError: more images failed than max_failures allows, and much is left to do.
    """
    from torch.profiler import record_function  # takes about 1 µs without a profiler

    config, engine, loader = context.config, context.engine, context.loader
    observer = RunObserver() if observer is None else observer
    num_computed = num_batches = 0
    part_rows: PartRowsT | None = None
    timer = StepTimer()
    done_before = sink.num_committed
    missing = sink.missing()
    allowed = config.allowed_failures(sink.num_rows)
    loader.start_counting()
    progress = Progress(sink.num_rows, done_before) if shows_progress else None
    trace: contextlib.AbstractContextManager[Timeline | None] = contextlib.nullcontext()
    if disk is not None and config.profile:
        trace = Timeline(disk, engine.device)
    started_at = time.perf_counter()
    # The order decides how the run ends: contexts close from the last to the first. Running passes
    # end or are abandoned first, then the trace is written, then the pending commit is awaited. The
    # signal handlers stay in place until then.
    with (
        s3_outage.waiting_limit(),
        stop_signals() as stop,
        contextlib.closing(_Commits(sink, heartbeat, is_url(config.out))) as commits,
        trace as timeline,
        progress or contextlib.nullcontext(),
        Passes(context, sink.compute) as passes,
    ):

        def seconds() -> dict[str, float]:
            return {
                "read": loader.times.read_s,
                "decode": loader.times.decode_s,
                **passes.seconds(),
                "write": commits.seconds,
            }

        batches = loader.batches(missing, context.batch_rows)
        for part, batch, computed in passes.each(batches):
            if stop.signum:
                if num_lost := batch.start - part.start:
                    log_message(
                        "lost, because only complete parts are stored: "
                        f"{counted(num_lost, 'computed row')} of part {part.index}"
                    )
                raise Interrupted(stop.signum)
            commits.check()
            if part_rows is None:
                part_rows = sink.begin_part(part)
                if heartbeat is not None:
                    heartbeat.begin(part)
            with record_function("batch"):
                rows = computed()
                part_rows.add(batch, rows)
                observer.batch_computed(batch, rows.features, rows.failures)
                num_failed = len(rows.failures)
                del rows  # the next batch takes as much memory
            if not num_computed:
                timer.end("first batch")
            num_computed += batch.count
            num_batches += 1
            if batch.start + batch.count == part.stop:
                commits.begin(part_rows)
                part_rows = None
                if observer.wants_parts:
                    commits.finish()  # an observer is notified of committed parts only
                    observer.part_committed(part, seconds())
                done = done_before + num_computed
                seconds_per_row = (time.perf_counter() - started_at) / num_computed
                remaining_s = (sink.num_rows - done) * seconds_per_row
                refuse_failures(allowed, sink.num_failed, done, sink.num_rows, remaining_s)
            if progress is not None:
                progress.step(batch.count, num_failed, passes.last_wait_s)
            if timeline is not None:
                timeline.step()
        commits.finish()
        if stop.signum:
            raise Interrupted(stop.signum)
    elapsed_s = time.perf_counter() - started_at
    num_rows = sink.num_committed - done_before
    busy, sentence = {**seconds(), **sink.seconds}, None
    if num_rows:
        # The model computes the padding of each batch too.
        ratio = busy["model"] / (num_batches * context.batch_rows) / context.model_s
        decoders, device = loader.num_decoders, engine.device.type
        sentence = bottleneck(busy, elapsed_s, decoders, device, config.precision, ratio)
    return RunMetrics(
        seconds={**busy},
        images_per_second=num_rows / elapsed_s if num_rows else None,
        bytes_read=loader.times.num_bytes,
        bottleneck=sentence,
        decoder_warnings=loader.warnings,
        start_seconds={**context.start_seconds, **timer.seconds} if num_computed else {},
    )


class _Commits(Generic[PartRowsT]):
    """Commits one part in a thread while the next part is computed; never two at once.

    One thread keeps the order of commits, and the memory bound to two parts: the one that is being
    committed and the one that is being filled.
    """

    def __init__(
        self, sink: PartSink[PartRowsT], heartbeat: Heartbeat | None, is_remote: bool
    ) -> None:
        self.seconds = 0.0
        self._sink, self._heartbeat = sink, heartbeat
        self._is_remote = is_remote
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="featx-commit")
        self._pending: Future[None] | None = None

    def close(self) -> None:
        """End the thread after the commit that it has begun."""
        # A complete part is committed even if the run has failed since. Only an object store, which
        # may not answer for minutes, is not waited for when a run that was told to stop is cut
        # short.
        self._thread.shutdown(wait=not (self._is_remote and s3_outage.is_stopped()))

    def begin(self, rows: PartRowsT) -> None:
        """Wait for the previous commit, then start that of a part."""
        self.finish()
        self._pending = self._thread.submit(self._commit, rows)

    def check(self) -> None:
        """Raise the error of the last commit if it has failed already; does not wait."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last part is committed; raise the error of its commit."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _commit(self, rows: PartRowsT) -> None:
        from torch.profiler import record_function

        started_at = time.perf_counter()
        try:
            with record_function("commit a part"):
                self._sink.commit(rows)
                if self._heartbeat is not None:
                    self._heartbeat.record_commit(rows.part)
                    self._heartbeat.set_failures(self._sink.num_failed)
        finally:
            self.seconds += time.perf_counter() - started_at


class Passes(Generic[ComputedT]):
    """Forward passes of a run, one at a time or in parallel; a context manager.

    One engine computes a batch from end to end with its own number of threads, so the values of a
    batch do not depend on the batches that are computed at the same time. `compute` is called with
    an engine and a batch.

    Attributes:
        last_wait_s: seconds for which the engines waited for the images of the last batch.
    """

    def __init__(self, context: RunContext, compute: Callable[[Engine, Batch], ComputedT]) -> None:
        self._engine, self._parallelism = context.engine, context.parallelism
        self._compute = compute
        self._engines: list[Engine] = [context.engine]
        self._free: queue.SimpleQueue[Engine] = queue.SimpleQueue()  # engines that no thread uses
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Part, Batch, Future[ComputedT]]] = deque()
        self._wait_s = self.last_wait_s = 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._engine.model_seconds = self._engine.copy_seconds = 0.0
        if self._parallelism.replicas > 1:
            replicas = self._engine.replicas(self._parallelism.replicas)
            self._engines = self._stack.enter_context(replicas)
        for engine in self._engines:
            self._free.put(engine)
        if self._parallelism.computes_ahead:
            self._pool = ThreadPoolExecutor(len(self._engines), thread_name_prefix="featx-model")
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:  # ends the replicas last, also after an exception
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
                wait([future for *_, future in self._waiting], _LEAVE_S)

    def each(
        self, batches: Iterable[tuple[Part, Batch]]
    ) -> Iterator[tuple[Part, Batch, Callable[[], ComputedT]]]:
        """Yield each part and batch in order, with a function that returns the result of the batch.

        It computes the batch, or waits for the thread that does. With parallel passes, one batch
        more than there are engines is submitted, so that no engine is idle while the caller takes a
        batch.
        """
        from torch.profiler import record_function

        batches = iter(batches)
        while True:
            started_at, idle = time.perf_counter(), self.idle_share()
            with record_function("wait for images"):
                next_batch = next(batches, None)
            # Engines may run out of work while the loader is awaited: average before and after.
            idle = (idle + self.idle_share()) / 2
            self.last_wait_s = idle * (time.perf_counter() - started_at)
            self._wait_s += self.last_wait_s
            if next_batch is None:
                break

            part, batch = next_batch
            if self._pool is None:
                yield part, batch, functools.partial(self._compute_with_free_engine, batch)
                continue
            future = self._pool.submit(self._compute_with_free_engine, batch)
            self._waiting.append((part, batch, future))
            if len(self._waiting) > len(self._engines):
                part, batch, future = self._waiting.popleft()
                yield part, batch, future.result
        while self._waiting:
            part, batch, future = self._waiting.popleft()
            yield part, batch, future.result

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

    def seconds(self) -> dict[str, float]:
        """Seconds so far of engines that waited for images, of the model, and of copies from the
        device, each as the mean over the replicas.
        """
        count = len(self._engines)
        return {
            "wait": self._wait_s,
            "model": float(sum(engine.model_seconds for engine in self._engines)) / count,
            "copy": float(sum(engine.copy_seconds for engine in self._engines)) / count,
        }
