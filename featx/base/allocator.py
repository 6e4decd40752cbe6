"""Settings of the C library's allocator, which torch uses for every activation on a CPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Any

from featx.base.process import ProcessSetting, is_own_process

# M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX of malloc.h.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8

_KEPT = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1}
"""Parameter of mallopt -> value with which glibc keeps freed blocks below 1 GiB."""

_USUAL = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
"""Parameter of mallopt -> value that glibc itself comes to in a process that frees large blocks."""


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
