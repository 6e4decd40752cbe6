"""Freed memory is kept, in threads as well where nobody allocated in one before."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import threading
from featx.base.allocator import is_kept_in_threads, keep_freed_memory

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
        ("keep_freed_memory()", "True"),
        ("keep_freed_memory(); other(); other()", "True"),
        ("other(); keep_freed_memory()", "False"),
    ],
)
def test_threads_share_the_memory_of_the_first_one(steps: str, kept: str) -> None:
    script = SCRIPT.format(steps=steps)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (kept, "")
