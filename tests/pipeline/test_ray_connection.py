"""The connection to a Ray cluster: which one, whether its head answers, and what is printed."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from featx.errors import ConfigError, RunError
from featx.pipeline.executors.ray_cluster import (
    HEAD_LOST_S,
    HeadWatch,
    address_in_use,
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


def test_a_head_that_does_not_answer_for_long_ends_the_run() -> None:
    now = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        watch = HeadWatch(address, lambda: now[0])
        for now[0] in (3.0, 100.0, 200.0):
            watch.check()
    for now[0] in (203.0, 206.0, 200.0 + HEAD_LOST_S - 1):
        watch.check()
    now[0] = 206.0 + HEAD_LOST_S
    with pytest.raises(RunError, match=rf"at {address} has not answered for 36 s .*refused.*Noth"):
        watch.check()


def test_a_head_that_answers_again_is_no_loss() -> None:
    now = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
    watch = HeadWatch(f"127.0.0.1:{port}", lambda: now[0])
    now[0] = 20.0
    watch.check()
    with socket.create_server(("127.0.0.1", port)):
        now[0] = 40.0
        watch.check()
    now[0] = 60.0
    watch.check()
    HeadWatch("", lambda: 1e9).check()


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


def test_the_address_that_is_watched() -> None:
    ray = made_ray(get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"))
    assert address_in_use(ray, "auto") == address_in_use(ray, None) == "10.0.0.1:6379"
    assert address_in_use(ray, "ray://head:10001") == "head:10001"
    assert address_in_use(made_ray(), "auto") == ""


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


def test_log_lines_of_ray_stay_out_of_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    def init(**options: Any) -> None:
        os.write(2, b"[2026-11-23 18:24:41,310 W 27141 27141] gcs_client.cc:210: Failed to get\n")
        os.write(2, b"[2026-11-23 18:24:42,310 C 27141 27141] core.cc:1: Check failed\nelse\n")

    with connected(made_ray(init), None):
        os.write(2, b"later\n")
    assert capfd.readouterr().err == (
        "[2026-11-23 18:24:42,310 C 27141 27141] core.cc:1: Check failed\nelse\nlater\n"
    )


def test_notices_of_the_cluster_are_no_part_of_the_result(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Ray prints that a node has died on stdout, where the JSON of a job goes."""
    worker = pytest.importorskip("ray._private.worker", reason="no ray: featx[ray] has it")
    notice = {"lines": ["The node with node id: 1 has died."], "pid": "raylet", "is_err": False}
    printed = worker.print_to_stdstream
    ray = made_ray(_private=SimpleNamespace(worker=worker))
    with connected(ray, None), caplog.at_level(logging.DEBUG):
        worker.print_to_stdstream(notice, ignore_prefix=False)
    assert capfd.readouterr() == ("", "")
    assert caplog.messages == ["Ray: The node with node id: 1 has died."]
    assert worker.print_to_stdstream is printed
    with connected(made_ray(), None):
        pass  # a version of Ray without that function
