"""Limits of the machine: CPUs and memory that this process may use."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from featx.base.allocator import return_freed_memory
from featx.base.text import size_text
from featx.errors import ConfigError

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
    return min(_limits_of_groups(root, "cpu", _quota), default=None)


def free_memory(root: Path = Path("/")) -> float | None:
    """Bytes that this process may still allocate, or None outside Linux.

    It is the available memory of the machine, limited by the control groups of this process.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    free_of_groups = _limits_of_groups(root, "memory", _free_bytes)
    return max(0.0, min([1024.0 * int(available.split()[1]), *free_of_groups]))


def resident_memory() -> int | None:
    """Bytes of resident memory of this process, or None without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_memory(num_bytes: int, what: str, remedy: str) -> None:
    """Raise a ConfigError that ends with `remedy` if arrays of at least `num_bytes`, which are
    `what`, do not fit into memory.
    """
    free = free_memory()
    if free is not None and num_bytes > free:
        return_freed_memory()  # malloc may keep what this process has freed
        free = free_memory()
    if free is not None and num_bytes > free:
        raise ConfigError(
            f"{what} take {size_text(num_bytes)} or more, and {size_text(free)} of memory are "
            f"free. {remedy}"
        )


def is_memory_exhausted(error: Exception) -> bool:
    """Return whether an error says that the machine, or a limit, gives this process no memory."""
    # The texts are those of the dynamic linker, and of torch.
    texts = "failed to map segment", "can't allocate memory"
    is_of_system = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return is_of_system or any(text in str(error) for text in texts)


def _limits_of_groups(
    root: Path, controller: str, read: Callable[[Path], float | None]
) -> list[float]:
    """Limits of a controller in all control groups of this process and those above them.

    A container may not see its own path. Folders that do not exist have no limit.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []  # not Linux
    limits: list[float | None] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 names no controllers, and has a single mount.
        for name in dict.fromkeys((controllers, controller) if controllers else ("",)):
            mount = root / "sys/fs/cgroup" / name
            group = mount / path.lstrip("/")
            folders = [each for each in (group, *group.parents) if each.is_relative_to(mount)]
            limits += map(read, folders)
    return [limit for limit in limits if limit is not None]


def _quota(group: Path) -> float | None:
    """CPUs of one control group, or None without a limit."""
    try:
        if (group / "cpu.max").exists():  # version 2
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return None if int(quota) < 0 else int(quota) / int(period)
    except (OSError, ValueError):  # "max" means no limit
        return None


def _free_bytes(group: Path) -> float | None:
    """Free bytes of one control group, or None without a limit.

    The kernel drops cached files if memory is needed, also active ones, which were read twice, so
    they count as free. Above `memory.high` it slows the processes down until they hardly run.
    """
    limits, used, prefix = ["memory.max", "memory.high"], "memory.current", ""
    if not (group / limits[0]).exists():  # version 1
        limits, used, prefix = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"
    try:
        texts = [path.read_text().strip() for name in limits if (path := group / name).exists()]
        used_bytes = int((group / used).read_text())
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = (int(counters.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        limit_bytes = min(int(text) for text in texts if text != "max")
        return float(limit_bytes - used_bytes + sum(cached))
    except (OSError, ValueError):  # "max" means no limit
        return None
