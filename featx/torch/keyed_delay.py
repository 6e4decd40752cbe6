"""Keyed delay: an order of tokens that is mixed well, read in blocks, and resumed exactly.

The blocks of an epoch are permuted and cut into G segments. Each token of segment g leaves in
output segment (g + d) mod G with a delay d that is uniform in [0, D). An output segment is permuted
and cut into batches. All draws depend on (seed, epoch, rank, segment) alone, so that any output
segment can be made again from the D segments before it.

This mixes as the shuffle buffers of saev and dictionary_learning do, which exchange tokens with a
reservoir at random, but those cannot be resumed: what is in the reservoir depends on all that was
read before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from featx.store import TokenReader
from featx.torch.token_selection import Ints, TokenBlocks, TokenSelection

DELAY = 32
"""Largest number of output segments over which a segment is spread."""

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

_COUNTED_BLOCKS = 1 << 18
"""Number of blocks whose tokens are counted at once."""

_BLOCKS, _DELAYS, _OUTPUT = range(3)
"""Purposes of random numbers, a part of their seed."""


@dataclass(frozen=True)
class EpochSizes:
    """Sizes that determine the order of an epoch.

    `num_tokens` are those of all ranks. `segment_tokens` is the largest number of tokens of a
    segment, but for the size of a block.
    """

    num_tokens: int
    segment_tokens: int
    world_size: int
    batch_size: int
    drop_last: bool

    @property
    def num_segments(self) -> int:
        return max(1, math.ceil(self.num_tokens / self.world_size / self.segment_tokens))

    @property
    def delay(self) -> int:
        """Number of output segments over which a segment is spread."""
        return min(DELAY, self.num_segments)

    @property
    def spread_tokens(self) -> float:
        """Number of tokens of a rank from which those of an output segment are drawn."""
        return self.delay * self.num_tokens / self.world_size / self.num_segments

    @property
    def held_tokens(self) -> int:
        """Largest number of tokens in memory: waiting ones, a segment that is read, and a batch."""
        size = math.ceil(self.num_tokens / self.world_size / self.num_segments)
        waiting = (self.delay + 1) / 2 * size
        # The number that waits is a sum of D binomials; eight standard deviations.
        noise = 8 * math.sqrt(self.delay * size / 4)
        read_ahead = size if self.num_segments > 1 else 0
        return math.ceil(waiting + noise) + read_ahead + self.batch_size


class EpochOrder:
    """Order of one epoch for one rank, by seed and epoch as `key`.

    Unless shuffled, everything is in the order of the store.
    """

    def __init__(
        self,
        blocks: TokenBlocks,
        sizes: EpochSizes,
        key: tuple[int, int],
        rank: int,
        shuffled: bool,
    ) -> None:
        self._blocks = blocks
        self._sizes = sizes
        self._key = key
        self._rank = rank
        self._shuffled = shuffled
        self.num_segments = sizes.num_segments
        self.delay = sizes.delay if shuffled else 1
        order = np.argsort(self._draws(len(blocks), _BLOCKS, 0), kind="stable")
        if not shuffled:
            order = np.arange(len(blocks))
        self._order = order
        self._own = order[rank :: sizes.world_size]
        self._edges = np.linspace(0, len(self._own), self.num_segments + 1).astype(np.int64)

    @cached_property
    def rank_tokens(self) -> list[int]:
        world_size = self._sizes.world_size
        found = np.zeros(world_size, np.int64)
        # An epoch of 10^9 tokens has 10^7 blocks, so their bounds are not all held at once.
        for begin in range(0, len(self._order), _COUNTED_BLOCKS):
            start, stop = self._blocks.bounds(self._order[begin : begin + _COUNTED_BLOCKS])
            rank = np.arange(begin, begin + len(start)) % world_size
            # bincount sums float64, which is exact up to 2^53 tokens.
            found += np.bincount(rank, stop - start, world_size).astype(np.int64)
        counts: list[int] = found.tolist()
        return counts

    @property
    def num_batches(self) -> int:
        """Number of batches, equal for all ranks: that of the rank with the fewest tokens."""
        fewest, size = min(self.rank_tokens), self._sizes.batch_size
        return fewest // size if self._sizes.drop_last else -(-fewest // size)

    @property
    def num_left_out(self) -> int:
        """Number of tokens that come in no batch of any rank."""
        given = self.num_batches * self._sizes.batch_size
        return sum(max(0, tokens - given) for tokens in self.rank_tokens)

    def segment(self, number: int) -> tuple[Ints, npt.NDArray[np.int64]]:
        """Tokens of a segment in the order of the store, and the delay of each."""
        # In the order of the store: neighbours are read together, and disks move in one direction.
        own = np.sort(self._own[self._edges[number] : self._edges[number + 1]])
        tokens = self._blocks.tokens(own)
        if self.delay == 1:
            return tokens, np.zeros(len(tokens), np.int64)
        high = self._draws(len(tokens), _DELAYS, number) >> np.uint64(32)
        return tokens, ((high * np.uint64(self.delay)) >> np.uint64(32)).astype(np.int64)

    def permutation(self, number: int, count: int) -> Ints:
        """Order of the `count` tokens of an output segment."""
        if not self._shuffled:
            return np.arange(count)
        return np.argsort(self._draws(count, _OUTPUT, number), kind="stable")

    def _draws(self, count: int, purpose: int, number: int) -> npt.NDArray[np.uint64]:
        """Random numbers that any release of numpy gives for the same key: raw bits of PCG64.

        The methods of numpy's Generator may change between releases, which would change the rest
        of an epoch that is resumed.
        """
        rank = 0 if purpose == _BLOCKS else self._rank
        seed = np.random.SeedSequence([*self._key, purpose, rank, number])
        raw: npt.NDArray[np.uint64] = np.random.PCG64(seed).random_raw(count)
        return raw


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
