"""What the workers of a spread run did, as they tell it and their driver counts it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from featx.pipeline.bottleneck import bottleneck
from featx.pipeline.executors.worker_spec import Session, WorkerSpec
from featx.pipeline.row_failures import refuse_failures
from featx.pipeline.run_metrics import RunMetrics
from featx.types import Failure, Part


@dataclass(frozen=True)
class PartResult:
    """A part that is durable now.

    Attributes:
        failures: its rows that failed.
        faint: layer -> rows that float16 hardly holds.
        seconds: from its first batch to its commit.
        waited: seconds of them in which the device waited for images.
    """

    part: Part
    failures: Sequence[Failure]
    faint: Mapping[str, int]
    seconds: float
    waited: float


@dataclass
class WorkerStats:
    """What a worker, or all of them together, took for its parts.

    Attributes:
        seconds: stage -> busy ones.
        bytes_read: of encoded images.
        peak_memory_mib: of the largest process.
        decoder_warnings: reason -> images whose decoder gave this warning.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    bytes_read: int = 0
    peak_memory_mib: int = 0
    decoder_warnings: Counter[str] = field(default_factory=Counter)

    def add(self, other: WorkerStats) -> None:
        """Take over what another worker, or this one in another turn, took."""
        for stage, seconds in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.bytes_read += other.bytes_read
        self.decoder_warnings.update(other.decoder_warnings)
        self.peak_memory_mib = max(self.peak_memory_mib, other.peak_memory_mib)


@dataclass
class RunOutcome:
    """What came of a run that was spread.

    Attributes:
        faint: layer -> rows that float16 hardly holds.
        peak_memory_mib: of the largest worker.
    """

    figures: RunMetrics
    faint: Counter[str]
    peak_memory_mib: int


_STAGES = ("read", "decode", "wait", "model", "copy", "write")


@dataclass
class ResultCollector:
    """What the workers of a run did so far, as their driver counts it.

    Args:
        rows_to_do: that they have to compute in all.

    Attributes:
        begun: when the first worker was ready, by time.perf_counter; 0 before that.
        ended: when the last part was committed.
        rows: of the parts that are durable.
        rows_before: of those, what was when the time began.
        asked: when the run was spread.
        faint: layer -> rows that float16 hardly holds.
        labour: of workers that came to their end.
        is_labour_complete: no worker ended before it could tell its labour.
    """

    rows_to_do: int
    begun: float = 0.0
    ended: float = 0.0
    rows: int = 0
    rows_before: int = 0
    asked: float = field(default_factory=time.perf_counter)
    faint: Counter[str] = field(default_factory=Counter)
    labour: WorkerStats = field(default_factory=WorkerStats)
    is_labour_complete: bool = True

    def begin(self) -> None:
        """A worker is ready: from here on the time counts."""
        self.begun = self.begun or time.perf_counter()

    def add(self, done: PartResult, before: bool = False) -> None:
        """One more part is durable.

        Args:
            before: nobody knows when its worker was ready, so it tells nothing of the speed.
        """
        self.begin()
        self.ended = time.perf_counter()
        self.rows += len(done.part)
        self.rows_before += len(done.part) if before else 0
        self.faint.update(done.faint)

    def refuse_failures(self, order: WorkerSpec, session: Session) -> None:
        """Raise TooManyFailuresError where going on would only give more of the same."""
        left = self.rows_to_do - self.rows
        left_s = left * (self.ended - self.begun) / max(1, self.rows - self.rows_before)
        rows = session.rows_asked
        refuse_failures(order.config, session.num_failed, rows - left, rows, left_s)

    def outcome(self, num_workers: int, order: WorkerSpec) -> RunOutcome:
        """The figures of the run, when it is done."""
        labour, known = self.labour, self.is_labour_complete
        busy = dict.fromkeys(_STAGES, 0.0) | labour.seconds
        # Of a worker that ended before it could tell, nothing is known: a sum without it is wrong.
        seconds: dict[str, float | None] = {**busy} if known else dict.fromkeys(busy)
        num_bytes = labour.bytes_read if known else None
        timed, took = self.rows - self.rows_before, self.ended - self.begun
        if not timed:  # all were there when the time began: what is known is when they were asked
            timed, took = self.rows, self.ended - self.asked
        if not timed or took <= 0:
            return RunOutcome(RunMetrics(seconds, None, num_bytes, None), self.faint, 0)
        of_all = took * self.rows / timed * num_workers
        device, precision = str(order.fingerprint["device"]), order.config.precision
        sentence = bottleneck(busy, of_all, order.cpus, device, precision) if known else None
        figures = RunMetrics(
            seconds,
            timed / took,
            num_bytes,
            sentence,
            decoder_warnings=labour.decoder_warnings,
        )
        return RunOutcome(figures, self.faint, labour.peak_memory_mib)
