"""Memory of processes, read from /proc, and limits of it by cgroups: Linux only."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
"""Seconds between two readings of the memory of a command."""


@dataclass(frozen=True)
class MeasuredCommand:
    """What a command needed.

    Attributes:
        code: exit code.
        output: stdout and stderr as text.
        seconds: wall-clock seconds.
        resident_mib: largest resident memory of one of its processes.
        private_mib: what no other process shares of that, at the same time.
    """

    code: int
    output: str
    seconds: float
    resident_mib: float
    private_mib: float


def read_mib(field: str, process: int | str = "self", file: str = "status") -> float:
    """Read a field of a process in MiB.

    Args:
        field: name of a field in kB, such as 'VmHWM' or 'RssAnon'.
        process: process id, or 'self'.
        file: file of /proc/PROCESS.
    """
    return _mib_in(Path(f"/proc/{process}/{file}").read_text(), field)


def _mib_in(text: str, field: str) -> float:
    """Value of a field in MiB; 0 if the process has ended and has no memory any more."""
    match = re.search(rf"^{field}:\s+(\d+)", text, re.M)
    return int(match[1]) / 1024 if match else 0.0


def reset_peak() -> None:
    """Let the kernel count the peak of this process from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Largest resident memory of this process since its start or the last reset, in MiB."""
    return read_mib("VmHWM")


def run_measured(command: Sequence[str], cwd: Path, cgroup: Path | None = None) -> MeasuredCommand:
    """Run a command, and read the memory of it and of its children until it ends.

    Args:
        command: program and arguments.
        cwd: folder to run in; the output is kept in a file there.
        cgroup: memory cgroup of the command; None for that of this process.
    """
    if cgroup is not None:
        # The shell enters the cgroup before the program starts, so all of its memory counts.
        enter = 'echo $$ > "$0" && exec "$@"'
        command = ["sh", "-c", enter, str(cgroup / "cgroup.procs"), *command]
    resident, private = 0.0, 0.0
    log = cwd / "command.log"
    started_at = time.perf_counter()
    with log.open("wb") as stream, subprocess.Popen(
        command, cwd=cwd, stdout=stream, stderr=stream
    ) as process:  # fmt: skip
        try:
            while process.poll() is None:
                resident, private = max((resident, private), _largest_process(process.pid))
                time.sleep(POLL_S)
        except BaseException:
            process.terminate()
            raise
    seconds = time.perf_counter() - started_at
    output = log.read_text(errors="replace")
    return MeasuredCommand(process.returncode, output, seconds, resident, private)


def _largest_process(root: int) -> tuple[float, float]:
    """Resident and private MiB of the largest of a process and its descendants."""
    largest, left = (0.0, 0.0), [root]
    while left:
        folder = Path(f"/proc/{left.pop()}")
        # A process may end at any time, and with it these files.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            text = (folder / "status").read_text()
            largest = max(largest, (_mib_in(text, "VmRSS"), _mib_in(text, "RssAnon")))
            for task in (folder / "task").iterdir():
                left += map(int, (task / "children").read_text().split())
    return largest


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """Make a memory cgroup, version 1 or 2, and remove it with its processes at the end.

    Args:
        limit: bytes of memory that its processes may take, without swap.

    Yields:
        Folder of the cgroup.

    Raises:
        SystemExit: this machine does not let this process make one.
    """
    root = Path("/sys/fs/cgroup")
    limits = {"memory.max": limit, "memory.swap.max": 0}
    if (root / "memory").is_dir():
        root /= "memory"
        # The limit of memory and swap must not be below that of memory, so it comes second.
        limits = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
    folder = root / f"featx-benchmark-{os.getpid()}"
    try:
        folder.mkdir()
        try:
            (required, _) = limits
            for name, value in limits.items():
                if name == required or (folder / name).exists():  # without swap, no file for it
                    (folder / name).write_text(str(value))
        except OSError:
            folder.rmdir()
            raise
    except OSError as error:
        raise SystemExit(
            f"no memory cgroup in {root} ({error}); expected root on a machine with a writable "
            "/sys/fs/cgroup/memory (version 1), or /sys/fs/cgroup with `memory` in its "
            "cgroup.subtree_control (version 2); leave --limit out to measure without one"
        ) from None
    try:
        yield folder
    finally:
        _remove_cgroup(folder)


def _remove_cgroup(folder: Path) -> None:
    """Kill the processes of a cgroup and remove it; the kernel refuses this while it has any."""
    for _ in range(500):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.02)
    raise RuntimeError(f"{folder} still has processes")
