"""Stores on real S3 servers that refuse, spoil answers, or ignore conditions; two drivers."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest
from drivers import SYSTEM_TEST, Driver, assert_whole, running_driver
from faulty_proxy import FAULTS, error, faulty_proxy, random_faults
from object_server import environment, num_parts, place, rows_of, worker_pids
from s3rver import CREDENTIALS, running_s3rver
from seaweed import READER, SeaweedServer
from tiny_model import extract_six_parts as extract
from waiting import wait_until

import featx
from featx.storage import s3_client

pytestmark = SYSTEM_TEST

pytest_plugins = ["seaweed_fixtures"]

OUT = "s3://bucket/run"


def is_whole(photos: Path) -> None:
    """Every row is that of a run to the disk, and nothing was damaged on the way."""
    assert_whole(photos)
    assert not list(place(OUT).glob("damaged.json"))


def last_line(driver: Driver) -> str:
    """The last line of a command that failed without a traceback."""
    assert "Traceback" not in driver.output
    return driver.output.strip().splitlines()[-1]


@pytest.mark.parametrize("more", [(), ("executor.workers=2",)])
def test_spoilt_answers_of_every_kind_change_no_row(
    photos: Path, server: SeaweedServer, more: tuple[str, ...]
) -> None:
    with faulty_proxy(server.url, random_faults(list(FAULTS.values()), 0.2)) as proxy:
        there = {"AWS_ENDPOINT_URL": proxy.url}
        with running_driver(f"out={OUT}", *more, pause_s=0, environment=there) as driver:
            assert driver.finish() == 0, driver.output
        assert "Traceback" not in driver.output
        assert len(proxy.seen) > 50
    is_whole(photos)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "InvalidAccessKeyId"),
        (READER, "AccessDenied"),
    ],
)
def test_credentials_that_may_not_write_are_told_before_the_run(
    photos: Path, server: SeaweedServer, given: dict[str, str], text: str
) -> None:
    with running_driver(f"out={OUT}", pause_s=0, environment=given) as driver:
        assert driver.finish() == 2, driver.output
    assert "the server refuses it" in last_line(driver)
    assert OUT in last_line(driver)
    assert text in last_line(driver) or "(403: Forbidden)" in last_line(driver)
    assert not list(place(OUT).objects())


def test_a_key_that_may_only_read_opens_a_store(
    photos: Path, server: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = extract(photos, out="reference")
    extract(photos, out=OUT)
    for name, value in READER.items():
        monkeypatch.setenv(name, value)
    s3_client.client.cache_clear()
    assert rows_of(featx.open(OUT)) == rows_of(near)


def test_a_bucket_that_is_not_there_is_one_line(photos: Path, server: SeaweedServer) -> None:
    with running_driver("out=s3://no-such-bucket/run", pause_s=0) as driver:
        assert driver.finish() == 2, driver.output
    assert "s3://no-such-bucket/run" in last_line(driver)
    assert "there is no such bucket" in last_line(driver)


def test_keys_that_are_withdrawn_in_mid_run_end_it_and_new_ones_resume_it(
    photos: Path, server: SeaweedServer
) -> None:
    with faulty_proxy(server.url) as proxy:
        there = {"AWS_ENDPOINT_URL": proxy.url}
        with running_driver(f"out={OUT}", pause_s=1, environment=there) as driver:
            wait_until(lambda: num_parts(OUT) > 1, driver.process)
            proxy.set_faults(lambda method, path: error(400, "ExpiredToken"))
            assert driver.finish(60) == 1, driver.output
    assert "Traceback" not in driver.output
    *_, message, command = driver.output.strip().splitlines()
    assert "ExpiredToken" in message
    assert "Nothing committed is lost" in message
    again = Driver(shlex.split(command)[3:], {})
    assert again.finish() == 0, again.output
    is_whole(photos)


def test_two_drivers_with_workers_that_are_killed_give_the_same_rows(
    photos: Path, server: SeaweedServer
) -> None:
    asked = (f"out={OUT}", "executor.workers=2", "device=cpu")
    with (
        running_driver(*asked, pause_s=1.5) as first,
        running_driver(*asked, pause_s=1.5) as second,
    ):
        wait_until(lambda: num_parts(OUT) and len(worker_pids(OUT, "worker")) > 1, first.process)
        os.kill(worker_pids(OUT, "worker")[0], signal.SIGKILL)
        assert first.finish() == 0, first.output
        assert second.finish() == 0, second.output
    assert "was killed by SIGKILL" in first.output + second.output
    is_whole(photos)


def test_a_server_that_ignores_conditions_is_refused_and_nothing_is_left_there(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_s3rver(tmp_path / "s3rver") as url:
        for name, value in {**environment(url), **CREDENTIALS}.items():
            monkeypatch.setenv(name, value)
        s3_client.client.cache_clear()
        for more in ((), ("executor.workers=2",), ("overwrite=true",)):
            with running_driver(f"out={OUT}", *more, pause_s=0) as driver:
                assert driver.finish() == 2, driver.output
            assert "ignores IfNoneMatch of a PUT request" in last_line(driver)
            assert "Nothing was written" in last_line(driver)
        assert not list(place("s3://bucket/run").objects())
    s3_client.client.cache_clear()
