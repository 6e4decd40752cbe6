"""The connection to a Ray cluster: which one, whether its head answers, and what is printed."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from featx.errors import ConfigError, RunError
from featx.pipeline.executors.ray_cluster import (
    HEAD_LOST_S,
    HeadWatch,
    check_cluster,
    connected,
)


class RayError(Exception):
    """Ray's."""


def made_ray(init: Callable[..., None] = lambda **options: None, **more: Any) -> Any:
    """Ray that connects by a function of the test."""
    return SimpleNamespace(
        init=init, is_initialized=lambda: False, shutdown=lambda: None,
        exceptions=SimpleNamespace(RayError=RayError), **more,
    )  # fmt: skip


def finding(answer: str | Exception) -> Any:
    """Ray whose `auto` is a cluster."""

    def found(address: str, folder: str | None) -> str:
        if isinstance(answer, Exception):
            raise answer
        return answer

    services = SimpleNamespace(get_ray_address_from_environment=found)
    return made_ray(_private=SimpleNamespace(services=services))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("featx.pipeline.executors.ray_cluster.time.monotonic", lambda: now[0])
    return now


def connected_to(address: str) -> Any:
    """Ray that is connected to a head."""
    return made_ray(get_runtime_context=lambda: SimpleNamespace(gcs_address=address))


def test_a_head_that_does_not_answer_for_long_ends_the_run(clock: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        watch = HeadWatch(connected_to(address), "auto")
        for clock[0] in (3.0, 100.0, 200.0):
            watch.check()
    for clock[0] in (203.0, 206.0, 200.0 + HEAD_LOST_S - 1):
        watch.check()
    clock[0] = 206.0 + HEAD_LOST_S
    with pytest.raises(RunError, match=rf"at {address} has not answered for 36 s .*refused.*Noth"):
        watch.check()


def test_a_head_that_answers_again_is_no_loss(clock: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
    watch = HeadWatch(made_ray(), f"ray://127.0.0.1:{port}")
    clock[0] = 20.0
    watch.check()
    with socket.create_server(("127.0.0.1", port)):
        clock[0] = 40.0
        watch.check()
    clock[0] = 60.0
    watch.check()
    unknown = HeadWatch(made_ray(), "auto")
    clock[0] = 1e9
    unknown.check()


def test_auto_without_a_cluster_is_told_at_once() -> None:
    """Ray would try for four minutes to reach a cluster that a file of /tmp/ray still names."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        there = f"127.0.0.1:{head.getsockname()[1]}"
        check_cluster(finding(there), "auto")
        check_cluster(finding(f"ray://{there}"), "auto")
    for ray in (finding(there), finding(ConnectionError("Could not find any running Ray"))):
        with pytest.raises(ConfigError, match=r"executor.address=auto: no Ray cluster answers the"):
            check_cluster(ray, "auto")
    check_cluster(made_ray(), "auto")  # a version of Ray that does not say what auto is


def test_a_cluster_that_wants_a_token_is_not_reported_as_absent() -> None:
    def init(**options: Any) -> None:
        try:
            raise RuntimeError("Last error: Traceback ...\nray.exceptions.AuthenticationError: RPC")
        except RuntimeError as error:
            raise ConnectionError("Failed to connect to Ray cluster") from error

    with (
        pytest.raises(ConfigError, match=r"wants a token. Set RAY_AUTH_MODE=token, and RAY_AUTH_T"),
        connected(made_ray(init), "10.0.0.1:6379"),
    ):
        pass
