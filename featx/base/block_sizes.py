"""Sizes of the blocks in which rows are read and computed, and of what is kept in memory."""

from __future__ import annotations

BLOCK_BYTES = 64 << 20
"""Bytes of a block of rows, or of the numbers that are computed of it."""

KEEP_BYTES = 2 << 30
"""Size up to which the vectors of a layer are kept in memory. On CUDA the limit is half of the free
memory."""


def rows_of_block(row_bytes: int) -> int:
    """Number of rows of `row_bytes` that take BLOCK_BYTES, at least one."""
    return max(1, BLOCK_BYTES // max(1, row_bytes))
