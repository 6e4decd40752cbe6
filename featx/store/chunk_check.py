"""Chunks compared with their checksums while rows are read, each chunk once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import ConfigError, StoreError
from featx.store import layout

Verify: TypeAlias = Literal["chunks", "rows", False]
"""What a reader compares with its checksum.

'chunks': every chunk of which one read takes a quarter or more (in an object store half); of
compressed layers every chunk.
'rows': every chunk of which a read takes any row. False: nothing.
"""

_SHARE = 4
_SHARE_FAR = 2
"""Comparing a chunk means to read all of it; a read that takes less than this part is spared. In an
object store each byte that is read costs more than on a disk."""


def check_verify(verify: object) -> None:
    """Raise ConfigError unless `verify` is one of 'chunks', 'rows' and False."""
    if verify is not False and verify not in ("chunks", "rows"):
        raise ConfigError(f"verify={verify!r}: expected 'chunks', 'rows' or False.")


def repair_hint(path: Path) -> str:
    """What to do about a damaged file of a store."""
    # The store's folder: a part lies in a folder of its own, and a merged file may lie alone.
    root = path.parent.parent if path.parent.name == layout.PARTS else path.parent
    return (
        f"Bits of the file have changed since it was written. `python -m featx job=verify "
        f"store={root} verify.repair=true` keeps all other rows and extracts these again."
    )


class ChunkCheck:
    """The checksums of one dataset's chunks, and which of them were compared already.

    Every chunk is compared once: bits flip on the disk, and what is read again soon comes from
    memory. Threads may share an object; at worst two of them compare the same chunk.

    Args:
        dataset: chunked, in a file open for reading.
        sums: (chunks,) uint32, `layout.checksum` of the rows of each chunk.
        path: of the file, for messages.
        first_row: the row of the store that the dataset begins with, for messages.
        all_rows: whether the chunk of every row that is read is compared.
        is_far: whether the file lies in an object store.

    Raises:
        StoreError: there is not one checksum for each chunk.
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        sums: npt.NDArray[np.uint32],
        path: Path,
        first_row: int,
        all_rows: bool,
        is_far: bool = False,
    ) -> None:
        self._name = dataset.name
        self._num_rows = len(dataset)
        self._step = int(dataset.chunks[0])
        item_bytes = dataset.id.get_type().get_size()  # h5py calls a bfloat16 a float32
        self._row_bytes = int(np.prod(dataset.shape[1:], dtype=np.int64)) * item_bytes
        self._path = path
        self._first_row = first_row
        num_chunks = -(-self._num_rows // self._step)
        if sums.shape != (num_chunks,) or sums.dtype.kind != "u":
            raise StoreError(
                f"{path}: {self._name} has {num_chunks} chunks, and its checksums are {sums.shape} "
                f"{sums.dtype}. {repair_hint(path)}"
            )
        self._sums = sums
        self._compared = np.zeros(num_chunks, np.bool_)
        share = _SHARE_FAR if is_far else _SHARE
        # One row can make only a chunk of one row due, which is what spares single rows all else.
        self._single_rows = all_rows or self._step == 1
        self._enough = 1 if self._single_rows else max(2, -(-self._step // share))

    def chunk_rows(self, chunk: int) -> int:
        """Number of rows of the dataset in a chunk."""
        return min(self._step, self._num_rows - chunk * self._step)

    def due_of_run(self, first: int, count: int) -> list[int]:
        """Chunks that must be compared before rows [first, first + count) are given out."""
        stop = first + count
        if count <= 1 and not self._single_rows and stop < self._num_rows:
            return []
        low = first // self._step
        undone = np.flatnonzero(~self._compared[low : (stop - 1) // self._step + 1]) + low
        return [
            chunk
            for chunk in undone.tolist()
            if self._is_due(
                chunk, min(stop, (chunk + 1) * self._step) - max(first, chunk * self._step)
            )
        ]

    def due_of_rows(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Chunks, in order, that must be compared before rows in any order are given out."""
        chunks = rows // self._step
        undone = chunks[~self._compared[chunks]]
        if not len(undone):
            return []
        found, counts = np.unique(undone, return_counts=True)
        pairs = zip(found.tolist(), counts.tolist(), strict=True)
        return [chunk for chunk, count in pairs if self._is_due(chunk, count)]

    def compare(self, chunk: int, data: npt.NDArray[Any]) -> None:
        """Compare one chunk, unless that was done before.

        Args:
            chunk: its number.
            data: its rows as they are stored, decoded and contiguous; what follows them is ignored.

        Raises:
            StoreError: they differ from their checksum.
        """
        if self._compared[chunk]:
            return
        num_rows = self.chunk_rows(chunk)
        rows = data.reshape(-1).view(np.uint8)[: num_rows * self._row_bytes]
        if layout.checksum(rows) != self._sums[chunk]:
            first = self._first_row + chunk * self._step
            raise StoreError(
                f"{self._path}: {self._name}, rows {first} to {first + num_rows - 1} differ from "
                f"their checksum. {repair_hint(self._path)}"
            )
        self._compared[chunk] = True

    def _is_due(self, chunk: int, count: int) -> bool:
        return count >= self._enough or count >= self.chunk_rows(chunk)
