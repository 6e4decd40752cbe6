"""Tokens of an epoch on their way from the files to batches, in a memory of fixed size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from featx.store import TokenReader
from featx.torch.keyed_delay import EpochOrder
from featx.torch.token_selection import Ints, TokenSelection

Bytes = npt.NDArray[np.uint8]

_JOBS = 8
_LEAST_JOB_BYTES, _JOB_BYTES = 256 << 10, 1 << 20
"""Reads that a segment is divided into at least, and the bytes of a read that limit that."""


class TokenPool:
    """Tokens that are read and not yet in a batch, for one pass over the output segments.

    Args:
        reader: reads the tokens.
        selection: tokens of the epoch.
        order: order of the epoch.
        num_slots: number of tokens that are held at most.
        threads: reads tokens while batches are used.
    """

    def __init__(
        self,
        reader: TokenReader,
        selection: TokenSelection,
        order: EpochOrder,
        num_slots: int,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._reader = reader
        self._selection = selection
        self._order = order
        self._threads = threads
        self._tokens = np.empty((num_slots, reader.token_bytes), np.uint8)
        self._free = np.arange(num_slots)
        self._num_free = num_slots
        self._waiting: dict[int, list[tuple[Ints, Ints]]] = {}
        self._reading: deque[tuple[int, list[Future[None]]]] = deque()

    def outputs(self, first: int) -> Iterator[tuple[Ints, Ints]]:
        """Yield the output segments from `first` on, each as tokens and their slots.

        The next segment is read meanwhile. The caller gives the slots back by `release`.

        Args:
            first: number of the first output segment.
        """
        last = self._order.num_segments - 1
        # Segments below 0 are those at the end of the ring, whose delay passes its start.
        for number in range(first - self._order.delay + 1, first + 1):
            self._begin(number, first, last)
            self._finish(number - 1)
        for number in range(first, last + 1):
            # The next segment is started before this one is complete: reading never pauses.
            if number < last:
                self._begin(number + 1, first, last)
            self._finish(number)
            parts = self._waiting.pop(number, [])
            tokens = np.concatenate([part for part, _ in parts] or [np.zeros(0, np.int64)])
            slots = np.concatenate([part for _, part in parts] or [np.zeros(0, np.int64)])
            permuted = self._order.permutation(number, len(tokens))
            yield tokens[permuted], slots[permuted]

    def copy(self, slots: Ints) -> Bytes:
        """Tokens in some slots, (n, token bytes)."""
        width = self._reader.token_bytes
        out = np.empty((len(slots), width), np.uint8)
        items, target = (array.reshape(-1).view(f"V{width}") for array in (self._tokens, out))
        # mode="clip" writes into `out` without a buffer; all slots are valid.
        np.take(items, slots, out=target, mode="clip")
        return out

    def release(self, slots: Ints) -> None:
        """Make slots available to other tokens."""
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def close(self) -> None:
        """Wait until no thread writes to the pool any more."""
        for _, jobs in self._reading:
            for job in jobs:
                job.cancel()
            for job in jobs:
                if not job.cancelled():
                    job.exception()

    def _begin(self, number: int, first: int, last: int) -> None:
        """Read the tokens of a segment that leave in the output segments `first` to `last`."""
        tokens, delay = self._order.segment(number % self._order.num_segments)
        output = number + delay
        wanted = (output >= first) & (output <= last)
        tokens, output = tokens[wanted], output[wanted]
        slots = self._allocate(len(tokens))
        # A stable sort of small integers takes linear time.
        order = np.argsort((output - number).astype(np.uint8), kind="stable")
        leaving = output[order]
        for at in np.split(order, np.flatnonzero(leaving[1:] != leaving[:-1]) + 1):
            if len(at):
                self._waiting.setdefault(int(output[at[0]]), []).append((tokens[at], slots[at]))
        rows, positions = self._selection.locate(tokens)
        width = self._reader.token_bytes
        size = max(_LEAST_JOB_BYTES, min(_JOB_BYTES, len(rows) * width // _JOBS))
        jobs = self._reader.jobs(rows, positions, self._tokens, slots, size)
        self._reading.append((number, [self._threads.submit(job) for job in jobs]))

    def _finish(self, number: int) -> None:
        """Wait until the segments up to one are read; raises the error of the first that failed."""
        while self._reading and self._reading[0][0] <= number:
            for job in self._reading[0][1]:
                job.result()
            self._reading.popleft()

    def _allocate(self, count: int) -> Ints:
        """Take free slots."""
        if count > self._num_free:
            self._grow(count - self._num_free)
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def _grow(self, more: int) -> None:
        """Add slots, which a run of chance may need once in 10^15 segments."""
        for _, jobs in self._reading:
            for job in jobs:  # they write to the array that is replaced
                job.result()
        before = len(self._tokens)
        self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens[:more])])
        self._free = np.concatenate([self._free, np.empty(more, np.int64)])
        self.release(np.arange(before, before + more))
