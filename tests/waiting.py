"""Waiting for what another process does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    limit_s: float,
    process: subprocess.Popen[bytes] | subprocess.Popen[str] | None = None,
    output: Callable[[], object] = lambda: "it never happens",
) -> T:
    """The value of a condition when it is true.

    Args:
        process: must not end before.
        output: what a failure shows.
    """
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert process is None or process.poll() is None, output()
        assert time.monotonic() < deadline, output()
        time.sleep(0.1)
    return value


def wait_until(condition: Callable[[], T], process: subprocess.Popen[Any]) -> T:
    """The value of a condition when it is true, or when the process has ended."""
    deadline = time.monotonic() + 300
    asked_at = time.monotonic()
    while not (value := condition()) and process.poll() is None:
        now = time.monotonic()
        assert now < deadline, "it never happens"
        time.sleep(max(0.005, now - asked_at))  # asking an object store takes time from the process
        asked_at = time.monotonic()
    return value
