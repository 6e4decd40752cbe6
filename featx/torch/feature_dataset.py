"""A store as a torch Dataset, and a shuffling sampler for stores larger than memory."""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Iterator, Sequence, Sized

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Sampler, Subset

from featx.errors import StoreError
from featx.store import FeatureStore, LayerArray, Verify, check_rows_present
from featx.torch.token_selection import check_whole_number
from featx.types import Array

BLOCK_BYTES = 256 << 10
"""Target size of a block in bytes, if `block_rows` is not given.

Large enough for efficient reads from a solid-state disk, and small enough that a window mixes many
parts of the store.
"""

WINDOW_BYTES = 64 << 20
"""Target size of a window in bytes, if `window` is not given.

Each reading process holds about this much.
"""


class FeatureDataset(Dataset[tuple[torch.Tensor, int]]):
    """Rows of one layer that did not fail, with their labels. Safe under fork, spawn and threads.

    Items are (feature, label): the row as a tensor, and its class index, -1 without a label. The
    dataset contains the rows that are complete when it is created; later rows are ignored.

    Args:
        path: folder of the store, its features.h5, or an open store.
        layer: name of the layer.
        verify: what is compared with its checksum on reading, as for `featx.open`.
        dtype: dtype of the features; None for that of the store, which is exact as well and takes
            half the memory for float16 and bfloat16.
        labelled: whether rows without a label are left out, as in `FeatureStore.xy`.

    Raises:
        ValueError: `dtype` is no floating dtype of torch.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layer: str,
        verify: Verify = "chunks",
        dtype: torch.dtype | None = torch.float32,
        labelled: bool = False,
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"dtype={dtype!r}: expected a floating dtype, such as torch.float32, or None for "
                "that of the store."
            )
        self.store = FeatureStore(path, verify)
        self._fingerprint = self.store.attrs.get("fingerprint")
        self.layer = layer
        self._features = self.store[layer]
        self._labels = self.store.labels
        self._rows = np.flatnonzero(self.store.ok & (self._labels >= 0 if labelled else True))
        self._rows.flags.writeable = False
        self._block_cache: _BlockCache | None = None
        # numpy has no bfloat16 and reads it as float32; the way back is exact.
        self._dtype = getattr(torch, self._features.stored_dtype) if dtype is None else dtype

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """(len,) int64, increasing: row in the store of each item."""
        return self._rows

    @property
    def row_bytes(self) -> int:
        """Size of one feature in bytes."""
        return math.prod(self._features.shape[1:]) * self._features.dtype.itemsize

    def keep_blocks(self, block_rows: int, num_blocks: int) -> None:
        """Read whole blocks of rows from now on, and keep the last ones in memory.

        This suits an order that stays within a few blocks for some time. `BlockShuffleSampler`
        calls it.

        Args:
            block_rows: number of consecutive rows of the store that are read together.
            num_blocks: number of blocks that each process keeps.
        """
        check_whole_number("block_rows", block_rows, 1)
        check_whole_number("num_blocks", num_blocks, 1)
        self._block_cache = _BlockCache(self._features, block_rows, num_blocks)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return the feature and the class index of one item."""
        if not hasattr(index, "__index__"):
            raise TypeError(
                f"the index of an item is a whole number, not {index!r}. For several items give "
                "their numbers to torch.utils.data.Subset."
            )
        rows = self._rows[[operator.index(index)]]
        return self._read(rows)[0], int(self._labels[rows[0]])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        """Return a batch with a single read; DataLoader calls this method.

        Raises StoreError if a row is no longer in the store, is damaged, or another run has changed
        the store.
        """
        rows = self._rows[np.array([operator.index(i) for i in indices], dtype=np.int64)]
        return list(zip(self._read(rows), self._labels[rows].tolist(), strict=True))

    def _read(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        read = self._features[rows] if self._block_cache is None else self._block_cache.read(rows)
        # Checked after the read, because another run may replace the store at any time until then.
        if self.store.attrs.get("fingerprint") != self._fingerprint:
            raise StoreError(f"another run has changed {self.store.root}; open it again.")
        check_rows_present(self.store, self.layer, rows, read)
        return torch.from_numpy(read).to(self._dtype)


class BlockShuffleSampler(Sampler[int]):
    """Sampler that yields every item once, in a random order with few blocks in use at a time.

    Consecutive rows form a block. The blocks are shuffled and taken `window` at a time, and the
    items of one window are shuffled together. A disk therefore reads each block as a whole and once
    per epoch, and memory holds one window. Items that are far apart in the store share a batch only
    if their blocks share a window. The sampler makes its FeatureDataset read and keep whole blocks
    (`keep_blocks`), so use a separate FeatureDataset for any other order.

    The order depends only on the items, `seed` and the epoch. Each iteration uses the next epoch;
    `set_epoch` chooses it, for example when a training is resumed.

    Args:
        data_source: a FeatureDataset, a Subset of one, or any object with a length.
        block_rows: rows per block; for a FeatureDataset by default a power of two near 256 KiB.
        window: blocks that are shuffled together; for a FeatureDataset by default about 64 MiB.
        seed: seed of the order, 0 or above.

    Raises:
        ValueError: `block_rows`, `window` or `seed` is no whole number in its range, or one of the
            first two is missing for an object other than a FeatureDataset.
    """

    def __init__(
        self,
        data_source: Sized,
        block_rows: int | None = None,
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        dataset, rows = _dataset_and_rows(data_source)
        if dataset is not None:
            row_bytes = max(1, dataset.row_bytes)
            if block_rows is None:
                block_rows = 1 << max(0, (BLOCK_BYTES // row_bytes).bit_length() - 1)
            if window is None:
                window = max(1, WINDOW_BYTES // (row_bytes * max(1, block_rows)))
        if block_rows is None or window is None:
            kind = type(data_source).__name__
            raise ValueError(
                f"give block_rows and window, since the row size of a {kind} is unknown."
            )
        check_whole_number("block_rows", block_rows, 1)
        check_whole_number("window", window, 1)
        check_whole_number("seed", seed, 0)
        self.block_rows = block_rows
        self.window = window
        self.seed = seed
        self._epoch = 0
        # Blocks are aligned with the rows of the store, as its chunks are. Blocks of items would be
        # shifted by every failed row.
        self._items = np.argsort(rows, kind="stable")
        changes = np.diff(rows[self._items] // block_rows) != 0
        self._edges = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(rows)]])
        if dataset is not None and block_rows > 1:
            dataset.keep_blocks(block_rows, window)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, a whole number counted from 0."""
        check_whole_number("epoch", epoch, 0)
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        """Yield the items of one epoch, and advance to the next epoch."""
        # As a generator, this runs with the first `next`: DataLoader creates iterators that it
        # never starts, and these must not advance the epoch.
        rng = np.random.default_rng([self.seed, self._epoch])
        self._epoch += 1
        if not len(self):
            return
        blocks = rng.permutation(len(self._edges) - 1)
        # Windows have nearly equal sizes, because a short last window would hardly be shuffled.
        for window in np.array_split(blocks, -(-len(blocks) // self.window)):
            edges = zip(self._edges[window], self._edges[window + 1], strict=True)
            items = np.concatenate([self._items[start:stop] for start, stop in edges])
            yield from rng.permutation(items).tolist()


def _dataset_and_rows(source: Sized) -> tuple[FeatureDataset | None, npt.NDArray[np.int64]]:
    """Return the FeatureDataset behind a data source, or None, and its items' rows, (n,) int64."""
    if isinstance(source, FeatureDataset):
        return source, source.rows
    if isinstance(source, Subset):
        dataset, rows = _dataset_and_rows(source.dataset)  # type: ignore[arg-type]
        return dataset, rows[np.asarray(source.indices, dtype=np.int64)]
    return None, np.arange(len(source))


class _BlockCache:
    """Cache of blocks of consecutive rows of one layer.

    Threads may share an instance without a lock: a block that one thread drops stays valid for
    another that reads it, and at worst is read from the store again. The cache survives a fork, but
    is not pickled.
    """

    def __init__(self, features: LayerArray, block_rows: int, num_blocks: int) -> None:
        self._arguments = features, block_rows, num_blocks

        @functools.lru_cache(num_blocks)
        def block(number: int) -> Array:
            return features[number * block_rows : (number + 1) * block_rows]

        self._block = block

    def __reduce__(self) -> tuple[object, ...]:
        return _BlockCache, self._arguments

    def read(self, rows: npt.NDArray[np.int64]) -> Array:
        """Copy rows out of their blocks, so that changes to the result do not affect the cache."""
        features, block_rows, num_blocks = self._arguments
        numbers, offsets = np.divmod(rows, block_rows)
        # A batch of BlockShuffleSampler touches at most two windows. In any other order, every row
        # could cost the read of a whole block, so the rows are read directly.
        if len(np.unique(numbers)) > 2 * num_blocks:
            return features[rows]
        out = np.empty((len(rows), *features.shape[1:]), features.dtype)
        for i, (number, offset) in enumerate(zip(numbers.tolist(), offsets.tolist(), strict=True)):
            out[i] = self._block(number)[offset]
        return out
