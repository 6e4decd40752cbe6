"""Processes that are no children of the test's own."""

from __future__ import annotations

import time
from pathlib import Path


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
