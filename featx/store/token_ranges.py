"""Ranges of files that hold pieces of rows, found for many pieces at once and read in groups.

numpy takes microseconds for each call on a short array, so that the ranges of thousands of pieces
are found together, and a read of a group of them makes few calls.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.store.layer_chunks import LayerChunks
from featx.store.row_gather import gather_into
from featx.store.token_files import TokenFiles

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_GAP_BYTES = 64 << 10
"""Largest gap between two pieces that are read as one range: as long to read as a call takes."""

RANGE_BYTES = 4 << 20
"""Bytes of a range, beyond which it is cut, and of the ranges that are read into one buffer."""

_MIN_PIECES_PER_RANGE = 16
"""Pieces of a range on average, below which all ranges of a group are written by one call."""


@dataclass(frozen=True)
class TokenRanges:
    """Ranges of files that hold pieces of rows in ascending order; see `find_ranges`.

    Attributes:
        address: (n,) address of each piece in its file.
        width: bytes of a piece.
        chunk: (n,) chunk of each piece.
        is_due: (n,) bool, whether its chunk is to be compared with its checksum.
        first: (m,) first piece of each range.
        last: (m,) piece after the last one of each range.
        is_dense: (m,) bool, whether the pieces of a range follow one another without gaps.
        file: (m,) number of the file of each range.
        start: (m,) address of the first byte of each range.
        size: (m,) bytes of each range.
    """

    address: Rows
    width: int
    chunk: Rows
    is_due: npt.NDArray[np.bool_]
    first: Rows
    last: Rows
    is_dense: npt.NDArray[np.bool_]
    file: Rows
    start: Rows
    size: Rows

    def groups(self, num_bytes: int) -> list[slice]:
        """Divide the ranges into groups of one file each, of about `num_bytes`."""
        group = np.cumsum(self.size) // num_bytes
        is_new = (group[1:] != group[:-1]) | (self.file[1:] != self.file[:-1])
        edges = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(group)]
        return [slice(low, high) for low, high in itertools.pairwise(edges)]

    def pieces(self, group: slice) -> slice:
        """Pieces of a group of ranges."""
        return slice(int(self.first[group.start]), int(self.last[group.stop - 1]))

    def read(self, files: TokenFiles, group: slice, target: Bytes, out_indices: Rows) -> None:
        """Read a group of ranges, and compare the chunks that are due before a piece is written.

        Args:
            files: open files.
            group: one of `groups`.
            target: (k, width) array.
            out_indices: (n,) index into `target` of each piece of all ranges.

        Raises:
            StoreError: a chunk differs from its checksum, or a file ends early.
            OSError: a file cannot be read now.
        """
        start = self.start[group]
        data, offset = files.read_ranges(int(self.file[group.start]), start, self.size[group])
        # Address in the buffer less that in the file, of each range.
        shifts = offset - start
        part = self.pieces(group)
        if self.is_due[part].any():
            shift = np.repeat(shifts, self.last[group] - self.first[group])
            due = np.flatnonzero(self.is_due[part])
            numbers, index = np.unique(self.chunk[part][due], return_index=True)
            files.compare_chunks(numbers, data, shift[due[index]])
        self._write(data, group, shifts, target.reshape(-1).view(f"V{self.width}"), out_indices)

    def _write(
        self,
        data: Bytes,
        group: slice,
        shifts: Rows,
        target: npt.NDArray[np.void],
        out_indices: Rows,
    ) -> None:
        """Write the pieces of a group from a buffer to target[out_indices]."""
        first, last, part = self.first[group], self.last[group], self.pieces(group)
        has_few_pieces = part.stop - part.start < _MIN_PIECES_PER_RANGE * len(first)
        if has_few_pieces or not self.is_dense[group].all():
            items = np.ndarray((len(data) - self.width + 1,), target.dtype, data.data, strides=(1,))
            addresses = self.address[part] + np.repeat(shifts, last - first)
            gather_into(items, addresses, target, out_indices[part])
            return
        begins = self.address[first] + shifts
        ends = begins + (last - first) * self.width
        # One copy of each piece, and not two through the array that `gather_into` needs.
        for start, stop, begin, end in zip(
            first.tolist(), last.tolist(), begins.tolist(), ends.tolist(), strict=True
        ):
            target[out_indices[start:stop]] = data[begin:end].view(target.dtype)


def find_ranges(
    chunks: LayerChunks, rows: Rows, offsets: Rows, width: int, range_bytes: int, compares: bool
) -> TokenRanges:
    """Find the ranges of files that hold some pieces; near pieces are read as one range.

    Args:
        chunks: chunks of the layer, which are not compressed.
        rows: (n,) ascending rows, n at least 1.
        offsets: (n,) first byte of each piece in its row, ascending within a row.
        width: bytes of a piece.
        range_bytes: longer ranges are cut at multiples of this address, but not within a piece or
            chunk.
        compares: read the chunks whole that were not compared yet.

    Raises:
        StoreError: a row is in no file.
    """
    file, chunk, within = chunks.locate(rows)
    chunk_address = chunks.address[chunk]
    address = chunk_address + within * chunks.row_bytes + offsets
    begin, end = address, address + width
    is_due = ~chunks.is_compared[chunk] if compares else np.zeros(len(address), np.bool_)
    if any_due := bool(is_due.any()):
        # A chunk that is due is read whole, so that no range ends within it.
        begin = np.where(is_due, chunk_address, address)
        end = np.where(is_due, chunk_address + chunks.size[chunk], end)
    step = np.diff(address)
    is_far = (step > width + _GAP_BYTES) | (step < 0)
    if any_due:
        is_far &= ~(is_due[1:] & (chunk[1:] == chunk[:-1]))
    is_far |= file[1:] != file[:-1]
    first, last = _split_ranges(is_far)
    if len(long := np.flatnonzero(address[last - 1] - address[first] > range_bytes)):
        is_long = np.zeros(len(address), np.bool_)
        for number in long.tolist():
            is_long[first[number] : last[number]] = True
        part = begin // range_bytes
        first, last = _split_ranges(is_far | (is_long[1:] & (part[1:] != part[:-1])))
    start = np.minimum.reduceat(begin, first)
    size = np.maximum.reduceat(end, first) - start
    num_gaps = np.concatenate([[0], np.cumsum(step != width)])
    is_dense = num_gaps[last - 1] == num_gaps[first]
    return TokenRanges(
        address, width, chunk, is_due, first, last, is_dense, file[first], start, size
    )


def _split_ranges(is_new: npt.NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """First item of each range, and the item after its last; is_new[i]: item i + 1 begins one."""
    first = np.concatenate([[0], np.flatnonzero(is_new) + 1])
    return first, np.append(first[1:], len(is_new) + 1)
