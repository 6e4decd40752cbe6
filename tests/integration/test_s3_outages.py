"""Stores on a real S3 server that is killed in mid run, comes back, or does not."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path

import pytest
from drivers import SYSTEM_TEST, Driver, assert_whole, running_driver
from seaweed import SeaweedServer
from slurm_cluster import running_cluster

pytestmark = SYSTEM_TEST

pytest_plugins = ["seaweed_fixtures"]

IMPATIENT = (
    "-c",
    "from featx import __main__; from featx.storage import s3_outage; s3_outage.MAX_OUTAGE_S = 15; "
    "__main__.main()",
)
"""featx's command that waits for 15 s only."""


OUT = "s3://bucket/run"


@pytest.mark.parametrize("more", [(), ("executor.workers=2", "device=cpu")])
def test_a_server_that_is_killed_and_started_is_waited_for(
    photos: Path, server: SeaweedServer, more: tuple[str, ...]
) -> None:
    with running_driver(f"out={OUT}", *more, pause_s=2) as driver:
        driver.wait_for_parts(1, OUT)
        server.kill()
        driver.wait_for("The run waits until the object store answers")
        time.sleep(10)
        server.start()
        assert driver.finish() == 0, driver.output
    assert len(driver.lines("The run waits until")) <= 3, driver.output
    assert driver.lines("the object store answers again after")
    assert_whole(photos)


def test_tasks_of_slurm_continue_when_the_server_is_killed_and_started(
    photos: Path, server: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_cluster(tmp_path / "slurm") as cluster:
        cluster.set_environment(monkeypatch)
        slurm = ("executor=slurm", "executor.cpus=1", "executor.workers=2", "executor.folder=jobs")
        with running_driver(f"out={OUT}", *slurm, pause_s=2) as driver:
            driver.wait_for_parts(1, OUT)
            before = cluster.tasks("RUNNING")
            server.kill()
            driver.wait_for("The run waits until the object store answers")
            time.sleep(10)
            assert cluster.tasks("RUNNING") == before, "a task was ended by the outage"
            server.start()
            assert driver.finish() == 0, driver.output
        assert len(driver.lines("submitted ")) == 1, driver.output
    assert_whole(photos)


def test_a_server_that_is_gone_for_good_ends_the_run_which_resumes_later(
    photos: Path, server: SeaweedServer
) -> None:
    with running_driver(f"out={OUT}", pause_s=2, program=IMPATIENT) as driver:
        driver.wait_for_parts(1, OUT)
        server.kill()
        assert driver.finish() == 1, driver.output
    said = driver.output.strip().splitlines()
    assert (
        "Nothing committed is lost. When the object store accepts the request, give the same"
        in said[-2]
    )
    assert said[-1].startswith("python -m featx ")
    assert "Traceback" not in driver.output
    server.start()
    again = Driver(shlex.split(said[-1])[3:], {})
    assert again.finish() == 0, again.output
    assert "rows are there already" in again.output
    assert_whole(photos)


@pytest.mark.parametrize("more", [(), ("executor.workers=2", "device=cpu")])
def test_a_server_that_hangs_does_not_hold_up_ctrl_c(
    photos: Path, server: SeaweedServer, more: tuple[str, ...]
) -> None:
    with running_driver(f"out={OUT}", *more, pause_s=1) as driver:
        driver.wait_for_parts(1, OUT)
        server.freeze()
        time.sleep(3)
        driver.process.send_signal(signal.SIGINT)
        assert driver.finish(60) == 130, driver.output
    assert "Traceback" not in driver.output


def test_a_server_that_is_not_there_at_the_start_is_told_at_once(
    photos: Path, server: SeaweedServer
) -> None:
    server.kill()
    with running_driver(f"out={OUT}", pause_s=0) as driver:
        began = time.monotonic()
        assert driver.finish() == 2
    assert time.monotonic() - began < 60
    assert "EndpointConnectionError" in driver.output
    assert "The run waits" not in driver.output
