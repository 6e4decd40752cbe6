"""Memory of processes, read from /proc: Linux only."""

from __future__ import annotations

import re
from pathlib import Path


def read_mib(field: str, process: int | str = "self", file: str = "status") -> float:
    """Read a field of a process in MiB.

    Args:
        field: name of a field in kB, such as 'VmHWM' or 'RssAnon'.
        process: process id, or 'self'.
        file: file of /proc/PROCESS.
    """
    match = re.search(rf"^{field}:\s+(\d+)", Path(f"/proc/{process}/{file}").read_text(), re.M)
    assert match is not None
    return int(match[1]) / 1024


def reset_peak() -> None:
    """Let the kernel count the peak of this process from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Largest resident memory of this process since its start or the last reset, in MiB."""
    return read_mib("VmHWM")
