"""Task of executor=slurm: a worker that ends before its time limit.

Without a driver, which would submit it again, a task puts itself into the queue again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from featx.pipeline.executors.job_folder import WorkerReport, WorkerSpec, read_spec, result_path
from featx.pipeline.executors.worker import TIME_LIMIT, run_worker
from featx.storage import open_folder
from featx.store import read_heartbeats

SIGNAL_DELAY_S = 90
"""Seconds before its time limit at which a task ends itself, at the most."""

_MAX_REQUEUES = 3
"""Number of times in a row that a task puts itself into the queue again without a new part."""

_ANSWER_S = 60.0
"""Seconds to wait for the answer of a Slurm command."""


def main(folder: str, number: str, device: str, limit_s: str, started_at: str) -> None:
    """Run a task of Slurm with a time limit in seconds, from a time of `date +%s` on."""
    margin_s = min(SIGNAL_DELAY_S, float(limit_s) / 6)  # to commit complete parts
    left_s = float(started_at) + float(limit_s) - margin_s - time.time()
    spec = read_spec(Path(folder))
    if result_path(spec, int(number)).exists() and is_driver_alive(spec):
        return  # Slurm has queued a preempted task again, which the driver has replaced
    report = run_worker(spec, int(number), device, left_s)
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


def run_command(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Run a Slurm command without the terminal.

    By default messages are in English, and variables such as SQUEUE_PARTITION, which would hide
    tasks, have no effect. Return exit code, stdout and stderr; the code is None if there is no such
    command.
    """
    if environment is None:
        filters = ("SQUEUE_", "SINFO_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(filters)}
        environment = {**kept, "LC_ALL": "C"}
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"Socket timed out: no answer within {_ANSWER_S:.0f} s"
    except OSError as error:
        return None, "", f"{command[0]}: {error.strerror}"
    return completed.returncode, completed.stdout, completed.stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
