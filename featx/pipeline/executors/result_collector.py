"""Result collector: adds up the commits and reports of the workers to the outcome of a run."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from featx.pipeline.executors.job_folder import WorkerReport, WorkerStats
from featx.pipeline.executors.worker_spec import Session, WorkerSpec
from featx.pipeline.row_failures import refuse_failures
from featx.pipeline.run_metrics import RunMetrics, RunOutcome, bottleneck

_STAGES = ("read", "decode", "wait", "model", "copy", "write")


@dataclass
class ResultCollector:
    """Adds up the results of the workers in the driver; times are those of time.perf_counter.

    Attributes:
        num_rows: number of rows that the workers have to compute.
        started_at: time at which the first worker was ready; 0 before.
        committed_at: time of the last commit.
        num_committed: number of rows in committed parts.
        num_committed_before: number of these rows whose computing time is unknown, since their
            parts were found committed when the clock started.
        created_at: time at which the run was distributed.
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
