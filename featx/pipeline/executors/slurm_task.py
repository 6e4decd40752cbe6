"""Task of executor=slurm: a worker that ends before its time limit.

Without a driver, which would submit it again, a task puts itself into the queue again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from featx.base import module_environment
from featx.pipeline.executors.job_folder import WorkerSpec, read_spec, result_path
from featx.pipeline.executors.worker import TIME_LIMIT, run_worker
from featx.store import read_heartbeats

_MARGIN_S = 90
"""Seconds before its time limit at which a task ends itself, at the most."""

_MAX_REQUEUES = 3
"""Number of times that a task without a driver is queued again if it has committed no part."""

_ANSWER_S = 60.0
"""Seconds to wait for the answer of a Slurm command."""

_WITHOUT_EFFECT = ("SBATCH_SIGNAL", "SBATCH_WAIT", "SCANCEL_", "SLURM_RESTART_COUNT", "SQUEUE_")
"""Beginnings of names of variables that would end tasks early, let sbatch wait for their end, hide
tasks from squeue and scancel, or give tasks the number of times that their driver was requeued."""


def main(folder: str, number: str, device: str, limit_s: str, started_at: str) -> None:
    """Run a task of Slurm with a time limit in seconds, from a time of `date +%s` on."""
    margin_s = min(_MARGIN_S, float(limit_s) / 6)  # to commit complete parts
    left_s = float(started_at) + float(limit_s) - margin_s - time.time()
    spec = read_spec(Path(folder))
    if result_path(spec, int(number)).exists() and is_driver_alive(spec):
        return  # Slurm has queued a preempted task again, which the driver has replaced
    report = run_worker(spec, int(number), device, left_s)
    num_requeues = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    can_commit = report.num_parts > 0 or num_requeues < _MAX_REQUEUES
    if report.ended_by == TIME_LIMIT and can_commit and not is_driver_alive(spec):
        os.environ.pop("SLURM_CLUSTERS", None)  # which may name others than that of this machine
        run_command(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])


def is_driver_alive(spec: WorkerSpec) -> bool:
    """Return whether a driver is alive that submits again what a task leaves undone."""
    try:
        records = read_heartbeats(spec.root)
    except OSError:
        return True  # the store cannot be read now
    return any(record.is_alive for record in records if record.path.name == spec.driver)


def run_command(command: Sequence[str]) -> tuple[int, str, str]:
    """Run a Slurm command; return exit code, stdout and the words of stderr in one line.

    The code is 127 if there is no such command. The variables of `_WITHOUT_EFFECT` are left out.
    """
    environment = module_environment().items()
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            env={name: v for name, v in environment if not name.startswith(_WITHOUT_EFFECT)},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"Socket timed out: no answer within {_ANSWER_S:.0f} s"
    except OSError as error:
        return 127, "", f"{command[0]}: {error.strerror}"
    return completed.returncode, completed.stdout, " ".join(completed.stderr.split())


if __name__ == "__main__":
    main(*sys.argv[1:])
