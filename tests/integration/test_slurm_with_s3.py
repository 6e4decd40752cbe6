"""executor=slurm on a real Slurm with a store on a real S3 server: what ends drivers and tasks."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from conftest import with_path
from drivers import SYSTEM_TEST, TESTS, assert_whole, running_driver
from faulty_proxy import error, faulty_proxy
from object_server import num_parts, place
from seaweed import SeaweedServer
from slurm_cluster import SLURM, SlurmCluster
from waiting import eventually, wait_until

from featx.store import read_heartbeats

pytestmark = SYSTEM_TEST

pytest_plugins = ["seaweed_fixtures", "slurm_fixtures"]

OUT = "s3://bucket/run"
GIVEN = (f"out={OUT}", *SLURM, "executor.workers=3", "executor.folder=jobs")

CLOCK = """
import os, time
if os.environ.get("SLURMD_NODENAME") == "n2":
    real, off_s = time.time, float(os.environ["CLOCK_IS_OFF_BY"])
    time.time = lambda: real() + off_s
"""
"""sitecustomize of a node whose clock is wrong."""

DATE = """#!/bin/sh
[ "$SLURMD_NODENAME" = n2 ] || exec /bin/date "$@"
exec /bin/date -d "@$(($(/bin/date +%s) + CLOCK_IS_OFF_BY))" "$@"
"""
"""The command `date` of such a node."""


def wait_for_silence(cluster: SlurmCluster) -> None:
    """Wait until no process writes the store and no task waits, as a user does with job=status."""

    def is_silent() -> bool:
        is_written = any(record.is_alive for record in read_heartbeats(place(OUT)))
        return not is_written and not cluster.tasks()

    eventually(is_silent, 200, output=lambda: "a task does not end")


def test_drivers_that_are_killed_at_any_time(
    photos: Path, server: SeaweedServer, cluster: SlurmCluster
) -> None:
    rng = random.Random(os.getpid())
    for number in range(4):
        with running_driver(*GIVEN, pause_s=2) as driver:
            deadline = time.monotonic() + rng.uniform(3, 40)
            while driver.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            code = driver.process.poll()
        # It was killed, is done, or was refused because tasks of the one before are alive.
        assert code in (None, 0, 2), driver.output
        assert code != 2 or "continues without its driver" in driver.output
        if number % 2:
            wait_for_silence(cluster)
    wait_for_silence(cluster)
    with running_driver(*GIVEN, pause_s=0) as driver:
        assert driver.finish() == 0, driver.output
    assert_whole(photos)


def test_keys_that_expire_end_the_driver_and_its_tasks(
    photos: Path, server: SeaweedServer, cluster: SlurmCluster
) -> None:
    with faulty_proxy(server.url) as proxy:
        there = {"AWS_ENDPOINT_URL": proxy.url}
        with running_driver(*GIVEN, pause_s=3, environment=there) as driver:
            wait_until(lambda: num_parts(OUT) > 0, driver.process)
            proxy.set_faults(lambda method, path: error(400, "ExpiredToken"))
            assert driver.finish(60) == 1, driver.output
        assert "ExpiredToken" in driver.output
        assert "Nothing committed is lost" in driver.output
        eventually(lambda: not cluster.tasks(), 60, output=lambda: "a task has no keys and lives")
    wait_for_silence(cluster)
    with running_driver(*GIVEN, pause_s=0) as driver:
        assert driver.finish() == 0, driver.output
    assert "rows are there already" in driver.output
    assert_whole(photos)


@pytest.mark.parametrize("off_by_s", [3600, -3600])
def test_a_node_whose_clock_is_wrong(
    tmp_path: Path, photos: Path, server: SeaweedServer, cluster: SlurmCluster, off_by_s: int
) -> None:
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK)
    (tmp_path / "clock" / "date").write_text(DATE)
    (tmp_path / "clock" / "date").chmod(0o755)
    there = {**with_path(tmp_path / "clock", TESTS), "CLOCK_IS_OFF_BY": str(off_by_s)}
    there["PATH"] = f"{tmp_path / 'clock'}{os.pathsep}{there['PATH']}"
    more = ("executor.workers=4", "executor.time_limit_min=4")
    with running_driver(*GIVEN, *more, pause_s=2, environment=there) as driver:
        assert driver.finish() == 0, driver.output
    assert not driver.lines("submitted again"), driver.output
    assert_whole(photos)
