"""What the C library does with freed memory; on a CPU torch asks it for every activation."""

from __future__ import annotations

import ctypes
import os
import sys


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks instead of giving them back to the kernel after every layer.

    Above 32 MiB, the size of one activation of a batch, malloc maps and unmaps memory each time,
    and the page faults cost half the speed of a light model (docs/performance.md). In an arena of
    a thread's own it does so above 64 MiB whatever is asked of it, so threads that come later get
    none. Other C libraries have no such call, and are left alone.
    """
    if not sys.platform.startswith("linux"):
        return
    mmap_threshold, trim_threshold, arena_max = -3, -1, -8  # M_... of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(arena_max, 1)


def is_kept_in_threads() -> bool:
    """Whether freed memory is kept in threads that are yet to come as it is in the first one.

    That is so where `keep_freed_memory` came before any thread allocated: an arena that is there
    goes to one of the next threads. Of C libraries other than glibc nothing is known, and it is
    taken for granted.
    """
    if not sys.platform.startswith("linux"):
        return True
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
            return file.read().count(b"<heap nr=") == 1
    finally:
        libc.fclose(stream)
