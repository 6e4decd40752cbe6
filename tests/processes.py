"""Commands started by a test, and processes that are no children of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from conftest import with_path


def ended(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process that may not be our child ends."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        except (FileNotFoundError, ProcessLookupError):
            return True
        # Whoever inherited it has not looked yet. While another thread lives, so do open files.
        if state == "Z" and threads <= 1:
            return True
        time.sleep(0.02)
    return False


def killed_at_sync(code: str, name: str) -> None:
    """Run code in a process that is ended by SIGKILL before it syncs a temporary file of a name.

    The file has all of its bytes then and not yet its final name.

    Args:
        code: of Python; tests/ and the folders that this process imports from are on its path.
        name: that the path of the temporary file contains.
    """
    patch = textwrap.dedent(
        f"""
        import os, signal
        sync = os.fsync
        def fsync(descriptor):
            path = os.readlink(f"/proc/self/fd/{{descriptor}}")
            if ".tmp-" in path and {name!r} in path:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(descriptor)
        os.fsync = fsync
        """
    )
    path = f"import sys\nsys.path[:0] = {sys.path!r}\n"
    with running([sys.executable, "-c", path + patch + textwrap.dedent(code)]) as process:
        _, printed = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, printed


@contextlib.contextmanager
def running(arguments: list[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    """A command that finds the modules of this folder; it is killed at the end of the block."""
    process = subprocess.Popen(
        arguments, env={**with_path(Path(__file__).parent), **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, float]:
    """Exit code, stderr, and how long it took from now on."""
    started_at = time.monotonic()
    _, printed = process.communicate(timeout=120)
    return process.returncode, printed, time.monotonic() - started_at
