"""`python -m featx` as a user starts it, with what it says as it goes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from conftest import with_path
from made_store import dataset_digests, temporary_files
from object_server import num_parts, place, rows_of, worker_pids
from tiny_model import COMMAND
from tiny_model import extract_six_parts as extract
from waiting import eventually

import featx
from featx.pipeline.executors.worker_pool import MAX_DEATHS
from featx.store import check_store

T = TypeVar("T")

TESTS = Path(__file__).resolve().parent.parent

SYSTEM_TEST = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("in_tmp_path", "one_thread"),
]
"""Value of `pytestmark` in a module that runs the command on a real cluster or object server."""


class Driver:
    """A command that runs.

    Args:
        arguments: of the command.
        environment: variables beside those of this process.
        program: what Python runs, featx's own command when not given.
        within: command that starts Python, such as nsenter with its options.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        program: Sequence[str] = ("-m", "featx"),
        within: Sequence[str] = (),
    ) -> None:
        self._log = Path(f"driver-{time.monotonic_ns()}.log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*within, sys.executable, *program, *arguments],
                env={**with_path(TESTS), "OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def output(self) -> str:
        """All that it printed so far."""
        return self._log.read_text(errors="replace")

    def lines(self, text: str) -> list[str]:
        """The lines with some text."""
        return [line for line in self.output.splitlines() if text in line]

    def wait_for(self, text: str, limit_s: float = 200) -> str:
        """Wait until it says something; the first line with it."""
        return self._wait_until(lambda: self.lines(text), limit_s)[0]

    def wait_for_parts(self, count: int, out: str = "store") -> None:
        """Wait until a store has so many parts."""
        self._wait_until(lambda: num_parts(out) >= count, 400)

    def finish(self, limit_s: float = 300) -> int:
        """Its exit code."""
        return self.process.wait(limit_s)

    def _wait_until(self, condition: Callable[[], T], limit_s: float) -> T:
        return eventually(condition, limit_s, self.process, lambda: self.output)


@contextlib.contextmanager
def running_driver(
    *overrides: str,
    data: Path | str = "photos",
    pause_s: float = 0.5,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "featx"),
    within: Sequence[str] = (),
) -> Iterator[Driver]:
    """A run of the tiny model, ended with the block.

    Args:
        overrides: of the command, beside tiny_model.COMMAND.
        data: a folder of images.
        pause_s: how long every forward pass takes, also those of the trial.
        environment: variables beside those of this process.
        program: what Python runs.
        within: command that starts Python.
    """
    arguments = [*COMMAND, "data=folder", f"data.root={data}", f"+model.args.pause_s={pause_s}"]
    driver = Driver([*arguments, *overrides], environment or {}, program, within)
    try:
        yield driver
    finally:
        if driver.process.poll() is None:
            driver.process.kill()
        driver.process.wait()


def kill_workers_at_a_part(kind: str) -> float:
    """Kill the only worker of a run three times in its first part; when the last was killed.

    Args:
        kind: what a worker is called: worker, actor or task.
    """
    root = Path("store")
    for number in range(MAX_DEATHS):
        deadline = time.monotonic() + 200
        while not (ready := [*root.glob(f"jobs/*/ready-{number}.json")]):
            assert time.monotonic() < deadline, [*root.rglob("*")]
            time.sleep(0.1)
        while not [*ready[0].parent.glob("claims/*")]:
            time.sleep(0.1)
        (pid,) = worker_pids("store", f"{kind} {number}")
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def extract_in_process(data: Path) -> dict[str, str]:
    """The datasets of a run in this process; a pause has no effect on them."""
    extract(data, out="reference")
    return dataset_digests(Path("reference/features.h5"))


def store_digests() -> dict[str, str]:
    """The datasets of the run of `running_driver`, which leaves no temporary file."""
    assert temporary_files(Path("store")) == []
    return dataset_digests(Path("store/features.h5"))


def assert_whole(photos: Path, out: str = "s3://bucket/run") -> None:
    """Every row in a bucket is that of a run to the disk."""
    assert rows_of(featx.open(out)) == rows_of(extract(photos, out="reference"))
    assert check_store(place(out)).complete


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on.

    They are below those that Linux gives to clients, so a server that is killed finds its port
    free when it is started again.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(range(15000, 32000), 1000):
            if len(found) == count:
                return found
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
    raise AssertionError(f"{len(found)} of {count} ports are free")
