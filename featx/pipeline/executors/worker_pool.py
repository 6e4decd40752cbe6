"""Worker pool: the workers of a run as the driver sees them, for every executor.

The driver shares two folders with its workers: that of the store, where it looks for parts that
they have committed, and one with their claims and reports. An executor derives its own pool, which
says how workers start, which of them have ended, and how they are ended.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from featx import errors
from featx.base import Progress, RunProgress, log_message
from featx.errors import FeatxError, RunError, counted
from featx.pipeline.executors.job_folder import (
    CLAIMS,
    SPEC,
    WorkerError,
    WorkerReport,
    WorkerSpec,
    dump_spec,
    inherited_parts,
    ready_path,
    release_parts,
    result_path,
)
from featx.pipeline.executors.worker import TIME_LIMIT, rows_text
from featx.pipeline.output import Session
from featx.pipeline.row_failures import refuse_failures
from featx.pipeline.run_metrics import RunMetrics, RunOutcome, bottleneck
from featx.pipeline.stop_signals import GRACE_S, Interrupted, stop_signals
from featx.storage import open_folder, s3_outage
from featx.store import DRIVER, Heartbeat, clear_heartbeats, read_heartbeats
from featx.types import Part

MAX_DEATHS = 3
"""Number of workers that may be lost in the same part, or without a part, until the run ends."""

RESUME_HINT = "Nothing committed is lost; run the same command again to resume."
"""Last sentence of errors that end a run."""

_STAGES = ("read", "decode", "wait", "model", "copy", "write")
"""Stages whose seconds a worker reports."""

MAX_POLL_S = 5.0
"""Seconds between two looks at the most, as a signal ends the run within 10 s."""

_REPORTS_S = 30.0
"""Seconds to wait for the last reports of workers when all parts are committed."""


class WorkerPool(ABC):
    """Workers of a run; all methods run in the main thread of the driver.

    The folder is one that all workers see; the pool uses a new folder in it. `workers` are the
    numbers of those that have been started and have not ended; `lost` those of workers that have
    been replaced.
    """

    progress: Progress
    kind = "worker"
    """What a worker is called."""
    outlives_driver = False
    """Whether a worker continues when its driver dies."""
    poll_s = 0.5
    """Seconds between two looks at the parts and workers."""
    replacement = "another one takes its place"
    """Words on what happens after a loss."""
    report_s = 0.0
    """Seconds to wait for the report of an ended worker: network file systems show files late."""

    def __init__(
        self,
        spec: WorkerSpec,
        session: Session,
        folder: Path,
        num_workers: int,
    ) -> None:
        self.spec = replace(
            spec,
            # No worker of an earlier driver finds the claims of this one. See layout.JOB_GLOB.
            folder=folder / uuid.uuid4().hex[:8],
            num_workers=max(1, min(num_workers, len(spec.parts))),
            kind=self.kind,
            outlives_driver=self.outlives_driver,
        )
        num_parts, num_rows = len(spec.parts), sum(map(len, spec.parts))
        if 0 < num_parts < num_workers:
            idle = counted(num_workers - num_parts, "worker has", "workers have")
            text = f"{counted(num_rows, 'row')} in {counted(num_parts, 'part')}: {idle} no work."
            if not session.num_committed:
                text += " A smaller part_rows, with overwrite=true, makes more parts."
            log_message(text)
        self.session = session
        self._jobs = folder if folder.is_relative_to(session.root.absolute()) else None
        self.heartbeat = Heartbeat(session.disk, DRIVER)
        self.workers: list[int] = []
        self.lost: list[int] = []
        self._total = WorkerReport()  # of all workers that have ended
        self._is_total = True  # whether every worker reported its measurements before it ended
        self._created_at = time.perf_counter()
        self._has_begun = False  # a worker is ready, or a part is committed
        self._committed_at = 0.0
        self._at_last_commit: RunProgress | None = None
        self._missing = {part.index: part for part in spec.parts}
        self._losses: Counter[int] = Counter()  # index of a part, or -1 - place -> lost workers
        self._ended_at: dict[int, float] = {}  # ended workers without a report so far
        self._last_ended = 0
        self._look_s = 0.0

    @abstractmethod
    def start(self, numbers: Sequence[int]) -> None:
        """Start workers with these numbers."""

    @abstractmethod
    def ended(self) -> Mapping[int, str]:
        """Find the workers that have ended; number -> how, such as 'was killed by SIGKILL'."""

    @abstractmethod
    def end_workers(self, grace_s: float) -> None:
        """End all workers, after some seconds in which they may commit complete parts."""

    def name(self, number: int) -> str:
        """Name of a worker in messages."""
        return f"{self.kind} {number}"

    def advice(self, number: int, how: str, parts: Sequence[Part]) -> str:
        """Sentences for the error after MAX_DEATHS losses, each after a space."""
        return ""

    def run(self) -> RunOutcome:
        disk, session = open_folder(self.spec.folder), self.session
        with (
            self.heartbeat,
            stop_signals() as stop,
            Progress(session.num_rows, session.num_committed) as self.progress,
        ):
            disk.make_folder(self.spec.folder / CLAIMS)
            disk.replace(self.spec.folder / SPEC, dump_spec(self.spec))
            try:
                if self._missing:
                    self._start(range(self.spec.num_workers))
                while self._missing or self._has_reports_due():
                    self._poll()
                    if stop.signum:
                        raise Interrupted(stop.signum)
            except BaseException:
                self._end_run()
                raise
            self.end_workers(0.0)
        clear_heartbeats(session.disk, self.spec.driver)
        # Tasks that were cancelled may still write their logs.
        with contextlib.suppress(RunError):
            disk.remove(self.spec.folder)
        if self._jobs is not None:
            session.disk.remove_best_effort(self.spec.folder)
        return self._outcome()

    def _end_run(self) -> None:
        """End the workers of a run that failed, and record what they have committed."""
        try:
            self.end_workers(GRACE_S)
        finally:
            self.end_workers(0.0)
            # An object store may be why the run failed.
            with s3_outage.without_waiting(), contextlib.suppress(FeatxError):
                if not self.outlives_driver:
                    clear_heartbeats(self.session.disk, self.spec.driver)
                self._find_committed()

    def _start(self, numbers: Sequence[int]) -> None:
        self.workers += numbers
        self.start(numbers)

    def _poll(self) -> None:
        """Wait; record what was committed, and look after workers that have ended."""
        # A look at the parts of a large store takes long.
        time.sleep(max(self.poll_s, min(10 * self._look_s, MAX_POLL_S)))
        looked_at = time.monotonic()
        if any(map(self._is_ready, self.workers)):
            self._start_clock()
        ended = self.ended()  # before the look at the parts, which a worker commits before its end
        self._find_committed()
        replacements = [number for pair in ended.items() for number in self._take_end(*pair)]
        # No worker is left and nobody was lost: a worker that was given up, or died before it wrote
        # its number, has claimed more, or someone has deleted parts.
        is_idle = not self.workers and not replacements
        if self._missing and is_idle and self._is_overdue(-1):
            replacements = [self._replacement(self._last_ended, "has left parts out", 0)]
            release_parts(self.spec, self._missing.values())
            del self._ended_at[-1]
        if replacements:
            self._start(replacements)
        self._look_s = time.monotonic() - looked_at

    def _take_end(self, number: int, how: str) -> list[int]:
        """Take the report of a worker that has ended; return the number of its replacement."""
        path = result_path(self.spec, number)
        report, is_lost = WorkerReport.read(path), False
        if report is None:
            if not self._is_overdue(number):
                return []
            report, is_lost = WorkerReport.read(ready_path(self.spec, number)), True
            report = report or WorkerReport()
            # It ends if Slurm has put it into the queue again.
            open_folder(self.spec.folder).write_best_effort(path, report.to_json())
        elif report.error is not None:
            raise self._error(number, report.error)
        elif report.ended_by is not None:
            verb = "reached" if report.ended_by == TIME_LIMIT else "was ended by"
            how, is_lost = f"{verb} {report.ended_by} ({report.activity})", True
        self.workers.remove(number)
        self._last_ended = number
        self._total.add(report)
        self._is_total &= not is_lost
        if not is_lost or not self._missing:
            return []
        return [self._replacement(number, how, report.num_parts)]

    def _find_committed(self) -> None:
        """Record the parts that were committed since the last look."""
        # How long parts took that were found before the clock started is not known.
        session, is_earlier = self.session, not self._has_begun
        parts = list(self._missing.values())
        for part, failures in session.committed_by_others(parts):
            del self._missing[part.index]
            session.record_commit(part, failures)
            self.heartbeat.set_failures(session.num_failed)
            self._start_clock()
            self._committed_at = time.perf_counter()
            self.progress.step(len(part), len(failures), None, is_earlier)
            now = self._at_last_commit = self.progress.now()
            left_s = now.seconds_left if now.images_per_second else 0.0
            allowed = self.spec.config.allowed_failures(session.num_rows)
            refuse_failures(allowed, session.num_failed, now.done, session.num_rows, left_s)

    def _start_clock(self) -> None:
        """Start the clock of the run with the first worker that is ready; later do nothing."""
        if not self._has_begun:
            self._has_begun = True
            self.progress.begin()

    def _outcome(self) -> RunOutcome:
        total, spec, last = self._total, self.spec, self._at_last_commit
        busy = dict.fromkeys(_STAGES, 0.0) | total.seconds
        rate, sentence = None, None
        if last is not None:
            # Parts that were all committed when the clock started count from the distribution on.
            num_rows = sum(map(len, spec.parts))
            rate = last.images_per_second or num_rows / (self._committed_at - self._created_at)
            if self._is_total:
                worker_s = num_rows / rate * spec.num_workers
                device, precision = str(spec.fingerprint["device"]), spec.config.precision
                sentence = bottleneck(busy, worker_s, spec.cpus, device, precision)
        # A sum that lacks a worker would be wrong, so the seconds are unknown then.
        seconds: dict[str, float | None] = {**busy} if self._is_total else dict.fromkeys(busy)
        metrics = RunMetrics(
            seconds,
            rate,
            total.bytes_read if self._is_total else None,
            sentence,
            decoder_warnings=total.decoder_warnings,
        )
        return RunOutcome(metrics, Counter(total.underflow_rows), total.peak_memory_mib)

    def _is_ready(self, number: int) -> bool:
        return ready_path(self.spec, number).exists()

    def _has_reports_due(self) -> bool:
        """Return whether workers that have computed are about to report, when all is committed."""
        if time.perf_counter() - self._committed_at < _REPORTS_S:
            return any(map(self._is_ready, self.workers))
        self._is_total &= not any(map(self._is_ready, self.workers))
        return False

    def _is_overdue(self, number: int) -> bool:
        """Return whether the report of an ended worker would be visible by now."""
        now = time.monotonic()
        return now - self._ended_at.setdefault(number, now) >= self.report_s

    def _error(self, number: int, error: WorkerError) -> FeatxError:
        """Error of a worker: exceptions of featx with their type, all others as RunError."""
        found = getattr(errors, error.kind, None)
        is_known = isinstance(found, type) and issubclass(found, FeatxError)
        text = error.text if is_known else f"{error.kind}: {error.text}. {RESUME_HINT}"
        raised = (found if is_known and found else RunError)(
            f"{self.name(number)}, {error.where}: {text}"
        )
        raised.add_note(error.trace)
        return raised

    def _replacement(self, number: int, how: str, num_parts: int) -> int:
        """Count and report a lost worker; return the number of its replacement.

        It counts at the part that it was computing; without one with those that it replaced, unless
        it has committed parts, as Slurm may preempt many tasks at once.
        """
        successor = number + self.spec.num_workers
        # A worker computes its parts in order, so it was lost in the first that is missing.
        parts = inherited_parts(self.spec, successor, self._missing.values())
        is_ready = self._is_ready(number)
        first = parts[:1] if is_ready else []
        index = first[0].index if first else -1 - number % self.spec.num_workers
        self._losses[index] += 1 if first or not num_parts else 0
        where = "between two parts" if is_ready else "before it had a part"
        if first:
            where = f"in {rows_text(first)}"
        text = f"{self.name(number)} {how} {where}"
        if self._losses[index] >= MAX_DEATHS:
            raise RunError(
                f"{text}, the {MAX_DEATHS}rd {self.kind} that did. {RESUME_HINT}"
                f"{self.advice(number, how, parts)}"
            )
        self.progress.log(f"{text}; {self.replacement}")
        self.lost.append(number)
        for record in read_heartbeats(self.session.root):
            is_own = record.values.get("driver") == self.spec.driver
            if is_own and record.values["what"].startswith(f"{self.kind} {number} "):
                self.session.disk.remove_best_effort(record.path)
        return successor
