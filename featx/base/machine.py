"""CPUs and memory that this process may use, threads of BLAS, and what its allocator does with
freed memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from featx.base.process import ProcessSetting, is_own_process
from featx.base.text import size_text
from featx.errors import ConfigError

# M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX of malloc.h.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8

_KEPT = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1}
"""Parameter of mallopt -> value with which glibc keeps freed blocks below 1 GiB."""

_USUAL = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
"""Parameter of mallopt -> value that glibc itself comes to in a process that frees large blocks."""

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


# The threads of BLAS, which numpy and scipy call: their number is one of the whole process.

_blas_lock = threading.Lock()


@functools.cache
def _blas_controller() -> Any:
    """BLAS libraries of this process: to find them takes longer than a small fit."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Give BLAS a single thread inside the block; scipy, which has its own, is imported before.

    One block runs at a time: of two that overlap, the last to end would restore the single thread
    of the other one, and keep the process at it.
    """
    with _blas_lock, _blas_controller().limit(limits=1):
        yield


# The C library's allocator, which torch uses for every activation on a CPU.


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks instead of returning them to the kernel after every layer.

    Above 32 MiB, the size of one activation of a batch, malloc maps and unmaps memory for each
    block, and the page faults halve the speed of a light model (docs/performance.md). In the arena
    of a thread this happens above 64 MiB with any setting, so threads that start later get no arena
    of their own. Other C libraries have no such settings and are left alone.

    Nothing is done in a process of a user, where whatever else it allocates would stay resident
    after it was freed: see `kept_freed_memory`.
    """
    if is_own_process():
        _configure({**_KEPT, _ARENA_MAX: 1})


def return_freed_memory() -> None:
    """Return freed blocks to the kernel once; takes milliseconds.

    For the moments at which memory is short, as `keep_freed_memory` keeps all below 1 GiB.
    """
    malloc_trim = _glibc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _keep(is_kept: bool) -> None:
    """Keep freed memory, or, in a process of a user, return it to the kernel again."""
    if is_own_process():
        keep_freed_memory()
        return
    _configure(_KEPT if is_kept else _USUAL)
    if not is_kept:
        return_freed_memory()


kept_freed_memory = ProcessSetting(lambda: False, _keep, True)
"""Context in which freed memory is kept. In a process of a user it is returned at the end. The
limit of arenas, which glibc fixes for good, is left alone there."""


def _configure(parameters: Mapping[int, int]) -> None:
    mallopt = _glibc_function("mallopt")
    if mallopt is not None:
        for parameter, value in parameters.items():
            mallopt(parameter, value)


def _glibc_function(name: str) -> Any:
    """Function of the C library; None outside Linux, and in a library that lacks it."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def is_kept_in_threads() -> bool:
    """Return whether threads that start later also keep freed memory.

    They do if `keep_freed_memory` was called before any thread allocated: an existing arena is
    given to one of the next threads. Other C libraries are assumed to keep it.
    """
    if not sys.platform.startswith("linux"):
        return True
    if not is_own_process():
        return False
    malloc_info, libc = _glibc_function("malloc_info"), ctypes.CDLL(None)
    if malloc_info is None:
        return True
    descriptor = os.memfd_create("malloc_info")
    libc.fdopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fdopen(descriptor, b"w+"))
    try:
        malloc_info(0, stream)
        libc.fflush(stream)
        os.lseek(descriptor, 0, os.SEEK_SET)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            # malloc_info lists one heap per arena; one means that only the main arena exists.
            return file.read().count(b"<heap nr=") == 1
    finally:
        libc.fclose(stream)
