"""Reports and measurements of workers, and how the driver adds them up."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from featx.pipeline.executors.worker_spec import Session, WorkerSpec
from featx.pipeline.row_failures import refuse_failures
from featx.pipeline.run_metrics import RunMetrics, bottleneck
from featx.pipeline.run_metrics import RunOutcome as RunOutcome

_STAGES = ("read", "decode", "wait", "model", "copy", "write")


@dataclass
class WorkerStats:
    """Measurements of one worker or of several.

    Attributes:
        seconds: stage -> busy seconds.
        bytes_read: bytes of encoded images.
        peak_memory_mib: peak memory of the largest process in MiB.
        decoder_warnings: reason -> number of images whose decoder gave this warning.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    bytes_read: int = 0
    peak_memory_mib: int = 0
    decoder_warnings: dict[str, int] = field(default_factory=dict)

    def add(self, other: WorkerStats) -> None:
        """Add the measurements of another worker, or of further parts of the same one."""
        for stage, seconds in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        for reason, count in other.decoder_warnings.items():
            self.decoder_warnings[reason] = self.decoder_warnings.get(reason, 0) + count
        self.bytes_read += other.bytes_read
        self.peak_memory_mib = max(self.peak_memory_mib, other.peak_memory_mib)


@dataclass(frozen=True)
class WorkerError:
    """Exception that ended a worker.

    Attributes:
        kind: name of its class.
        text: its message.
        trace: its traceback.
        where: parts that the worker was computing, as text.
    """

    kind: str
    text: str
    trace: str
    where: str


@dataclass
class WorkerReport:
    """Report of a worker: first without its measurements when it is ready, at last with them.

    Attributes:
        num_parts: number of parts that it committed.
        underflow_rows: layer -> number of underflow rows in these parts.
        worker_stats: measurements of these parts; without parts that were interrupted.
        ended_by: what ended it before all was done: TIME_LIMIT or the name of a signal.
        activity: what it did until then, as text.
        error: exception that ended it, or None.
    """

    num_parts: int = 0
    underflow_rows: dict[str, int] = field(default_factory=dict)
    worker_stats: WorkerStats = field(default_factory=WorkerStats)
    ended_by: str | None = None
    activity: str = ""
    error: WorkerError | None = None

    def to_json(self) -> str:
        """Report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> WorkerReport:
        """Report from JSON."""
        values: dict[str, Any] = json.loads(data)
        stats, error = WorkerStats(**values.pop("worker_stats")), values.pop("error")
        return cls(**values, worker_stats=stats, error=error and WorkerError(**error))


@dataclass
class ResultCollector:
    """Adds up the results of the workers in the driver; times are those of time.perf_counter.

    Args:
        num_rows: number of rows that the workers have to compute.

    Attributes:
        started_at: time at which the first worker was ready; 0 before.
        committed_at: time of the last commit.
        num_committed: number of rows in committed parts.
        num_committed_before: number of these rows whose computing time is unknown, since their
            parts were found committed when the clock started.
        created_at: time at which the run was distributed.
        underflow_rows: layer -> number of underflow rows.
        worker_stats: measurements of workers that have ended.
        is_complete: whether every worker reported its measurements before it ended.
    """

    num_rows: int
    started_at: float = 0.0
    committed_at: float = 0.0
    num_committed: int = 0
    num_committed_before: int = 0
    created_at: float = field(default_factory=time.perf_counter)
    underflow_rows: Counter[str] = field(default_factory=Counter)
    worker_stats: WorkerStats = field(default_factory=WorkerStats)
    is_complete: bool = True

    def start(self) -> None:
        """Start the clock when the first worker is ready; later calls do nothing."""
        self.started_at = self.started_at or time.perf_counter()

    def add_rows(self, num_rows: int, is_earlier: bool) -> None:
        """Add the rows of a committed part; earlier ones are left out of the speed."""
        self.start()
        self.committed_at = time.perf_counter()
        self.num_committed += num_rows
        self.num_committed_before += num_rows if is_earlier else 0

    def add_report(self, report: WorkerReport) -> None:
        """Add the last report of a worker."""
        self.underflow_rows.update(report.underflow_rows)
        self.worker_stats.add(report.worker_stats)

    def refuse_failures(self, spec: WorkerSpec, session: Session) -> None:
        """Raise TooManyFailuresError if too many images failed and much work is left."""
        num_left = self.num_rows - self.num_committed
        num_timed = max(1, self.num_committed - self.num_committed_before)
        remaining_s = num_left * (self.committed_at - self.started_at) / num_timed
        num_rows = session.num_rows
        num_done = num_rows - num_left
        refuse_failures(spec.config, session.num_failed, num_done, num_rows, remaining_s)

    def outcome(self, spec: WorkerSpec) -> RunOutcome:
        """Outcome of the finished run."""
        worker_stats, is_complete = self.worker_stats, self.is_complete
        busy = dict.fromkeys(_STAGES, 0.0) | worker_stats.seconds
        # A sum that lacks a worker would be wrong, so the seconds are unknown then.
        seconds: dict[str, float | None] = {**busy} if is_complete else dict.fromkeys(busy)
        num_bytes = worker_stats.bytes_read if is_complete else None
        num_timed = self.num_committed - self.num_committed_before
        elapsed_s = self.committed_at - self.started_at
        # All parts were committed when the clock started: time from the distribution instead.
        if not num_timed:
            num_timed, elapsed_s = self.num_committed, self.committed_at - self.created_at
        if not num_timed or elapsed_s <= 0:
            return RunOutcome(RunMetrics(seconds, None, num_bytes, None), self.underflow_rows, 0)
        worker_s = elapsed_s * self.num_committed / num_timed * spec.num_workers
        device, precision = str(spec.fingerprint["device"]), spec.config.precision
        sentence = bottleneck(busy, worker_s, spec.cpus, device, precision) if is_complete else None
        metrics = RunMetrics(
            seconds,
            num_timed / elapsed_s,
            num_bytes,
            sentence,
            decoder_warnings=worker_stats.decoder_warnings,
        )
        return RunOutcome(metrics, self.underflow_rows, worker_stats.peak_memory_mib)
