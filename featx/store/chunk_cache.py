"""What all datasets of one process share: the threads that decode chunks, and decoded chunks."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

CACHE_BYTES = 64 << 20
"""Decoded chunks that one process keeps, of all its datasets together."""


class DecodedChunks:
    """Decoded chunks by their dataset's token; the least recently used go first.

    A token is an object of its own: its identity is never another dataset's, not even later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[object, int], npt.NDArray[np.uint8]] = OrderedDict()
        self._bytes = 0

    def get(self, token: object, number: int) -> npt.NDArray[np.uint8] | None:
        """Chunk `number` of a dataset, if it is here."""
        with self._lock:
            found = self._chunks.get((token, number))
            if found is not None:
                self._chunks.move_to_end((token, number))
            return found

    def put(self, token: object, number: int, chunk: npt.NDArray[np.uint8]) -> None:
        """Keep a chunk, and let others go for it."""
        with self._lock:
            if (token, number) in self._chunks or len(chunk) > CACHE_BYTES:
                return
            self._chunks[token, number] = chunk
            self._bytes += len(chunk)
            while self._bytes > CACHE_BYTES:
                self._bytes -= len(self._chunks.popitem(last=False)[1])

    def drop(self, token: object) -> None:
        """Forget all chunks of a dataset."""
        with self._lock:
            for key in [key for key in self._chunks if key[0] is token]:
                self._bytes -= len(self._chunks.pop(key))


class Process:
    """The threads and the decoded chunks; `process()` gives the one there is."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.cache = DecodedChunks()
        self._threads = _num_cpus()
        self._pool = ThreadPoolExecutor(self._threads, "featx-decode")

    def each(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """work(item) for all items, in the threads; the first error is raised when all ended."""
        if len(items) == 1 or self._threads == 1:
            for item in items:
                work(item)
            return
        share = -(-len(items) // (4 * self._threads))
        shares = [items[i : i + share] for i in range(0, len(items), share)]

        def work_on(share: Sequence[T]) -> None:
            for item in share:
                work(item)

        futures = [self._pool.submit(work_on, share) for share in shares]
        wait(futures)
        for future in futures:
            future.result()


_shared: Process | None = None


def process() -> Process:
    """This process's own: threads and locks do not survive a fork."""
    global _shared
    if _shared is None or _shared.pid != os.getpid():
        _shared = Process()
    return _shared


def _num_cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
