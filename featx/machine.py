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
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None  # no Linux
    mounts = root / "sys/fs/cgroup"
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            quotas += _quotas(mounts, path, _quota_v2)
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                quotas += _quotas(mounts / name, path, _quota_v1)
    return min(quotas, default=None)


def _quotas(mount: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """Of a group and of those above it; a container may not see its own path, but its mount."""
    group = mount / path.lstrip("/")
    found = [read(folder) for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return [quota for quota in found if quota is not None]


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
