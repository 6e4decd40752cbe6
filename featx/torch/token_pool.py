"""Tokens of an epoch that are read and not yet in a batch, in a memory of fixed size."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from featx.store import TokenReader
from featx.torch.keyed_delay import EpochOrder
from featx.torch.token_selection import Ints, TokenSelection

Bytes = npt.NDArray[np.uint8]

_MIN_READS = 4
_MIN_READ_BYTES, _MAX_READ_BYTES = 512 << 10, 1 << 20
"""Least number of reads that a segment is divided into, and the limits on the bytes of a read."""


class TokenPool:
    """Tokens that are read and not yet in a batch, for one pass over the output segments.

    At most `num_slots` tokens are held. Reading ahead, in the threads, ends at `num_ahead` tokens
    of later segments.
    """

    def __init__(
        self,
        reader: TokenReader,
        selection: TokenSelection,
        order: EpochOrder,
        num_slots: int,
        num_ahead: int,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._reader = reader
        self._selection = selection
        self._order = order
        self._threads = threads
        self._num_ahead = num_ahead
        self._tokens = np.empty((num_slots, reader.token_bytes), np.uint8)
        self._free = np.arange(num_slots)
        self._num_free = num_slots
        self._waiting: dict[int, list[tuple[Ints, Ints]]] = {}
        self._reading: deque[tuple[int, int, list[Future[None]]]] = deque()
        self._next: tuple[int, Ints, Ints] | None = None

    def outputs(self, first: int) -> Iterator[tuple[Ints, Ints]]:
        """Yield the output segments from `first` on, each as tokens and their slots.

        The next segment is read meanwhile. The caller gives the slots back by `release`.
        """
        last = self._order.num_segments - 1
        # Segments below 0 are those at the end of the ring, whose delay passes its start.
        begin = first - self._order.delay + 1
        self._next = self._plan(begin, first, last)
        for number in range(begin, last + 1):
            self._read_ahead(number, first, last)
            self._finish(number)
            if number < first:
                continue
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
        pending = [future for _, _, futures in self._reading for future in futures]
        for future in pending:
            future.cancel()
        for future in pending:
            if not future.cancelled():
                future.exception()

    def _read_ahead(self, number: int, first: int, last: int) -> None:
        """Begin to read the segments up to the one behind `number`, and more if slots are free."""
        num_ahead = sum(count for other, count, _ in self._reading if other > number)
        while self._next is not None:
            now, tokens, delay = self._next
            is_needed = now <= number + 1
            if not is_needed and (num_ahead >= self._num_ahead or len(tokens) > self._num_free):
                return
            self._begin(now, tokens, delay)
            if now > number:
                num_ahead += len(tokens)
            self._next = self._plan(now + 1, first, last) if now < last else None

    def _plan(self, number: int, first: int, last: int) -> tuple[int, Ints, Ints]:
        """Tokens of a segment that leave in the output segments `first` to `last`, and delays."""
        tokens, delay = self._order.segment(number % self._order.num_segments)
        if first <= number <= last - self._order.delay + 1:
            return number, tokens, delay
        wanted = (number + delay >= first) & (number + delay <= last)
        return number, tokens[wanted], delay[wanted]

    def _begin(self, number: int, tokens: Ints, delay: Ints) -> None:
        if (missing := len(tokens) - self._num_free) > 0:
            self._grow(missing)
        self._num_free -= len(tokens)
        slots = self._free[self._num_free : self._num_free + len(tokens)].copy()
        # A stable sort of small integers takes linear time.
        order = np.argsort(delay.astype(np.uint8), kind="stable")
        delays, by_output, slots_by_output = delay[order], tokens[order], slots[order]
        edges = [0, *(np.flatnonzero(np.diff(delays)) + 1).tolist(), len(order)]
        for low, high in itertools.pairwise(edges):
            if high > low:
                # Copies: a view would keep the arrays of the segment until its last token leaves.
                part = by_output[low:high].copy(), slots_by_output[low:high].copy()
                self._waiting.setdefault(number + int(delays[low]), []).append(part)
        rows, positions = self._selection.locate(tokens)
        width = self._reader.token_bytes
        size = max(_MIN_READ_BYTES, min(_MAX_READ_BYTES, len(rows) * width // _MIN_READS))
        tasks = self._reader.read_tasks(rows, positions, self._tokens, slots, size)
        self._reading.append((number, len(tokens), [self._threads.submit(task) for task in tasks]))

    def _finish(self, number: int) -> None:
        """Wait until the segments up to one are read; raises the error of the first that failed."""
        while self._reading and self._reading[0][0] <= number:
            for future in self._reading[0][2]:
                future.result()
            self._reading.popleft()

    def _grow(self, more: int) -> None:
        """Add slots, which a run of chance may need once in 10^15 segments."""
        for _, _, futures in self._reading:
            for future in futures:  # they write to the array that is replaced
                future.result()
        before = len(self._tokens)
        added = np.empty((more, self._tokens.shape[1]), np.uint8)
        self._tokens = np.concatenate([self._tokens, added])
        self._free = np.concatenate([self._free, np.empty(more, np.int64)])
        self.release(np.arange(before, before + more))
