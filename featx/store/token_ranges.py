"""Ranges of files that hold pieces of rows, found for many pieces at once and read by jobs.

numpy takes microseconds for each call on a short array, so that the ranges of thousands of pieces
are found together, and a job that reads some of them makes few calls.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.store.chunk_places import ChunkPlaces
from featx.store.row_gather import gather_into
from featx.store.token_files import TokenFiles

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_GAP_BYTES = 64 << 10
"""Largest gap between two pieces that are read as one range: as long to read as a call takes."""

SPAN_BYTES = 4 << 20
"""Bytes of a range, beyond which it is cut, and of the ranges that are read into one buffer."""

_FEW = 16
"""Pieces of a range on average, below which all ranges of a group are written by one call."""


@dataclass(frozen=True)
class TokenRanges:
    """Ranges of files that hold pieces of rows in ascending order; see `find_ranges`.

    Attributes:
        at: (n,) address of each piece in its file.
        width: bytes of a piece.
        chunk: (n,) chunk of each piece.
        is_due: (n,) bool, whether its chunk is to be compared with its checksum.
        first: (m,) first piece of each range.
        last: (m,) piece after the last one of each range.
        is_dense: (m,) bool, whether the pieces of a range follow one another without gaps.
        number: (m,) number of the file of each range.
        low: (m,) address of the first byte of each range.
        size: (m,) bytes of each range.
    """

    at: Rows
    width: int
    chunk: Rows
    is_due: npt.NDArray[np.bool_]
    first: Rows
    last: Rows
    is_dense: npt.NDArray[np.bool_]
    number: Rows
    low: Rows
    size: Rows

    def groups(self, num_bytes: int) -> list[slice]:
        """Divide the ranges into groups of one file each, of about `num_bytes`."""
        group = np.cumsum(self.size) // num_bytes
        is_new = (group[1:] != group[:-1]) | (self.number[1:] != self.number[:-1])
        edges = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(group)]
        return [slice(low, high) for low, high in itertools.pairwise(edges)]

    def pieces(self, some: slice) -> slice:
        """Pieces of a group of ranges."""
        return slice(int(self.first[some.start]), int(self.last[some.stop - 1]))

    def read(self, files: TokenFiles, some: slice, target: Bytes, places: Rows) -> None:
        """Read a group of ranges, and compare the chunks that are due before a piece is written.

        Args:
            files: open files.
            some: one of `groups`.
            target: (k, width) array.
            places: (n,) index into `target` of each piece of all ranges.

        Raises:
            StoreError: a chunk differs from its checksum, or a file ends early.
            OSError: a file cannot be read now.
        """
        low = self.low[some]
        data, offset = files.ranges(int(self.number[some.start]), low, self.size[some])
        # Address in the buffer less that in the file, of each range.
        shifts = offset - low
        part = self.pieces(some)
        if self.is_due[part].any():
            shift = np.repeat(shifts, self.last[some] - self.first[some])
            due = np.flatnonzero(self.is_due[part])
            chunks, index = np.unique(self.chunk[part][due], return_index=True)
            files.compare_all(chunks, data, shift[due[index]])
        self._write(data, some, shifts, target.reshape(-1).view(f"V{self.width}"), places)

    def _write(
        self, data: Bytes, some: slice, shifts: Rows, target: npt.NDArray[np.void], places: Rows
    ) -> None:
        """Write the pieces of a group from a buffer to their places."""
        first, last, part = self.first[some], self.last[some], self.pieces(some)
        if not self.is_dense[some].all() or part.stop - part.start < _FEW * len(first):
            items = np.ndarray((len(data) - self.width + 1,), target.dtype, data.data, strides=(1,))
            at = self.at[part] + np.repeat(shifts, last - first)
            gather_into(items, at, target, places[part])
            return
        low = self.at[first] + shifts
        size = (last - first) * self.width
        # One copy of each piece, and not two by way of the array that `gather_into` needs.
        for start, stop, begin, end in zip(
            first.tolist(), last.tolist(), low.tolist(), (low + size).tolist(), strict=True
        ):
            target[places[start:stop]] = data[begin:end].view(target.dtype)


def find_ranges(
    places: ChunkPlaces, rows: Rows, offsets: Rows, width: int, span: int, compares: bool
) -> TokenRanges:
    """Find the ranges of files that hold some pieces; near pieces are read as one range.

    Args:
        places: addresses of the chunks, which are not compressed.
        rows: (n,) ascending rows, n at least 1.
        offsets: (n,) first byte of each piece in its row, ascending within a row.
        width: bytes of a piece.
        span: longer ranges are cut where the parts of this size of a file meet, but not within a
            piece or chunk.
        compares: read the chunks whole that were not compared yet.

    Raises:
        StoreError: a row is in no file.
    """
    number, chunk, within = places.locate(rows)
    address = places.address[chunk]
    at = address + within * places.row_bytes + offsets
    begin, end = at, at + width
    is_due = ~places.compared[chunk] if compares else np.zeros(len(at), np.bool_)
    if any_due := bool(is_due.any()):
        # A chunk that is due is read whole, so that no range ends within it.
        begin = np.where(is_due, address, at)
        end = np.where(is_due, address + places.size[chunk], end)
    step = np.diff(at)
    is_far = (step > width + _GAP_BYTES) | (step < 0)
    if any_due:
        is_far &= ~(is_due[1:] & (chunk[1:] == chunk[:-1]))
    is_far |= number[1:] != number[:-1]
    first, last = _runs(is_far)
    if len(long := np.flatnonzero(at[last - 1] - at[first] > span)):
        is_long = np.zeros(len(at), np.bool_)
        for run in long.tolist():
            is_long[first[run] : last[run]] = True
        part = begin // span
        first, last = _runs(is_far | (is_long[1:] & (part[1:] != part[:-1])))
    low = np.minimum.reduceat(begin, first)
    size = np.maximum.reduceat(end, first) - low
    num_gaps = np.concatenate([[0], np.cumsum(step != width)])
    is_dense = num_gaps[last - 1] == num_gaps[first]
    return TokenRanges(at, width, chunk, is_due, first, last, is_dense, number[first], low, size)


def _runs(is_new: npt.NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """First item of each run, and the item after its last; is_new[i]: item i + 1 begins one."""
    first = np.concatenate([[0], np.flatnonzero(is_new) + 1])
    return first, np.append(first[1:], len(is_new) + 1)
