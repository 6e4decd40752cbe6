"""Task of executor=slurm: computes neighbouring parts on a node of the cluster until it is ended.

A task ends early by its time limit, by preemption or by scancel: it commits complete parts and
returns, and the driver submits the rest again. Without a driver, the task puts itself into the
queue again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from featx.base import import_extra, own_process, signal_handlers
from featx.errors import RunError
from featx.pipeline.executors.part_worker import PartWorker, add_worker_context, rows_text
from featx.pipeline.executors.scheduler import MAX_DEATHS
from featx.pipeline.executors.slurm_queue import seconds_left
from featx.pipeline.executors.worker_spec import PickledWorkerSpec, WorkerSpec, worker_context
from featx.pipeline.executors.worker_stats import PartResult, WorkerStats
from featx.pipeline.stop_signals import Interrupted
from featx.storage import open_folder
from featx.store import Heartbeat, read_heartbeats
from featx.types import Part

SIGNAL_DELAY_S = 90
"""Seconds before its time limit at which a task ends itself, at the most."""

TIME_LIMIT = "its time limit"
"""Value of `TaskResult.ended_by` for a task that its time limit ended."""


@dataclass(frozen=True)
class TaskResult:
    """Return value of a task.

    Attributes:
        results: results of the parts that it committed.
        worker_stats: measurements of these parts; empty if the task was ended.
        ended_by: what told it to end, TIME_LIMIT or a signal; None if all parts are committed.
        activity: what it did until then, as text.
    """

    results: Sequence[PartResult]
    worker_stats: WorkerStats
    ended_by: str | None = None
    activity: str = ""


class Task:
    """Task of the array; submitit pickles it on submission, and again when it is requeued.

    Args:
        spec: worker spec.
        device: device to compute on.
        parts: parts to compute, in order.
        limit_s: time limit of the task in seconds, or None if there is none.
    """

    def __init__(
        self,
        spec: PickledWorkerSpec,
        device: str,
        parts: Sequence[Part],
        limit_s: float | None = None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._parts = parts
        self._limit_s = limit_s
        self._runs_without_commit = 0
        self._results: list[PartResult] = []

    def __call__(self) -> TaskResult:
        """Compute and commit those parts that are missing, until this task is ended."""
        started_at = time.monotonic()
        spec = self._spec.open()
        self._results = []
        ready_s: float | None = None
        worker: PartWorker | None = None
        missing = list(self._parts)

        def position() -> str:
            part = None if worker is None else worker.part
            return rows_text(missing if part is None else [part])

        own_process()
        name = f"task {os.environ.get('SLURM_JOB_ID', os.getpid())} on {self._device}"
        with add_worker_context(name, position):
            try:
                with _interrupted_at_end(self._limit_s, spec) as ended_by:
                    missing = spec.part_task.missing(spec.root, self._parts)
                    if not missing:
                        return TaskResult([], WorkerStats())
                    folder = open_folder(spec.root)
                    heartbeat = Heartbeat(folder, name, spec.driver, outlives_driver=True)
                    with heartbeat, worker_context(spec, self._device) as context:
                        ready_s = time.monotonic() - started_at
                        worker = PartWorker(context, spec, self._results.append, heartbeat)
                        return TaskResult(self._results, worker.compute_parts(iter(missing)))
            except Interrupted:
                ran_s = time.monotonic() - started_at
        activity = (
            f"not ready after {ran_s:.0f} s"
            if ready_s is None
            else f"ready after {ready_s:.0f} s, computed for {ran_s - ready_s:.0f} s"
        )
        return TaskResult(self._results, WorkerStats(), ended_by[0], activity)

    def checkpoint(self) -> Any:
        """Submission by which submitit queues this task again; it computes what is missing then.

        Raises:
            RunError: MAX_DEATHS runs in succession committed nothing.
        """
        self._runs_without_commit = 0 if self._results else self._runs_without_commit + 1
        if self._runs_without_commit >= MAX_DEATHS:
            raise RunError(
                f"the task was ended {MAX_DEATHS} times before it could commit a part of "
                f"{rows_text(self._parts[:1])}"
            )
        self._results = []  # results need not be pickled: the next run finds the parts committed
        return submitit_module().helpers.DelayedSubmission(self)


@contextlib.contextmanager
def _interrupted_at_end(limit_s: float | None, spec: WorkerSpec) -> Iterator[list[str]]:
    """Raise Interrupted within the block when this task is to end.

    Three things tell a task to end: SIGTERM (scancel, preemption), SIGUSR2 (Slurm's announcement of
    either, which submitit requests), and a timer in this process, because Slurm announces a time
    limit up to a minute early, which may be all of a short limit. If the driver is gone, an
    announcement is left to submitit, which queues the task again.

    Args:
        limit_s: time limit of the task in seconds, or None if there is none.
        spec: worker spec, which names the driver.

    Yields:
        list of one text: what told the task to end, TIME_LIMIT or the name of a signal.
    """
    ended_by = ["SIGTERM"]
    if threading.current_thread() is not threading.main_thread():
        yield ended_by
        return
    by_submitit = signal.getsignal(signal.SIGUSR2)

    def end(signum: int, frame: object) -> None:
        raise Interrupted(signal.SIGTERM)

    def announced(signum: int, frame: Any) -> None:
        if callable(by_submitit) and not is_driver_alive(spec):
            by_submitit(signum, frame)
            return
        if ended_by[0] != TIME_LIMIT:
            ended_by[0] = "SIGUSR2"
        os.kill(os.getpid(), signal.SIGTERM)  # `end`, or the handler of a run in progress

    def limit_reached() -> None:  # in the thread of the timer; signals arrive in the main thread
        ended_by[0] = TIME_LIMIT
        os.kill(os.getpid(), signal.SIGUSR2)

    timer = None
    if limit_s is not None:
        timer = threading.Timer(seconds_left(limit_s) - _end_margin_s(limit_s), limit_reached)
        timer.daemon = True
        timer.start()
    try:
        with signal_handlers({signal.SIGTERM: end, signal.SIGUSR2: announced}):
            yield ended_by
    finally:
        if timer is not None:
            timer.cancel()


def _end_margin_s(limit_s: float) -> float:
    """Seconds before its time limit at which a task stops, in order to commit complete parts."""
    return min(SIGNAL_DELAY_S, limit_s / 6)


def is_driver_alive(spec: WorkerSpec) -> bool:
    """Return whether a driver is alive that submits again what a task leaves undone."""
    try:
        records = read_heartbeats(spec.root)
    except OSError:
        return True  # the store cannot be read now
    return any(record.is_alive for record in records if record.path.name == spec.driver)


def submitit_module() -> Any:
    """Import submitit, with its log messages below ERROR silenced.

    Raises:
        MissingExtraError: submitit is not installed.
    """
    submitit = import_extra("submitit", "executor=slurm", "submitit", "slurm")
    logging.getLogger("submitit").setLevel(logging.ERROR)
    return submitit
