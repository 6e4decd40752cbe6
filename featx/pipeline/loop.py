"""The one loop over the parts of a run: batches in, commits out, and what it took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from featx.base.machine import num_cpus
from featx.base.progress import Progress, SilentProgress
from featx.pipeline.bottleneck import bottleneck
from featx.pipeline.forward_passes import Passes
from featx.pipeline.row_failures import refuse_failures
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import RunMetrics
from featx.pipeline.run_observer import RunObserver
from featx.pipeline.stop_signals import Interrupted, stop_signals
from featx.types import Batch, Failure, Part

if TYPE_CHECKING:
    from featx.engine.engine import Engine
    from featx.images.loader import Loader
    from featx.pipeline.profiler_trace import Timeline
    from featx.storage.local_folder import AtomicFolder


class BatchSink(Protocol):
    """What becomes of the batches of a run: rows of a store, or statistics."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Busy ones of stages that not every run has, so far."""

    @property
    def rows_asked(self) -> int:
        """Rows that there are in the end."""

    @property
    def rows_done(self) -> int:
        """Rows in committed parts."""

    @property
    def rows_failed(self) -> int:
        """Rows in committed parts whose image failed."""

    def missing(self) -> Iterable[Part]:
        """The parts that are still to be done; taken one by one as they are begun."""

    def compute(self, engine: Engine, batch: Batch) -> Any:
        """What becomes of a batch by itself; in any thread, several at once."""

    def take(self, part: Part, batch: Batch, computed: Callable[[], Any]) -> list[Failure]:
        """Take the next batch of a part, in order; returns its rows that failed.

        Args:
            part, batch: n rows of a part, and padding.
            computed: gives what `compute` made of it, when that is done.
        """

    def finish_part(self) -> Callable[[], object]:
        """The part whose last batch was taken; calling what is returned makes it durable.

        That may happen in another thread, while batches of the next part are taken.
        """


def run_parts(
    prepared: RunContext,
    work: BatchSink,
    disk: AtomicFolder | None = None,
    observer: RunObserver | None = None,
    progress: Progress | SilentProgress | None = None,
) -> RunMetrics:
    """Compute and commit what is missing.

    Args:
        prepared: the run.
        work: what becomes of its batches.
        disk: of the folder that gets a trace with profile=true; None where there is no folder.
        observer: follows the committed parts.
        progress: is told of every batch; None takes a bar on stderr.

    Raises:
        Interrupted: a signal asked for the end; what was whole is committed.
        TooManyFailuresError: more images failed than max_failures, and much is left to do.
    """
    from featx.pipeline.profiler_trace import span  # which imports torch

    engine = prepared.engine
    num_computed = 0
    done_before = work.rows_done
    missing = work.missing()
    loader = prepared.loader(engine.compute.batch_size)
    progress = Progress(work.rows_asked, done_before) if progress is None else progress
    begun = time.perf_counter()
    with (
        loader,
        stop_signals() as stop,
        _Commits() as commits,
        _timeline(prepared, disk) as timeline,
        progress,
        Passes(prepared, work.compute) as passes,
    ):
        batches = _Awaited(loader.batches(missing), passes.idle_share)
        for part, batch, computed in passes.each(batches):
            if stop:
                raise Interrupted(stop[0])
            commits.check()
            with span("batch"):
                failures = work.take(part, batch, computed)
            num_computed += batch.count
            if batch.start + batch.count == part.stop:
                commits.begin(work.finish_part())
                if observer is not None and observer.wants_parts:
                    commits.finish()  # they tell of committed parts only
                    seconds = _seconds(loader, passes, batches.waited, commits.seconds)
                    observer.part_committed(part, seconds)
                done, took = done_before + num_computed, time.perf_counter() - begun
                left_s = (work.rows_asked - done) * took / num_computed
                refuse_failures(prepared.config, work.rows_failed, done, work.rows_asked, left_s)
            progress.step(batch.count, len(failures), batches.last_wait)
            if timeline is not None:
                timeline.step()
        commits.finish()
        if stop:
            raise Interrupted(stop[0])
    took = time.perf_counter() - begun
    rows = work.rows_done - done_before
    seconds = {**_seconds(loader, passes, batches.waited, commits.seconds), **work.seconds}
    if not rows:
        return RunMetrics(
            {**seconds}, None, loader.times.bytes, None, decoder_warnings=loader.warnings
        )
    precision = prepared.config.precision
    sentence = bottleneck(seconds, took, num_cpus(), engine.device.type, precision)
    trial = prepared.trial
    num_batches = num_computed / engine.compute.batch_size / prepared.at_once.replicas
    found = trial.compare(seconds, rows, took, num_batches)
    return RunMetrics(
        {**seconds},
        rows / took,
        loader.times.bytes,
        sentence,
        trial.images_per_second,
        found.share,
        found.cause,
        loader.warnings,
    )


class _Awaited:
    """The batches of a run as they come.

    Args:
        batches: of the loader.
        idle_share: of the engines, those that have nothing to compute now.

    Attributes:
        waited: seconds that engines waited for all of them so far.
        last_wait: seconds for the last one.
    """

    def __init__(
        self, batches: Iterator[tuple[Part, Batch]], idle_share: Callable[[], float]
    ) -> None:
        self.waited = self.last_wait = 0.0
        self._batches = batches
        self._idle_share = idle_share

    def __iter__(self) -> Iterator[tuple[Part, Batch]]:
        from featx.pipeline.profiler_trace import span

        while True:
            begun, idle = time.perf_counter(), self._idle_share()
            with span("wait for images"):
                following = next(self._batches, None)
            idle = (idle + self._idle_share()) / 2
            self.last_wait = idle * (time.perf_counter() - begun)
            self.waited += self.last_wait
            if following is None:
                return
            yield following


class _Commits:
    """Commits one part while the next is computed, never two at once.

    Attributes:
        seconds: busy ones so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="featx-commit")
        self._pending: Future[None] | None = None

    def __enter__(self) -> _Commits:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True)  # a part that is whole is committed, whatever came after

    def begin(self, commit: Callable[[], object]) -> None:
        """Start to commit a part, when the one before is committed."""
        self.finish()
        self._pending = self._thread.submit(self._timed, commit)

    def check(self) -> None:
        """Raise what the commit of the last part failed with, without waiting for it."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last part is committed; raises what it failed with."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _timed(self, commit: Callable[[], object]) -> None:
        from featx.pipeline.profiler_trace import span

        begun = time.perf_counter()
        try:
            with span("commit a part"):
                commit()
        finally:
            self.seconds += time.perf_counter() - begun


def _timeline(
    prepared: RunContext, disk: AtomicFolder | None
) -> contextlib.AbstractContextManager[Timeline | None]:
    """What records the run, with profile=true."""
    if disk is None or not prepared.config.profile:
        return contextlib.nullcontext()
    from featx.pipeline.profiler_trace import Timeline

    return Timeline(disk, prepared.engine.device)


def _seconds(loader: Loader, passes: Passes, waited: float, written: float) -> dict[str, float]:
    """Stage -> its busy seconds so far."""
    on_device = loader.times.on_device
    return {
        "read": loader.times.read,
        "decode": loader.times.decode,
        **({"decode_on_device": on_device} if on_device else {}),
        "wait": waited,
        "model": passes.model_seconds,
        "copy": passes.copy_seconds,
        "write": written,
    }
