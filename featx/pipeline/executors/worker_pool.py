"""Worker pool: the workers of a run as the driver sees them, for every executor.

The driver shares two folders with its workers: that of the store, where it looks for parts that
they have committed, and one with their claims and reports. An executor derives its own pool, which
says how workers start, which of them have ended, and how they are ended.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from featx import errors
from featx.base import Progress, log_message
from featx.errors import FeatxError, RunError, counted
from featx.pipeline.executors.part_claims import (
    CLAIMS,
    assign,
    claimed_indices,
    owner_of,
    parts_in_order,
)
from featx.pipeline.executors.worker import (
    SPEC,
    TIME_LIMIT,
    ready_path,
    result_path,
    rows_text,
)
from featx.pipeline.executors.worker_spec import PickledWorkerSpec, Session, WorkerSpec
from featx.pipeline.executors.worker_stats import (
    ResultCollector,
    RunOutcome,
    WorkerError,
    WorkerReport,
)
from featx.pipeline.stop_signals import GRACE_S, stop_signals
from featx.storage import open_folder
from featx.store import DRIVER, Heartbeat, clear_heartbeat, clear_heartbeats, read_heartbeats
from featx.types import Part

MAX_DEATHS = 3
"""Number of workers that may be lost in the same part, or without a part, until the run ends."""

RESUME_HINT = "Nothing committed is lost; run the same command again to resume."
"""Last sentence of errors that end a run."""

_MAX_POLL_S = 5.0
"""Seconds between two looks at the most, as a signal ends the run within 10 s."""

_REPORTS_S = 30.0
"""Seconds to wait for the last reports of workers when all parts are committed."""


_Loss: TypeAlias = tuple[int, str, int]
"""Number of a lost worker, how it ended, and the number of parts that it had committed."""


class WorkerPool(ABC):
    """Workers of a run; all methods run in the main thread of the driver.

    Args:
        spec: worker spec of the run.
        session: write session; records every committed part.
        folder: folder that all workers see. The pool uses a new folder in it.
        num_workers: number of workers that share the parts.
        kind: what a worker is called: worker, actor or task.
        outlives_driver: whether a worker continues when its driver dies.

    Attributes:
        spec: worker spec with what the pool adds to it.
        session: as given.
        workers: numbers of the workers that have been started and have not ended.
        lost: numbers of the workers that have been replaced.
        progress: progress bar of the run; set by `run`.
        heartbeat: heartbeat of the driver.
    """

    progress: Progress
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
        kind: str = "worker",
        outlives_driver: bool = False,
    ) -> None:
        self.spec = replace(
            spec,
            # No worker of an earlier driver finds the claims of this one.
            folder=folder / uuid.uuid4().hex[:8],
            num_workers=max(1, min(num_workers, len(spec.parts))),
            kind=kind,
            outlives_driver=outlives_driver,
        )
        num_parts, num_rows = len(spec.parts), sum(map(len, spec.parts))
        if 0 < num_parts < num_workers:
            log_message(
                f"{counted(num_rows, 'row')} in {counted(num_parts, 'part')}, and {num_workers} "
                "workers: the others have no work. A smaller part_rows, with overwrite=true, makes "
                "more parts."
            )
        self.session = session
        self._jobs = folder if folder.is_relative_to(session.root.absolute()) else None
        self.heartbeat = Heartbeat(session.disk, DRIVER)
        self.workers: list[int] = []
        self.lost: list[int] = []
        self.collector = ResultCollector(sum(len(part) for part in spec.parts))
        self._missing = {part.index: part for part in spec.parts}
        self._losses: Counter[int] = Counter()  # index of a part, or -1 - worker -> lost workers
        self._first_number: dict[int, int] = {}  # replacement -> first worker that it stands for
        self._ended_at: dict[int, float] = {}  # ended workers without a report so far
        self._num_workers = 0  # that were started so far
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

    @abstractmethod
    def name(self, number: int) -> str:
        """Name of a worker in messages."""

    def advice(self, number: int, how: str, parts: Sequence[Part]) -> str:
        """Sentences for the error after MAX_DEATHS losses, each after a space."""
        return ""

    def run(self) -> RunOutcome:
        """Compute all parts; return the outcome of the run."""
        disk, session = open_folder(self.spec.folder), self.session
        with (
            self.heartbeat,
            stop_signals() as stop,
            Progress(session.num_rows, session.num_committed) as self.progress,
        ):
            if self._jobs is not None and session.disk.has_locks:
                # Of an earlier driver; its workers do not continue without it.
                disk.remove(self._jobs)
            disk.make_folder(self.spec.folder / CLAIMS)
            disk.replace(self.spec.folder / SPEC, pickle.dumps(PickledWorkerSpec(self.spec)))
            try:
                self._start(self._new_numbers(self.spec.num_workers if self._missing else 0))
                while self._missing or self._has_reports_due():
                    self._poll()
                    if stop:
                        raise stop.interrupted()
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
        return self.collector.outcome(self.spec)

    def _end_run(self) -> None:
        """End the workers of a run that failed, and record what they have committed."""
        try:
            self.end_workers(GRACE_S)
        finally:
            self.end_workers(0.0)
            if not self.spec.outlives_driver:
                clear_heartbeats(self.session.disk, self.spec.driver)
            with contextlib.suppress(FeatxError):
                self._find_committed()

    def _new_numbers(self, count: int) -> list[int]:
        """Numbers of workers that are about to be started."""
        self._num_workers += count
        return list(range(self._num_workers - count, self._num_workers))

    def _start(self, numbers: Sequence[int]) -> None:
        """Start workers, if there are any."""
        self.workers += numbers
        if numbers:
            self.start(numbers)

    def _poll(self) -> None:
        """Wait; record what was committed, and look after workers that have ended."""
        # A look at the parts of a large store takes long.
        time.sleep(max(self.poll_s, min(10 * self._look_s, _MAX_POLL_S)))
        looked_at = time.monotonic()
        if not self.collector.started_at and any(map(self._is_ready, self.workers)):
            self._start_clock()
        ended = self.ended()  # before the look at the parts, which a worker commits before its end
        self._find_committed()
        lost = [loss for number, how in ended.items() if (loss := self._take_end(number, how))]
        if self._missing:
            # No worker is left and nobody was lost: someone has deleted claims or parts.
            if not self.workers and not lost and self._is_overdue(-1):
                lost.append((self._num_workers - 1, "has left parts out", 0))
            self._replace(lost)
        self._look_s = time.monotonic() - looked_at

    def _take_end(self, number: int, how: str) -> _Loss | None:
        """Take the report of a worker that has ended."""
        report = self._report(result_path(self.spec, number))
        if report is None and not self._is_overdue(number):
            return None
        self.workers.remove(number)
        loss = None
        if report is None:
            report = self._report(ready_path(self.spec, number)) or WorkerReport()
            loss = number, how, report.num_parts
        elif report.error is not None:
            raise self._error(number, report.error)
        elif report.ended_by is not None:
            verb = "reached" if report.ended_by == TIME_LIMIT else "was ended by"
            loss = number, f"{verb} {report.ended_by} ({report.activity})", report.num_parts
        self.collector.add_report(report)
        self.collector.is_complete &= loss is None
        return loss

    def _find_committed(self) -> None:
        """Record the parts that were committed since the last look."""
        is_earlier = not self.collector.started_at
        parts = list(self._missing.values())
        for part, failures in self.session.committed_by_others(parts):
            del self._missing[part.index]
            self.session.record_commit(part, failures)
            self.heartbeat.set_failures(self.session.num_failed)
            self._start_clock()
            self.collector.add_rows(len(part), is_earlier)
            self.progress.step(len(part), len(failures), None, is_earlier)
            self.collector.refuse_failures(self.spec, self.session)

    def _start_clock(self) -> None:
        """Start the clock of the run with the first worker that is ready."""
        if not self.collector.started_at:
            self.progress.begin()
            self.collector.start()

    def _is_ready(self, number: int) -> bool:
        """Return whether a worker has loaded its model."""
        return ready_path(self.spec, number).exists()

    def _has_reports_due(self) -> bool:
        """Return whether workers that have computed are about to report, when all is committed."""
        if time.perf_counter() - self.collector.committed_at < _REPORTS_S:
            return any(map(self._is_ready, self.workers))
        self.collector.is_complete &= not any(map(self._is_ready, self.workers))
        return False

    def _is_overdue(self, number: int) -> bool:
        """Return whether the report of an ended worker would be visible by now."""
        now = time.monotonic()
        return now - self._ended_at.setdefault(number, now) >= self.report_s

    def _report(self, path: Path) -> WorkerReport | None:
        """Read a report; None if there is none."""
        with contextlib.suppress(OSError, ValueError):
            return WorkerReport.from_json(path.read_bytes())
        return None

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

    def _replace(self, lost: Sequence[_Loss]) -> None:
        """Start other workers for lost ones, which inherit the parts that these had claimed."""
        if not lost:
            return
        claimed = claimed_indices(self.spec)
        missing = [part for part in self._missing.values() if part.index in claimed]
        owners = {part.index: owner_of(self.spec, part) for part in missing}
        successors = self._new_numbers(len(lost))
        numbers = [number for number, _, _ in lost]
        for (number, how, num_parts), successor in zip(lost, successors, strict=True):
            self._first_number[successor] = self._first_number.get(number, number)
            others = {*self.workers, *successors, *numbers} - {number}
            # A worker that died before it wrote its number into a claim leaves it empty.
            parts = [
                part
                for part in parts_in_order(self.spec, number)
                if part.index in owners and owners[part.index] not in others
            ]
            self._count_loss(number, how, parts, num_parts)
            for part in parts:
                owners[part.index] = successor
                assign(self.spec, part, successor)
        self.lost += numbers
        self._ended_at.pop(-1, None)
        self._start(successors)

    def _count_loss(self, number: int, how: str, parts: Sequence[Part], num_parts: int) -> None:
        """Count a lost worker at the part that it was computing, and report it.

        Without a part it counts with those that it replaced, unless it has committed parts: Slurm
        may preempt many tasks at once.
        """
        # A worker computes its parts in order, so it was lost in the first that is missing.
        is_ready = self._is_ready(number)
        first = parts[:1] if is_ready else []
        index = first[0].index if first else -1 - self._first_number.get(number, number)
        self._losses[index] += 1 if first or not num_parts else 0
        where = "between two parts" if is_ready else "before it had a part"
        if first:
            where = f"in {rows_text(first)}"
        text = f"{self.name(number)} {how} {where}"
        if self._losses[index] >= MAX_DEATHS:
            raise RunError(
                f"{text}, the {MAX_DEATHS}rd {self.spec.kind} that did. {RESUME_HINT}"
                f"{self.advice(number, how, parts)}"
            )
        self.progress.log(f"{text}; {self.replacement}")
        for record in read_heartbeats(self.session.root):
            is_own = record.values["driver"] == self.spec.driver
            if is_own and record.values["what"].startswith(f"{self.spec.kind} {number} "):
                clear_heartbeat(self.session.disk, record.path.name)
