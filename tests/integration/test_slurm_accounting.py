"""executor=slurm on a real Slurm with its accounting database, which soon forgets its tasks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers import SYSTEM_TEST, extract_in_process, running_driver, store_digests
from slurm_accounting import running_accounting
from slurm_cluster import SLURM, SlurmCluster, processes_of_tasks, running_cluster

pytestmark = SYSTEM_TEST

pytest_plugins = ["slurm_fixtures"]


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster with accounting, in place of the one without."""
    with running_cluster(tmp_path_factory.mktemp("slurm"), running_accounting) as cluster:
        yield cluster


def states(cluster: SlurmCluster) -> str:
    """All tasks that the database knows, with their states."""
    return cluster.ask("sacct", "--noheader", "--allocations", "--allusers", "--format=State%20")


def test_the_rows_are_those_of_a_local_run(photos: Path, cluster: SlurmCluster) -> None:
    with running_driver(*SLURM, "executor.workers=3") as driver:
        assert driver.finish() == 0, driver.output
    assert store_digests() == extract_in_process(photos)
    assert "COMPLETED" in states(cluster)


def test_a_task_that_was_cancelled_while_it_waited_is_submitted_again(
    photos: Path, cluster: SlurmCluster
) -> None:
    with running_driver(*SLURM, "executor.workers=3", "executor.cpus=2", pause_s=12) as driver:
        driver.wait_for("submitted 3 tasks")
        driver.wait_for("wait in the queue", 90)
        cluster.ask("scancel", cluster.tasks("PENDING")[0])
        line = driver.wait_for("submitted again", 120)
        # By whether squeue still lists the task at that look.
        assert "was lost (CANCELLED)" in line or "was lost (no longer known to Slurm)" in line
        assert driver.finish() == 0, driver.output
    assert store_digests() == extract_in_process(photos)
    assert "CANCELLED" in states(cluster)


def test_a_task_that_hangs_until_slurm_ends_it_at_its_limit_is_submitted_again(
    photos: Path, cluster: SlurmCluster
) -> None:
    limit = ("executor.workers=1", "executor.time_limit_min=1")
    with running_driver(*SLURM, *limit, pause_s=2) as driver:
        driver.wait_for_parts(1)
        for pid in processes_of_tasks(Path("store")):
            os.kill(pid, signal.SIGSTOP)  # it does not end before its limit by itself
        line = driver.wait_for("submitted again", 400)
        # Slurm continues a stopped task with SIGTERM, and kills it if it does not end then.
        assert "reached its time limit" in line or "was lost (TIMEOUT" in line
        assert driver.finish() == 0, driver.output
    assert store_digests() == extract_in_process(photos)
    assert "TIMEOUT" in states(cluster)
