"""A store as a torch Dataset, and an order of its rows that suits a store larger than memory."""

from __future__ import annotations

import contextlib
import operator
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Sampler, Subset

from featx.errors import StoreError
from featx.store.chunk_check import Verify
from featx.store.layer_array import LayerArray
from featx.store.reader import FeatureStore, check_rows_present

BLOCK_BYTES = 256 << 10
"""Bytes of a block where the sampler is not told how many rows.

Long enough for a solid-state disk, and short enough for a window to mix many places of the store.
"""

WINDOW_BYTES = 64 << 20
"""Bytes that are mixed at a time where the sampler is not told how many blocks.

A process that reads holds about this much.
"""


class FeatureDataset(Dataset[tuple[torch.Tensor, int]]):
    """The ok rows of one layer with their labels; safe under fork, spawn and threads.

    Args:
        path: the store's folder or its features.h5.
        layer: the dataset's name.
        verify: what is compared with its checksum when it is read, as for `featx.open`.

    Items are (feature, label): the row as a tensor in the store's dtype, and its class number, -1
    without one. They are what was ok when the dataset was made; rows that come later do not count.
    """

    def __init__(self, path: str | os.PathLike[str], layer: str, verify: Verify = "chunks") -> None:
        self.store = FeatureStore(path, verify)
        self._fingerprint = self.store.attrs.get("fingerprint")
        self.layer = layer
        self._features = self.store[layer]
        self._labels = self.store.labels
        self._rows = np.flatnonzero(self.store.ok)
        self._rows.flags.writeable = False
        self._blocks: _Blocks | None = None

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """(len,) int64, increasing: which row of the store each item is."""
        return self._rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one feature."""
        return (
            int(np.prod(self._features.shape[1:], dtype=np.int64)) * self._features.dtype.itemsize
        )

    def keep_blocks(self, block_rows: int, num_blocks: int) -> None:
        """Read whole blocks of rows from now on, and keep the last ones in memory.

        For an order that stays within few blocks for long; `BlockShuffleSampler` asks for it.

        Args:
            block_rows: consecutive rows of the store that are read together.
            num_blocks: how many of them each process keeps.
        """
        self._blocks = _Blocks(self._features, block_rows, num_blocks)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rows = self._rows[[operator.index(index)]]
        feature = torch.from_numpy(self._read(rows))[0]
        return feature, int(self._labels[rows[0]])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        """A whole batch in one read, as DataLoader asks for it."""
        rows = self._rows[np.array([operator.index(i) for i in indices], dtype=np.int64)]
        features = torch.from_numpy(self._read(rows))
        return list(zip(features, self._labels[rows].tolist(), strict=True))

    def _read(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """(n, ...) features of rows that were ok when the dataset was made.

        Raises:
            StoreError: they are no longer there, or another run has changed the store.
        """
        read = self._features[rows] if self._blocks is None else self._blocks.read(rows)
        if self.store.attrs.get("fingerprint") != self._fingerprint:
            raise StoreError(f"another run has changed {self.store.root}; open it again.")
        check_rows_present(self.store, self.layer, rows, read)
        return read


class BlockShuffleSampler(Sampler[int]):
    """Every item once, in an order that is random but stays within few blocks for a while.

    Rows that lie side by side form a block. The blocks are shuffled and taken `window` at a time,
    and the items of these are shuffled together. So a disk reads a block as a whole and once an
    epoch, and memory holds one window; but items far apart in the store meet in a batch only where
    their blocks share a window. A FeatureDataset reads and keeps whole blocks from then on
    (`keep_blocks`): give another order another FeatureDataset.

    The order follows from seed and epoch alone, for the same items. Each pass takes the next
    epoch; `set_epoch` says which one is next, for a training that goes on after a break.

    Args:
        data_source: a FeatureDataset, a Subset of one, or anything with a length.
        block_rows: rows of a block; for a FeatureDataset a power of two of about 256 KiB.
        window: blocks mixed at a time; for a FeatureDataset about 64 MiB of them.
        seed: at least 0.

    Raises:
        ValueError: block_rows or window is below 1, or missing where no row says how large it is.
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
            raise ValueError(f"block_rows and window are needed: how large a row of a {kind} is?")
        if block_rows < 1 or window < 1:
            raise ValueError(f"block_rows={block_rows} and window={window} must be at least 1")
        self.block_rows = block_rows
        self.window = window
        self.seed = seed
        self._epoch = 0
        # Blocks lie on the store's rows, as its chunks do, and not on the items: they would shift
        # with each failed row.
        self._items = np.argsort(rows, kind="stable")
        changes = np.diff(rows[self._items] // block_rows) != 0
        self._edges = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(rows)]])
        if dataset is not None and block_rows > 1:
            dataset.keep_blocks(block_rows, window)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of `epoch`, counted from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        # A generator: DataLoader asks for iterators that it never starts, which must not count.
        rng = np.random.default_rng([self.seed, self._epoch])
        self._epoch += 1
        if not len(self):
            return
        blocks = rng.permutation(len(self._edges) - 1)
        # Windows of equal size: a short one at the end would hardly be mixed.
        for window in np.array_split(blocks, -(-len(blocks) // self.window)):
            edges = zip(self._edges[window], self._edges[window + 1], strict=True)
            items = np.concatenate([self._items[start:stop] for start, stop in edges])
            yield from rng.permutation(items).tolist()


def _dataset_and_rows(source: Sized) -> tuple[FeatureDataset | None, npt.NDArray[np.int64]]:
    """The FeatureDataset behind a data source, if there is one, and the row of each item."""
    if isinstance(source, FeatureDataset):
        return source, source.rows
    if isinstance(source, Subset):
        dataset, rows = _dataset_and_rows(source.dataset)  # type: ignore[arg-type]
        return dataset, rows[np.asarray(source.indices, dtype=np.int64)]
    return None, np.arange(len(source))


class _Blocks:
    """Blocks of consecutive rows of one layer, the last ones used kept in memory.

    Threads may share it without a lock: what one drops while another reads stays valid, and is
    read from the store once more at the worst. A fork takes the blocks along, a pickle does not.
    """

    def __init__(self, features: LayerArray, block_rows: int, num_blocks: int) -> None:
        self._features = features
        self._block_rows = block_rows
        self._num_blocks = num_blocks
        self._kept: OrderedDict[int, npt.NDArray[Any]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}

    def read(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """(n, ...) the rows, copied out of their blocks: what is done to them stays theirs."""
        numbers, places = np.divmod(rows, self._block_rows)
        # A batch of the sampler touches two windows at the most. In another order each row would
        # cost the reading of a block.
        if len(np.unique(numbers)) > 2 * self._num_blocks:
            return self._features[rows]
        out = np.empty((len(rows), *self._features.shape[1:]), self._features.dtype)
        for i, (number, place) in enumerate(zip(numbers.tolist(), places.tolist(), strict=True)):
            out[i] = self._block(number)[place]
        return out

    def _block(self, number: int) -> npt.NDArray[Any]:
        block = self._kept.pop(number, None)
        if block is None:
            start = number * self._block_rows
            block = self._features[start : start + self._block_rows]
        self._kept[number] = block
        while len(self._kept) > self._num_blocks:
            with contextlib.suppress(KeyError):  # another thread was faster
                self._kept.popitem(last=False)
        return block
