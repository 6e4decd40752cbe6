"""Reading of the ends of very many files in threads, such as the chunk tables of all parts."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

MANY_FILES = 1000
"""Number of files of a store from which on their chunk tables are read in place of HDF5."""

_TAIL_BYTES = 64 << 10
"""Bytes at the end of a file, in which the chunk table of most parts lies."""

_NUM_THREADS, _GROUP_FILES = 4, 256
"""Threads, whose reads wait for a disk together, and files that a thread reads in one call."""

_MAX_CPU_SHARE = 0.8
"""Share of the time of a group below which its reads wait for the disk. From the page cache it is 1
on a machine with nothing else running; from a disk 0.7, as the kernel also works for such reads."""

_NUM_THREADED_GROUPS = 128
"""Groups that threads read before it is measured again whether reads wait for the disk."""


class TailFile:
    """File whose end is read as it is opened; a small part is read completely.

    So four system calls read the chunk table of a part: open, fstat, pread and close.
    """

    def __init__(self, path: str | Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(self._descriptor).st_size
            self._start = max(0, self.size - _TAIL_BYTES)
            self._tail = os.pread(self._descriptor, _TAIL_BYTES, self._start)
        except BaseException:
            self.close()
            raise

    def pread(self, size: int, address: int) -> bytes:
        if address < self._start:
            return os.pread(self._descriptor, size, address)
        first = address - self._start
        return self._tail[first : first + size]

    def close(self) -> None:
        os.close(self._descriptor)


def map_in_threads(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield work(item) for each of very many items, in order.

    Threads are used while reads wait for the disk. From the page cache a single thread is twice as
    fast, because the others pass the interpreter's lock at every system call.
    """

    def work_on(group: Sequence[T]) -> list[R]:
        return [work(item) for item in group]

    groups = (items[i : i + _GROUP_FILES] for i in range(0, len(items), _GROUP_FILES))
    threads = ThreadPoolExecutor(_NUM_THREADS, "featx-files")
    try:
        for group in groups:
            started_at, used_before_s = time.perf_counter(), time.thread_time()
            results = work_on(group)
            elapsed_s, used_s = time.perf_counter() - started_at, time.thread_time() - used_before_s
            yield from results
            if used_s < _MAX_CPU_SHARE * elapsed_s:
                for results in threads.map(work_on, itertools.islice(groups, _NUM_THREADED_GROUPS)):
                    yield from results
    finally:
        threads.shutdown(cancel_futures=True)
