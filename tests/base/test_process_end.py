"""The end of the command: threads at work do not abort it, and a lost result is no success."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_python

AT_WORK = """
import threading, time
import torch
from featx.base import end_process

a = torch.rand(600, 600)
for _ in range(2):
    threading.Thread(target=lambda: [a @ a for _ in range(200)], daemon=True).start()
time.sleep(0.2)
print("left")
end_process(3)
"""


@pytest.mark.slow
def test_threads_at_work_do_not_abort_the_end_of_the_process() -> None:
    """A daemon thread inside torch, when the interpreter ends, is 'terminate called', SIGABRT."""
    done = run_python("-c", AT_WORK, code=3, timeout=120)
    assert (done.stdout, done.stderr) == ("left\n", "")


def test_a_result_that_cannot_be_written_is_no_success() -> None:
    text = "from featx.base import end_process; print('x'); end_process(0)"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", text],
            env=buffered, stdout=full, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert b"cannot be written: No space left" in done.stderr
