"""The connection to a Ray cluster: which one, whether its head answers, and what is printed."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stub_worker import StubTask, stub_spec
from test_ray import MadeRay

from featx.config import Config
from featx.errors import ConfigError, RunError
from featx.pipeline.executors import ray as module
from featx.pipeline.executors.ray import HEAD_LOST_S, ActorPool, RayOptions, connect
from featx.storage import AtomicFolder
from featx.types import Part


def made_ray(**more: Any) -> Any:
    """Ray without processes, with some functions of the test."""
    made = MadeRay()
    vars(made).update(more)
    return made


def check_auto(monkeypatch: pytest.MonkeyPatch, answer: str | Exception | None) -> None:
    """Check the address `auto` with a Ray that says which cluster that is, if it does."""

    def found(address: str, folder: str | None) -> str | None:
        if isinstance(answer, Exception):
            raise answer
        return answer

    services = SimpleNamespace(get_ray_address_from_environment=found)
    private = {} if answer is None else {"_private": SimpleNamespace(services=services)}
    monkeypatch.setitem(sys.modules, "ray", made_ray(is_connected=False, **private))
    module.check(RayOptions(address="auto"), Config())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def pool_on(root: Path, address: str, **more: Any) -> ActorPool:
    """A pool of actors without actors, on a cluster."""
    task: Any = StubTask(SimpleNamespace(), root, root)  # type: ignore[arg-type]
    spec = stub_spec(root, [Part(0, 0, 4)], Config(), task)
    session: Any = SimpleNamespace(root=root, disk=AtomicFolder(root), num_committed=0)
    return ActorPool(made_ray(**more), spec, session, "cpu", RayOptions(address=address))


def test_a_head_that_does_not_answer_for_long_ends_the_run(
    clock: list[float], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        context = SimpleNamespace(gcs_address=address)
        pool = pool_on(tmp_path, "auto", get_runtime_context=lambda: context)
        for clock[0] in (3.0, 100.0, 200.0):
            pool.ended()
    for clock[0] in (203.0, 206.0, 200.0 + HEAD_LOST_S - 1):
        pool.ended()
    clock[0] = 206.0 + HEAD_LOST_S
    with pytest.raises(RunError, match=rf"at {address} has not answered for 36 s .*refused.*Noth"):
        pool.ended()


def test_a_head_that_answers_again_is_no_loss(clock: list[float], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
    pool = pool_on(tmp_path, f"ray://127.0.0.1:{port}")
    clock[0] = 20.0
    pool.ended()
    with socket.create_server(("127.0.0.1", port)):
        clock[0] = 40.0
        pool.ended()
    clock[0] = 60.0
    pool.ended()
    unknown = pool_on(tmp_path, "auto")
    clock[0] = 1e9
    unknown.ended()


def test_the_loss_of_the_node_of_the_driver_ends_the_run(tmp_path: Path) -> None:
    """Ray starts no actor in place of those that died with it, and the run would wait for ever."""
    context = SimpleNamespace(gcs_address="", get_node_id=lambda: "lost")
    pool = pool_on(tmp_path, "auto", get_runtime_context=lambda: context)
    pool.start([0])
    with pytest.raises(RunError, match=r"the raylet, .* has ended.*Nothing committed"):
        pool.ended()


def test_auto_without_a_cluster_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would try for four minutes to reach a cluster that a file of /tmp/ray still names."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        there = f"127.0.0.1:{head.getsockname()[1]}"
        check_auto(monkeypatch, there)
        check_auto(monkeypatch, f"ray://{there}")
    for answer in (there, ConnectionError("Could not find any running Ray")):
        with pytest.raises(ConfigError, match=r"executor.address=auto: no Ray cluster answers the"):
            check_auto(monkeypatch, answer)
    check_auto(monkeypatch, None)  # a version of Ray that does not say what auto is


def test_a_cluster_that_wants_a_token_is_not_reported_as_absent() -> None:
    def init(**options: Any) -> None:
        try:
            raise RuntimeError("Last error: Traceback ...\nray.exceptions.AuthenticationError: RPC")
        except RuntimeError as error:
            raise ConnectionError("Failed to connect to Ray cluster") from error

    with pytest.raises(ConfigError, match=r"or it wants a token .* RAY_AUTH_MODE=token and RAY_A"):
        connect(made_ray(init=init), "10.0.0.1:6379")
