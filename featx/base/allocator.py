"""Settings of the C library's allocator, which torch uses for every activation on a CPU."""

from __future__ import annotations

import ctypes
import os
import sys

from featx.base.process_owner import is_own_process


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks instead of returning them to the kernel after every layer.

    Above 32 MiB, the size of one activation of a batch, malloc maps and unmaps memory for each
    block, and the page faults halve the speed of a light model (docs/performance.md). In the arena
    of a thread this happens above 64 MiB with any setting, so threads that start later get no arena
    of their own. Other C libraries have no such settings and are left alone.

    Nothing is done in a process of a user: there is no way back, and whatever else the process
    allocates would stay resident after it was freed.
    """
    if not is_own_process() or not sys.platform.startswith("linux"):
        return
    # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX of malloc.h.
    mmap_threshold, trim_threshold, arena_max = -3, -1, -8
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(arena_max, 1)


def return_freed_memory() -> None:
    """Return freed blocks to the kernel once; takes milliseconds.

    For the moments at which memory is short, as `keep_freed_memory` keeps all below 1 GiB.
    """
    if sys.platform.startswith("linux"):
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)


def is_kept_in_threads() -> bool:
    """Return whether threads that start later also keep freed memory.

    They do if `keep_freed_memory` was called before any thread allocated: an existing arena is
    given to one of the next threads. Other C libraries are assumed to keep it.
    """
    if not sys.platform.startswith("linux"):
        return True
    if not is_own_process():
        return False
    libc = ctypes.CDLL(None)
    malloc_info = getattr(libc, "malloc_info", None)
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
