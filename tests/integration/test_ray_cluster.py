"""executor=ray on a real cluster of `ray start`: whatever happens, the same rows."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from drivers import (
    SYSTEM_TEST,
    Driver,
    extract_in_process,
    kill_workers_at_a_part,
    running_driver,
    store_digests,
)
from ray_cluster import RayCluster, running_ray
from tiny_model import write_images

pytestmark = SYSTEM_TEST

RAY = ("executor=ray", "executor.address=auto")


@pytest.fixture
def ray() -> Iterator[RayCluster]:
    with running_ray() as cluster:
        yield cluster


def run(ray: RayCluster, pause_s: float, *more: str) -> AbstractContextManager[Driver]:
    """A run on the nodes of a cluster."""
    return running_driver(
        *RAY, *more, pause_s=pause_s, environment=ray.environment, within=ray.within
    )


def test_a_node_that_is_killed_in_mid_part_costs_no_row(photos: Path, ray: RayCluster) -> None:
    with run(ray, 3) as driver:
        driver.wait_for_parts(2)
        ray.kill("n2")
        line = driver.wait_for("another one takes its place", 60)
        assert re.search(r"actor \d died \(.*\) (in part \d+ \(rows|between two parts)", line)
        assert driver.finish() == 0, driver.output
    assert "Traceback" not in driver.output
    assert store_digests() == extract_in_process(photos)


def test_a_part_that_kills_its_actors_is_named_within_a_minute(
    photos: Path, ray: RayCluster
) -> None:
    with run(ray, 6, "conformance.mode=off", "executor.workers=1") as driver:
        killed_at = kill_workers_at_a_part("actor")
        assert driver.finish(90) == 1, driver.output
        assert time.monotonic() - killed_at < 60
    assert "in part 0 (rows 0 to 3), the 3rd actor that did." in driver.output.splitlines()[-1]
    with run(ray, 0) as second:
        assert second.finish() == 0, second.output
    assert store_digests() == extract_in_process(photos)


def test_a_driver_that_is_killed_is_started_again(photos: Path, ray: RayCluster) -> None:
    with run(ray, 2) as driver:
        driver.wait_for_parts(1)
        driver.process.kill()
    with run(ray, 2) as second:
        assert second.finish() == 0, second.output
    assert "rows are there already" in second.output
    assert store_digests() == extract_in_process(photos)


def test_the_loss_of_the_head_ends_the_run_within_a_minute_and_a_new_one_resumes_it(
    tmp_path: Path, ray: RayCluster
) -> None:
    photos = write_images(tmp_path / "photos", 101)
    with run(ray, 8, "conformance.mode=off") as driver:
        driver.wait_for_parts(1)
        ray.kill("head")
        began = time.monotonic()
        assert driver.finish(90) == 1, driver.output
        assert time.monotonic() - began < 60
    assert "Traceback" not in driver.output
    [line] = driver.lines("the head of the Ray cluster at 127.0.0.1:6400 has not answered for")
    assert "Nothing committed is lost; start the cluster again and run the same command" in line
    with run(ray, 0) as refused:
        assert refused.finish(60) == 2, refused.output
    assert "executor.address=auto: no Ray cluster answers there" in refused.output
    for name in ("n1", "n2"):
        ray.kill(name)
    ray.start_head()
    ray.start_node("n1")
    with run(ray, 0) as second:
        assert second.finish() == 0, second.output
    assert "rows are there already" in second.output
    assert store_digests() == extract_in_process(photos)


def test_a_wrong_token_is_one_line(photos: Path, ray: RayCluster) -> None:
    wrong = {**ray.environment, "RAY_AUTH_TOKEN": "0" * 64}
    with running_driver(*RAY, pause_s=0, environment=wrong, within=ray.within) as driver:
        assert driver.finish(120) == 2, driver.output
    assert (
        "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH" in driver.output.strip().splitlines()[-1]
    )
    assert "Traceback" not in driver.output
