"""Freed memory is kept, in threads as well where nobody allocated in one before."""

from __future__ import annotations

import sys

import pytest
from conftest import run_python

SCRIPT = """
import threading
from featx.base import is_kept_in_threads, keep_freed_memory, own_process

def other():
    thread = threading.Thread(target=lambda: [bytes(99) for _ in range(9)])
    thread.start()
    thread.join()

{steps}
print(is_kept_in_threads())
"""

glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is of Linux")


@glibc
@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ("own_process(); keep_freed_memory()", "True"),
        ("own_process(); other(); keep_freed_memory()", "False"),
        ("keep_freed_memory()", "False"),
    ],
)
def test_threads_share_the_memory_of_the_first_one(steps: str, kept: str) -> None:
    done = run_python("-c", SCRIPT.format(steps=steps))
    assert (done.stdout.strip(), done.stderr) == (kept, "")


RESIDENT = """
import numpy as np
from featx.base import keep_freed_memory, kept_freed_memory, own_process

def mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

def use():
    # The last array lies behind those that are freed.
    arrays = [np.ones({size} << 20, np.uint8) for _ in range(10)]
    behind = np.ones({size} << 20, np.uint8)
    del arrays
    return mib() - before

before = mib()
{steps}
print(use())
"""


@pytest.mark.slow
@glibc
@pytest.mark.parametrize(
    ("steps", "is_kept"),
    [
        ("keep_freed_memory()", False),
        ("own_process(); keep_freed_memory()", True),
        ("kept_freed_memory.__enter__()", True),
        ("with kept_freed_memory: use()", False),
        ("own_process()\nwith kept_freed_memory: use()", True),
    ],
)
def test_a_process_of_a_user_returns_its_memory(steps: str, is_kept: bool) -> None:
    """Of blocks above 32 MiB, below which glibc itself may keep them after torch was used."""
    done = run_python("-c", RESIDENT.format(steps=steps, size=40))
    assert done.stderr == ""
    assert (int(done.stdout) > 200) == is_kept
