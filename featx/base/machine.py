"""Limits of the machine: CPUs and memory that this process may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_cpu_limit: int | None = None
"""Number of CPUs given to `take_cpus`; None if this process shares them with no other."""


def num_cpus() -> int:
    """Number of CPUs that this process may use, from its affinity, its quota and `take_cpus`."""
    has_affinity = hasattr(os, "sched_getaffinity")
    allowed = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    limits = (allowed, cpu_quota(), _cpu_limit)
    return max(1, min(int(limit) for limit in limits if limit is not None))


def take_cpus(count: int | None) -> None:
    """Limit this process to `count` CPUs, because other processes of the run use the others.

    None removes the limit.
    """
    global _cpu_limit
    _cpu_limit = count


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Number of CPUs that the quota of the control groups allows, or None without a quota.

    A container with 2 of 64 CPUs sees 64, and is throttled if it uses more than 2. The quota of a
    group limits all groups below it.
    """
    return min(_limits_of_groups(root, "cpu", _quota_v2, _quota_v1), default=None)


def free_memory(root: Path = Path("/")) -> float | None:
    """Bytes that this process may still allocate, or None outside Linux.

    It is the available memory of the machine, limited by the control groups of this process.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    free_of_groups = _limits_of_groups(
        root,
        "memory",
        lambda group: _free_bytes(group, "memory.max", "memory.current", "inactive_file"),
        lambda group: _free_bytes(
            group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        ),
    )
    return max(0.0, min([1024.0 * int(available.split()[1]), *free_of_groups]))


def resident_memory() -> int | None:
    """Bytes of resident memory of this process, or None without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _limits_of_groups(
    root: Path,
    controller: str,
    read_v2: Callable[[Path], float | None],
    read_v1: Callable[[Path], float | None],
) -> list[float]:
    """Limits of a controller in all control groups of this process and those above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []  # not Linux
    mounts = root / "sys/fs/cgroup"
    limits: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            limits += _limits(mounts, path, read_v2)
        elif controller in controllers.split(","):
            for name in dict.fromkeys((controllers, controller)):
                limits += _limits(mounts / name, path, read_v1)
    return limits


def _limits(mount: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """Limits of a group and of those above it, up to the mount.

    A container may not see its own path. Folders that do not exist have no limit.
    """
    group = mount / path.lstrip("/")
    limits = [read(folder) for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return [limit for limit in limits if limit is not None]


def _quota_v2(group: Path) -> float | None:
    """CPUs of one group in control groups version 2, or None."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(group: Path) -> float | None:
    """CPUs of one group in control groups version 1, or None."""
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return None if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def _free_bytes(group: Path, limit: str, used: str, dropped: str) -> float | None:
    """Free bytes of one group, or None without a limit.

    The kernel drops cached files if memory is needed, so they count as free.
    """
    try:
        limit_bytes = int((group / limit).read_text())
        used_bytes = int((group / used).read_text())
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return float(limit_bytes - used_bytes + int(counters.get(dropped, 0)))
    except (OSError, ValueError):  # "max" means no limit
        return None
