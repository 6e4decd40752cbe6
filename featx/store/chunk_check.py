"""Compares chunks with their checksums while rows are read; each chunk is compared once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import ConfigError, StoreError
from featx.store import layout

Verify: TypeAlias = Literal["chunks", "rows", False]
"""Choice of the chunks that a reader compares with their checksums.

'chunks': chunks of which one read takes a quarter or more (half in an object store), and all
chunks of compressed layers. 'rows': all chunks of which a row is read. False: none.
"""

_INVERSE_SHARE = 4
_INVERSE_SHARE_REMOTE = 2
"""Inverse of the share of a chunk that a read must take for the chunk to be compared.

To compare a chunk means to read all of it, which is more expensive in an object store.
"""


def check_verify(verify: object) -> None:
    """Raise ConfigError unless `verify` is 'chunks', 'rows' or False."""
    if verify is not False and verify not in ("chunks", "rows"):
        raise ConfigError(f"verify={verify!r}: expected 'chunks', 'rows' or False.")


def repair_hint(path: Path) -> str:
    """Advice for a damaged file of a store, the end of a message."""
    # A part lies in parts/ below the store; features.h5 and merged files lie in the folder.
    root = path.parent.parent if path.parent.name == layout.PARTS else path.parent
    return (
        f"Bits of the file have changed since it was written. `python -m featx job=verify "
        f"store={root} verify.repair=true` extracts these rows again and leaves all others."
    )


class ChunkCheck:
    """Checksums of the chunks of a dataset, and which of them were compared already.

    A chunk is compared once: bits flip on the disk, and later reads come from memory. Threads may
    share an object; at worst two of them compare the same chunk.

    Args:
        dataset: chunked dataset of a file open for reading.
        checksums: (chunks,) uint32, `layout.checksum` of the rows of each chunk.
        path: path of the file, for messages.
        first_row: first row of the dataset in the store, for messages.
        all_rows: compare every chunk of which a row is read.
        is_remote: whether the file lies in an object store.

    Raises:
        StoreError: the number of checksums differs from the number of chunks.
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        checksums: npt.NDArray[np.uint32],
        path: Path,
        first_row: int,
        all_rows: bool,
        is_remote: bool = False,
    ) -> None:
        self._name = dataset.name
        self._num_rows = len(dataset)
        self._rows_per_chunk = int(dataset.chunks[0])
        item_bytes = dataset.id.get_type().get_size()  # h5py calls a bfloat16 a float32
        self._row_bytes = int(np.prod(dataset.shape[1:], dtype=np.int64)) * item_bytes
        self._path = path
        self._first_row = first_row
        num_chunks = -(-self._num_rows // self._rows_per_chunk)
        if checksums.shape != (num_chunks,) or checksums.dtype.kind != "u":
            raise StoreError(
                f"{path}: {self._name} has {num_chunks} chunks, and its checksums are "
                f"{checksums.shape} {checksums.dtype}. {repair_hint(path)}"
            )
        self._checksums = checksums
        self._is_compared = np.zeros(num_chunks, np.bool_)
        share = _INVERSE_SHARE_REMOTE if is_remote else _INVERSE_SHARE
        # Otherwise a single row never makes a longer chunk due, and skips all further work.
        self._may_compare_single_row = all_rows or self._rows_per_chunk == 1
        self._min_due_rows = (
            1 if self._may_compare_single_row else max(2, -(-self._rows_per_chunk // share))
        )

    def chunk_rows(self, chunk: int) -> int:
        """Number of rows in a chunk."""
        return min(self._rows_per_chunk, self._num_rows - chunk * self._rows_per_chunk)

    def due_in_range(self, first: int, count: int) -> list[int]:
        """Chunks that must be compared before rows [first, first + count) are returned."""
        stop = first + count
        if count <= 1 and not self._may_compare_single_row and stop < self._num_rows:
            return []
        low = first // self._rows_per_chunk
        uncompared = (
            np.flatnonzero(~self._is_compared[low : (stop - 1) // self._rows_per_chunk + 1]) + low
        )
        return [
            chunk
            for chunk in uncompared.tolist()
            if self._is_due(
                chunk,
                min(stop, (chunk + 1) * self._rows_per_chunk)
                - max(first, chunk * self._rows_per_chunk),
            )
        ]

    def due_in_rows(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Chunks, in ascending order, to compare before rows in any order are returned."""
        chunks = rows // self._rows_per_chunk
        uncompared = chunks[~self._is_compared[chunks]]
        if not len(uncompared):
            return []
        due, counts = np.unique(uncompared, return_counts=True)
        pairs = zip(due.tolist(), counts.tolist(), strict=True)
        return [chunk for chunk, count in pairs if self._is_due(chunk, count)]

    def compare(self, chunk: int, data: npt.NDArray[Any]) -> None:
        """Compare a chunk with its checksum, unless that was done before.

        Args:
            chunk: number of the chunk.
            data: its rows as stored, decoded and contiguous; bytes behind them are ignored.

        Raises:
            StoreError: the rows differ from the checksum.
        """
        if self._is_compared[chunk]:
            return
        num_rows = self.chunk_rows(chunk)
        rows = data.reshape(-1).view(np.uint8)[: num_rows * self._row_bytes]
        if layout.checksum(rows) != self._checksums[chunk]:
            first = self._first_row + chunk * self._rows_per_chunk
            raise StoreError(
                f"{self._path}: {self._name}, rows {first} to {first + num_rows - 1} differ from "
                f"their checksum. {repair_hint(self._path)}"
            )
        self._is_compared[chunk] = True

    def _is_due(self, chunk: int, count: int) -> bool:
        """Return whether a read of `count` rows of a chunk is large enough to compare it."""
        return count >= self._min_due_rows or count >= self.chunk_rows(chunk)
