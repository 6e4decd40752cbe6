"""Stores on a real S3 server: unusual names, versions of objects, limited rates, many objects."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from drivers import SYSTEM_TEST, assert_whole, running_driver
from faulty_proxy import Fault, error, faulty_proxy
from object_server import num_parts, place
from seaweed import SeaweedServer
from waiting import wait_until

from featx.storage import s3_client

pytestmark = SYSTEM_TEST

pytest_plugins = ["seaweed_fixtures"]

QUICK = ("device=cpu",)


def job(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that ends."""
    return subprocess.run(
        [sys.executable, "-m", "featx", *words], env={**os.environ, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("prefix", ["a b/run 1", "größe/日本語", "100%/a%20b+c&d=?#e"])
def test_a_prefix_may_contain_any_character(
    photos: Path, server: SeaweedServer, prefix: str
) -> None:
    out = f"s3://bucket/{prefix}"
    for said in ("Done: 21 rows", "nothing was left to do"):
        with running_driver(f"out='{out}'", *QUICK, pause_s=0) as driver:
            assert driver.finish() == 0, driver.output
        assert said in driver.output
    for name in ("status", "verify"):
        done = job(f"job={name}", f"store='{out}'")
        assert done.returncode == 0, done.stderr
    assert_whole(photos, out)


def test_a_bucket_that_keeps_versions(photos: Path, server: SeaweedServer) -> None:
    """Deleted names can be created again, also under the condition that they do not exist."""
    out = "s3://versions/run"
    s3_client.request("create_bucket", Bucket="versions")
    configuration = {"Status": "Enabled"}
    s3_client.request(
        "put_bucket_versioning", Bucket="versions", VersioningConfiguration=configuration
    )
    with running_driver(f"out={out}", "executor.workers=2", *QUICK, pause_s=1) as driver:
        wait_until(lambda: num_parts(out) > 1, driver.process)
        driver.process.kill()
    for more in ((), ("overwrite=true",)):
        with running_driver(f"out={out}", *QUICK, *more, pause_s=0) as driver:
            assert driver.finish() == 0, driver.output
        assert_whole(photos, out)
    part = place(out) / "parts" / "part-000001.h5"
    damaged = part.read_bytes()[:-500]
    s3_client.write(part.bucket, part.key, damaged)
    assert part.read_bytes() == damaged
    done = job("job=verify", f"store={out}", "verify.repair=true")
    assert "part-000001.h5" in done.stdout + done.stderr
    with running_driver(f"out={out}", *QUICK, pause_s=0) as driver:
        assert driver.finish() == 0, driver.output
    assert_whole(photos, out)


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (429, "TooManyRequests")])
def test_a_bucket_that_refuses_a_third_of_all_requests_for_now(
    photos: Path, server: SeaweedServer, status: int, code: str
) -> None:
    out, rng = "s3://bucket/run", random.Random(0)

    def choose(method: str, path: str) -> Fault | None:
        return error(status, code) if rng.random() < 0.3 else None

    with faulty_proxy(server.url, choose) as proxy:
        there = {"AWS_ENDPOINT_URL": proxy.url}
        more = ("executor.workers=2", *QUICK)
        with running_driver(f"out={out}", *more, pause_s=0, environment=there) as driver:
            assert driver.finish() == 0, driver.output
        assert "Traceback" not in driver.output
        done = job("job=verify", f"store={out}", **there)
        assert done.returncode == 0, done.stderr
    assert_whole(photos, out)


def test_more_objects_than_an_answer_lists(server: SeaweedServer) -> None:
    names = [f"run/parts/part-{i:06d}.h5" for i in range(2100)]
    with ThreadPoolExecutor(s3_client.CONNECTIONS) as pool:
        list(pool.map(lambda name: s3_client.write("bucket", name, b"x"), names))
    assert [name for name, _ in s3_client.list_objects("bucket", "run/")] == names
    assert num_parts("s3://bucket/run") == len(names)
