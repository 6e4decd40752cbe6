"""Computes parts in a worker; shared by all executors that use workers."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from featx.base import SilentProgress
from featx.errors import FeatxError, InternalError, RunError
from featx.pipeline.executors.worker_spec import WorkerSpec
from featx.pipeline.executors.worker_stats import PartResult, WorkerStats
from featx.pipeline.loop import run_parts
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import peak_memory_mib
from featx.pipeline.stop_signals import Interrupted
from featx.store import Heartbeat
from featx.types import Batch, Failure, Part

if TYPE_CHECKING:
    from featx.engine import Engine


class PartWorker:
    """Batch sink of a worker: computes parts one after the other, commits and reports each.

    Args:
        context: run context of the worker, equal to that of the driver.
        spec: worker spec from the driver.
        report: receives the result of every committed part; called in the thread that commits.
        heartbeat: heartbeat that records the current part.
        stopping: event that ends the worker before its next batch, or None.

    Attributes:
        part: part whose batch is being taken, or None between two batches.
        num_rows: number of rows of the run, over all workers.
        num_committed: number of rows that this worker has committed.
        num_failed: always 0: the driver counts the failures of all workers and ends the run.
        seconds: stage -> busy seconds since `compute_parts` was called, for stages that not
            every run has.
    """

    def __init__(
        self,
        context: RunContext,
        spec: WorkerSpec,
        report: Callable[[PartResult], None],
        heartbeat: Heartbeat,
        stopping: threading.Event | None = None,
    ) -> None:
        self._sink = spec.part_task.sink(context, spec.root, heartbeat)
        self._stopping = stopping or threading.Event()
        self.part: Part | None = None
        self.num_rows = spec.num_rows
        self.num_committed = 0
        self.num_failed = 0
        self._context = context
        self._report = report
        self._parts: Iterable[Part] = ()
        self._progress = SilentProgress()
        self._started: tuple[Part, float] | None = None

    def compute_parts(self, parts: Iterable[Part]) -> WorkerStats:
        """Compute and commit parts as the iterable yields them.

        Args:
            parts: parts to compute; drawn one at a time.

        Returns:
            measurements of these parts.

        Raises:
            Interrupted: a signal arrived, or `stopping` was set; complete parts are committed.
        """
        self._parts = parts
        self._sink.seconds = dict.fromkeys(self._sink.seconds, 0.0)
        figures = run_parts(self._context, self, self, progress=self._progress)
        warnings = Counter(figures.decoder_warnings)
        seconds = {stage: value for stage, value in figures.seconds.items() if value is not None}
        return WorkerStats(seconds, figures.bytes_read or 0, peak_memory_mib(), warnings)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Stage -> busy seconds of stages that only this sink has."""
        return self._sink.seconds

    def missing(self) -> Iterable[Part]:
        """Parts given to `compute_parts`."""
        return self._parts

    def compute(self, engine: Engine, batch: Batch) -> Any:
        """Compute the values of a batch."""
        return self._sink.compute(engine, batch)

    def take(self, part: Part, batch: Batch, computed: Callable[[], Any]) -> list[Failure]:
        """Consume the next batch of a part; return the failures of its rows."""
        if self._stopping.is_set():
            raise Interrupted(signal.SIGTERM)
        if batch.start == part.start:
            self._started = part, time.perf_counter()
        self.part = part
        failures = self._sink.take(part, batch, computed)
        self.part = None
        return failures

    def finish_part(self) -> Callable[[], None]:
        """Detach the finished part; return a function that commits and reports it."""
        if self._started is None:
            raise InternalError("no batch of a part was taken")
        part, started_at = self._started
        # These counts are taken here, in the thread of `take`: the commit runs in another thread,
        # when the sink already counts for the next part.
        underflow_rows, self._sink.underflow_rows = self._sink.underflow_rows, Counter()
        waited_s = self._progress.take_waited()
        commit = self._sink.finish_part()

        def commit_and_report() -> None:
            failures = commit()
            self.num_committed += len(part)
            seconds = time.perf_counter() - started_at
            self._report(PartResult(part, failures, +underflow_rows, seconds, waited_s))

        return commit_and_report


def rows_text(parts: Sequence[Part]) -> str:
    """Parts and their rows for messages: 'part 3 (rows 24 to 31)'."""
    if not parts:
        return "no part"
    if len(parts) > 2:
        return ", ".join(rows_text([part]) for part in parts[:2]) + f" and {len(parts) - 2} more"
    return ", ".join(f"part {part.index} (rows {part.start} to {part.stop - 1})" for part in parts)


@contextlib.contextmanager
def add_worker_context(worker: str, at: Callable[[], str]) -> Iterator[None]:
    """Turn every exception of the block into a RunError that names the worker and its position.

    RunError has no arguments but its message, so any process can unpickle it.

    Args:
        worker: name of the worker.
        at: returns the parts that the worker is computing, as text.
    """
    try:
        yield
    except Interrupted as interrupted:
        raise RunError(
            f"{worker}: stopped by {interrupted}; complete parts are committed"
        ) from None
    except Exception as error:
        kind = "" if isinstance(error, FeatxError) else f"{type(error).__name__}: "
        raise RunError(f"{worker}, {at()}: {kind}{error}") from error
