"""Decoded chunks and the threads that decode them, shared by all datasets of a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from featx.base import LruCache, num_cpus

T = TypeVar("T")

CACHE_BYTES = 64 << 20
"""Size of the decoded chunks that a process keeps, over all datasets."""


class DecodePool:
    """Threads that decode chunks, and the last chunks that they decoded, of one process.

    Use `decode_pool()` to get it. The key of a chunk is its number and the key of its dataset, an
    object that only one dataset uses; unlike an id, it is never reused.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.chunks = LruCache[tuple[object, int], npt.NDArray[np.uint8]](CACHE_BYTES, len)
        self._num_threads = num_cpus()
        self._pool = ThreadPoolExecutor(self._num_threads, "featx-decode")

    def for_each(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """Call work(item) for all items in threads; raise the first error after all ended."""
        if len(items) <= 1 or self._num_threads == 1:
            for item in items:
                work(item)
            return
        share = -(-len(items) // (4 * self._num_threads))
        shares = [items[i : i + share] for i in range(0, len(items), share)]

        def work_on(share: Sequence[T]) -> None:
            for item in share:
                work(item)

        futures = [self._pool.submit(work_on, share) for share in shares]
        wait(futures)
        for future in futures:
            future.result()


_shared: DecodePool | None = None


def decode_pool() -> DecodePool:
    """Thread pool and cache of this process, created again after a fork.

    Threads do not survive a fork, and locks may be held by threads that are gone.
    """
    global _shared
    if _shared is None or _shared.pid != os.getpid():
        _shared = DecodePool()
    return _shared
