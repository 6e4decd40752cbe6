"""What this process may use of the machine it runs on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_taken: int | None = None
"""What `take_cpus` was given; None where this process shares with no other."""


def num_cpus() -> int:
    """CPUs this process may use: those it may run on, as far as their quota and its share go."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cpu_quota()
    limits = [allowed, *([] if quota is None else [int(quota)])]
    return max(1, min(limits) if _taken is None else min(*limits, _taken))


def take_cpus(count: int) -> None:
    """Use so many CPUs at the most from now on: the others are for other processes of the run."""
    global _taken
    _taken = count


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the control groups of this process give it; None where all of it.

    A container with 2 of 64 cores sees 64 of them, and is held back when it uses more than 2. The
    limit of a group holds for all groups below it.

    Args:
        root: of the file system; another one in tests.
    """
    return min(_of_groups(root, "cpu", _quota_v2, _quota_v1), default=None)


def free_memory(root: Path = Path("/")) -> float | None:
    """Bytes that this process may still take; None off Linux, where it is not known.

    What the machine has available, as far as the limits of the control groups of this process go.

    Args:
        root: of the file system; another one in tests.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    rooms = _of_groups(root, "memory", _room_v2, _room_v1)
    return max(0.0, min([1024.0 * int(available.split()[1]), *rooms]))


def resident_memory() -> int | None:
    """Bytes that this process has in memory now; None where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _of_groups(
    root: Path,
    controller: str,
    read_v2: Callable[[Path], float | None],
    read_v1: Callable[[Path], float | None],
) -> list[float]:
    """What the control groups of this process say of a controller, those above them as well."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []  # no Linux
    mounts = root / "sys/fs/cgroup"
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            found += _limits(mounts, path, read_v2)
        elif controller in controllers.split(","):
            for name in dict.fromkeys((controllers, controller)):
                found += _limits(mounts / name, path, read_v1)
    return found


def _limits(mount: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """Of a group and of those above it; a container may not see its own path, but its mount."""
    group = mount / path.lstrip("/")
    found = [read(folder) for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return [limit for limit in found if limit is not None]


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return None if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def _room_v2(group: Path) -> float | None:
    return _room(group, "memory.max", "memory.current", "inactive_file")


def _room_v1(group: Path) -> float | None:
    return _room(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _room(group: Path, limit: str, used: str, dropped: str) -> float | None:
    """Of the memory of a group; files that are cached give way where it is asked for."""
    try:
        most = int((group / limit).read_text())
        taken = int((group / used).read_text())
        told = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return float(most - taken + int(told.get(dropped, 0)))
    except (OSError, ValueError):  # "max" is no number: there is no limit
        return None
