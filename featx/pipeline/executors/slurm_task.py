"""Task of executor=slurm: a worker that ends before its time limit.

Without a driver, which would submit it again, a task puts itself into the queue again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from featx.base import keep_freed_memory, own_process
from featx.pipeline.executors.slurm_queue import run_command, seconds_left
from featx.pipeline.executors.worker import TIME_LIMIT, read_spec, result_path, run_worker
from featx.pipeline.executors.worker_spec import WorkerSpec
from featx.pipeline.executors.worker_stats import WorkerReport
from featx.storage import open_folder
from featx.store import read_heartbeats

SIGNAL_DELAY_S = 90
"""Seconds before its time limit at which a task ends itself, at the most."""

_MAX_REQUEUES = 3
"""Number of times in a row that a task puts itself into the queue again without a new part."""


def main(folder: str, number: str, device: str, limit_s: str) -> None:
    """Run a task of Slurm with a time limit in seconds."""
    own_process()
    if device == "cpu":
        keep_freed_memory()  # before any thread allocates
    limit = float(limit_s)
    margin_s = min(SIGNAL_DELAY_S, limit / 6)  # to commit complete parts
    spec = read_spec(Path(folder))
    if result_path(spec, int(number)).exists() and is_driver_alive(spec):
        return  # Slurm has queued a preempted task again, which the driver has replaced
    report = run_worker(spec, int(number), device, seconds_left(limit) - margin_s)
    if report.ended_by in (TIME_LIMIT, "SIGUSR2") and not is_driver_alive(spec):
        requeue(spec, number, report)


def is_driver_alive(spec: WorkerSpec) -> bool:
    """Return whether a driver is alive that submits again what a task leaves undone."""
    try:
        records = read_heartbeats(spec.root)
    except OSError:
        return True  # the store cannot be read now
    return any(record.is_alive for record in records if record.path.name == spec.driver)


def requeue(spec: WorkerSpec, number: str, report: WorkerReport) -> None:
    """Put this task into the queue again, unless it has committed nothing for several times."""
    path = spec.folder / f"requeues-{number}"
    count = 0
    if not report.num_parts:
        with contextlib.suppress(OSError, ValueError):
            count = int(path.read_text())
        count += 1
    if count < _MAX_REQUEUES:
        open_folder(spec.folder).write_best_effort(path, str(count))
        run_command(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])


if __name__ == "__main__":
    main(*sys.argv[1:])
