"""Decoded chunks and the threads that decode them, shared by all datasets of a process."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from featx.base import num_cpus

T = TypeVar("T")

CACHE_BYTES = 64 << 20
"""Size of the decoded chunks that a process keeps, over all datasets."""


class DecodePool:
    """Threads that decode chunks, and the last chunks that they decoded, of one process.

    Use `decode_pool()` to get it. Chunks have the key of their dataset, an object that only one
    dataset uses; unlike an id, it is never reused.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self._chunks: OrderedDict[tuple[object, int], npt.NDArray[np.uint8]] = OrderedDict()
        self._bytes = 0
        self._num_threads = num_cpus()
        self._pool = ThreadPoolExecutor(self._num_threads, "featx-decode")

    def get(self, dataset_key: object, number: int) -> npt.NDArray[np.uint8] | None:
        with self.lock:
            rows = self._chunks.get((dataset_key, number))
            if rows is not None:
                self._chunks.move_to_end((dataset_key, number))
            return rows

    def put(self, dataset_key: object, number: int, chunk: npt.NDArray[np.uint8]) -> None:
        """Add a chunk; the least recently used chunks are dropped to make room."""
        with self.lock:
            if (dataset_key, number) in self._chunks or len(chunk) > CACHE_BYTES:
                return
            self._chunks[dataset_key, number] = chunk
            self._bytes += len(chunk)
            while self._bytes > CACHE_BYTES:
                self._bytes -= len(self._chunks.popitem(last=False)[1])

    def drop(self, dataset_key: object) -> None:
        with self.lock:
            for key in [key for key in self._chunks if key[0] is dataset_key]:
                self._bytes -= len(self._chunks.pop(key))

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
