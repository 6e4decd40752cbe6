"""Division of the tokens of an epoch, so that memory suffices and batches are mixed."""

from __future__ import annotations

import math

import numpy as np

from featx.store import TokenReader
from featx.torch.keyed_delay import DELAY, EpochSizes
from featx.torch.token_selection import TokenBlocks, TokenSelection

LEAST_BLOCK_BYTES = 64 << 10
"""Smallest size of a block, unless `block` is given: smaller reads slow a disk down."""

GOOD_MIXING = 2.15
"""Effective images for each token of a batch, at which 0.8 of the tokens are of distinct images."""

_TOKEN_OVERHEAD = 40
"""Bytes that a held token needs besides its numbers: its slot, its number, and its place."""

_SEGMENT_OVERHEAD = 120
"""Bytes for each token of a segment while it is read: addresses, delays and their order."""

_READ_AHEAD_BYTES = 8 << 20
"""Bytes of tokens that are read ahead in addition to the memory, at most an eighth of it. A disk of
1 GB/s reads 5 MB while the interpreter's lock changes hands once on a busy machine."""

_READ_BYTES = 64 << 20
"""Bytes of the buffers of all threads that read, at most an eighth of the memory."""


def segment_tokens(memory: int, token_bytes: int, needed: int) -> int:
    """Tokens of a segment, so that all that is held stays within the memory."""
    token = token_bytes + _TOKEN_OVERHEAD
    room = memory - min(memory // 8, _READ_BYTES)
    if needed * (token + _SEGMENT_OVERHEAD) <= room:
        return needed  # everything fits: one segment, which is shuffled fully
    return max(1, int(room / ((DELAY + 1) / 2 * token + token + _SEGMENT_OVERHEAD)))


def read_ahead_tokens(memory: int, token_bytes: int) -> int:
    """Tokens that are read ahead in addition to those that wait."""
    return min(_READ_AHEAD_BYTES, memory // 8) // (token_bytes + _SEGMENT_OVERHEAD)


def choose_blocks(
    selection: TokenSelection, sizes: EpochSizes, reader: TokenReader, block: int | None
) -> tuple[TokenBlocks, tuple[int, int]]:
    """Divide the tokens into blocks; return also the rows of a group, and the blocks of a group."""
    per_row, chunk = selection.per_row, reader.chunk_rows
    if block is not None:
        rows = 1 << max(0, (block // per_row).bit_length() - 1)
        group = (rows, 1) if block >= per_row else (1, -(-per_row // block))
    else:
        group = _default_group(selection, sizes, reader)
    if reader.reads_whole_rows:
        group = (group[0], 1)
    if reader.reads_whole_chunks:
        group = (max(chunk, group[0]), 1)
    return TokenBlocks.of(selection, *group), group


def _default_group(
    selection: TokenSelection, sizes: EpochSizes, reader: TokenReader
) -> tuple[int, int]:
    """Largest blocks that mix well, from a chunk down to LEAST_BLOCK_BYTES."""
    row_bytes = selection.per_row * reader.token_bytes
    groups = [(1 << i, 1) for i in reversed(range(reader.chunk_rows.bit_length()))]
    pieces = 2
    while row_bytes // pieces >= LEAST_BLOCK_BYTES:
        groups.append((1, pieces))
        pieces *= 2
    smallest = [group for group in groups if row_bytes * group[0] // group[1] >= LEAST_BLOCK_BYTES]
    for group in smallest or groups[:1]:
        # Adjacent images are often alike, so that a block counts as an image where it is larger.
        size = selection.per_row * group[0] / group[1]
        blocks = sizes.spread_tokens / size if sizes.num_segments > sizes.delay else math.inf
        images = effective_images(selection, sizes, group[1])
        if size <= sizes.segment_tokens and min(blocks, images) >= GOOD_MIXING * sizes.batch_size:
            return group
    return (smallest or groups[:1])[-1]


def effective_images(selection: TokenSelection, sizes: EpochSizes, pieces: int) -> float:
    """1 / P(two tokens of a batch are of one image), for blocks that are parts of images.

    A token shares its output segment with the others of its block with probability 1 / D, and with
    other tokens of its image as with any token. Of the S tokens of an output segment, B come in a
    batch. So P = (q - 1) / (D S) + (k - q) / N for blocks of q of the k tokens of an image and N
    tokens in all.
    """
    per_row, total = selection.per_row, len(selection)
    of_block = max(1.0, per_row / pieces)
    share = (of_block - 1) / sizes.spread_tokens + (per_row - of_block) / total
    return min(1 / share, float(len(selection.rows))) if share else float(len(selection.rows))


def block_tokens(blocks: TokenBlocks) -> int:
    """Tokens of the first block, as an example."""
    start, stop = blocks.bounds(np.zeros(1, np.int64))
    return int((stop - start)[0])
