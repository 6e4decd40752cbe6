"""executor=slurm on a real Slurm: what happens to tasks, nodes and drivers, and the same rows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from drivers import (
    SYSTEM_TEST,
    extract_in_process,
    kill_workers_at_a_part,
    running_driver,
    store_digests,
)
from slurm_cluster import SLURM, SlurmCluster, processes_of_tasks
from waiting import eventually

pytestmark = SYSTEM_TEST

pytest_plugins = ["slurm_fixtures"]


def status() -> dict[str, Any]:
    """What job=status prints as JSON."""
    command = [sys.executable, "-m", "featx", "job=status", "store=store", "job.json=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_task_that_is_requeued_goes_on(photos: Path, cluster: SlurmCluster) -> None:
    with running_driver(*SLURM, "executor.workers=2", pause_s=2) as driver:
        driver.wait_for_parts(1)
        cluster.ask("scontrol", "requeue", cluster.tasks("RUNNING")[-1])
        assert driver.finish() == 0, driver.output
    assert store_digests() == extract_in_process(photos)


def test_tasks_that_are_preempted_go_on(photos: Path, cluster: SlurmCluster) -> None:
    with running_driver(*SLURM, "executor.workers=4", pause_s=8) as driver:
        driver.wait_for_parts(1)
        # It needs both nodes, so that tasks of the run have to leave them.
        cluster.ask(
            "sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null",
            "--wrap=sleep 5",
        )  # fmt: skip
        assert driver.finish() == 0, driver.output
    assert driver.lines("submitted again"), driver.output
    assert store_digests() == extract_in_process(photos)


def test_a_part_that_kills_its_tasks_is_named_within_a_minute(
    photos: Path, cluster: SlurmCluster
) -> None:
    given = (*SLURM, "executor.workers=1", "conformance.mode=off")
    with running_driver(*given, pause_s=6) as driver:
        killed_at = kill_workers_at_a_part("task")
        assert driver.finish(90) == 1, driver.output
        assert time.monotonic() - killed_at < 60
    last = driver.output.splitlines()[-1]
    assert re.search(r"was lost \(FAILED.* in part 0 \(rows 0 to 3\), the 3rd task that did", last)
    with running_driver(*SLURM, "executor.workers=2", pause_s=0) as second:
        assert second.finish() == 0, second.output
    assert store_digests() == extract_in_process(photos)


def test_a_node_that_goes_down_costs_no_row(photos: Path, cluster: SlurmCluster) -> None:
    with running_driver(*SLURM, "executor.workers=4", pause_s=2) as driver:
        driver.wait_for_parts(1)
        cluster.ask("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        try:
            assert driver.finish() == 0, driver.output
        finally:
            # Refused if the node has returned to service by itself.
            with contextlib.suppress(subprocess.CalledProcessError):
                cluster.ask("scontrol", "update", "nodename=n2", "state=resume")
    assert store_digests() == extract_in_process(photos)


def test_a_driver_that_is_killed_is_started_again(photos: Path, cluster: SlurmCluster) -> None:
    with running_driver(*SLURM, "executor.workers=2", pause_s=2) as driver:
        driver.wait_for_parts(1)
        driver.process.kill()
    # The tasks continue without their driver, and nobody else may write meanwhile.
    with running_driver(*SLURM, "executor.workers=2") as second:
        assert second.finish() in (0, 2), second.output
        refused = second.process.returncode == 2
    if refused:
        assert "continues without its driver" in second.output
    eventually(lambda: not processes_of_tasks(Path("store")), 200)
    with running_driver(*SLURM, "executor.workers=2") as third:
        assert third.finish() == 0, third.output
    assert store_digests() == extract_in_process(photos)


def test_a_second_driver_is_refused_while_the_first_is_at_work(
    photos: Path, cluster: SlurmCluster
) -> None:
    with running_driver(*SLURM, "executor.workers=1", pause_s=8) as first:
        first.wait_for_parts(1)
        with running_driver(*SLURM, "executor.workers=1") as second:
            assert second.finish() == 2, second.output
        assert "is being written by" in second.output
        assert "Traceback" not in second.output
        assert first.finish() == 0, first.output
    assert store_digests() == extract_in_process(photos)


def test_tasks_that_are_held_are_reported_until_they_are_released(
    photos: Path, cluster: SlurmCluster
) -> None:
    held = "executor.sbatch={hold: true}"
    with running_driver(*SLURM, "executor.workers=1", held) as driver:
        driver.wait_for("submitted 1 task")
        (task,) = cluster.tasks()
        line = driver.wait_for("wait in the queue", 120)
        assert "JobHeld" in line
        queue = eventually(lambda: next((each["queue"] for each in status()["workers"]), []), 30)
        assert queue[0]["state"] == "PENDING"
        assert "JobHeld" in queue[0]["reason"]
        cluster.ask("scontrol", "release", task.partition("_")[0])
        assert driver.finish() == 0, driver.output
    assert store_digests() == extract_in_process(photos)


def test_a_driver_and_its_tasks_that_all_die_leave_a_store_that_resumes(
    photos: Path, cluster: SlurmCluster
) -> None:
    with running_driver(*SLURM, "executor.workers=2", pause_s=2) as driver:
        driver.wait_for_parts(2)
        driver.process.kill()
        for task in cluster.tasks():
            cluster.ask("scancel", "--signal=KILL", "--full", task)
        for pid in processes_of_tasks(Path("store")):
            os.kill(pid, signal.SIGKILL)
    cluster.clear()
    time.sleep(46)  # until the heartbeats of the tasks are silent
    with running_driver(*SLURM, "executor.workers=2") as second:
        assert second.finish() == 0, second.output
    assert store_digests() == extract_in_process(photos)
