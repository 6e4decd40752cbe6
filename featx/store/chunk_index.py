"""Addresses of the chunks of a dataset: requested from HDF5 once, checked, and kept in arrays."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.store import layout
from featx.store.filter_pipeline import Pipeline

_FEW_LOOK_UPS = 32
_MANY_CHUNKS = 20_000
"""Number of chunks above which the first _FEW_LOOK_UPS chunks are looked up one by one.

A look-up takes 20 ns times the number of chunks, a listing of all 3 µs per chunk.
"""


class ChunkIndex:
    """Addresses of the chunks of a dataset, requested from HDF5 when needed and checked.

    Args:
        dataset: chunked dataset.
        label: name of the dataset, for messages.
        pipeline: filters of the dataset.
        file_bytes: size of the file.

    Attributes:
        at: (chunks,) address of the first byte, -1 if unknown or not usable.
        origin: (chunks,) address that row 0 would have if all chunks lay in line with this one.
        size: (chunks,) bytes in the file.
        mask: (chunks,) filter mask.
        whole: whether every chunk is known and usable.

    Raises:
        StoreError: the dataset claims more chunks than fit into the file.
    """

    def __init__(
        self, dataset: h5py.Dataset, label: str, pipeline: Pipeline, file_bytes: int
    ) -> None:
        self._dataset = dataset
        self._label = label
        self._file_bytes = file_bytes
        self._chunk_bytes = pipeline.chunk_bytes
        self._num_filters = len(pipeline)
        self._chunk_rows = int(dataset.chunks[0])
        self._count = -(-dataset.shape[0] // self._chunk_rows)
        if self._count * (1 if self._num_filters else self._chunk_bytes) > file_bytes:
            raise StoreError(
                f"{label} claims {self._count} chunks; the file has {file_bytes} bytes, refused."
            )
        self.at = np.full(self._count, -1, np.int64)
        self.origin = self.at.copy()
        self.size = np.zeros(self._count, np.int64)
        self.mask = np.zeros(self._count, np.int64)
        self._faults: dict[int, str] = {}
        self._looked_up = 0
        self._complete = False
        self.whole = False
        self._lock = threading.Lock()

    def find(self, chunks: npt.NDArray[np.int64]) -> None:
        """Make `at`, `size`, `mask` and `origin` valid for some chunks.

        Raises:
            StoreError: a chunk is not in the file, or its address is impossible.
        """
        if self.whole or (self.at[chunks] >= 0).all():
            return
        with self._lock:
            missing = np.unique(chunks[self.at[chunks] < 0])
            try:
                self._ask(missing)
            except (OSError, RuntimeError, ValueError, OverflowError) as error:
                if not layout.is_damage(error):
                    raise
                raise StoreError(f"{self._label}: its chunks cannot be listed ({error})") from error
        lost = missing[self.at[missing] < 0]
        if len(lost):
            chunk = int(lost[0])
            reason = self._faults.get(chunk, "was never written")
            row = chunk * self._chunk_rows
            raise StoreError(f"{self._label}: the chunk that starts with row {row} {reason}")

    def _ask(self, missing: npt.NDArray[np.int64]) -> None:
        """Request chunks from HDF5: some of them, or all at once."""
        if self._complete:
            return
        infos: list[h5py.h5d.StoreInfo] = []
        self._looked_up += len(missing)
        if self._count > _MANY_CHUNKS and self._looked_up <= _FEW_LOOK_UPS:
            rest = (0,) * (self._dataset.ndim - 1)
            for chunk in missing.tolist():
                corner = (chunk * self._chunk_rows, *rest)
                infos.append(self._dataset.id.get_chunk_info_by_coord(corner))
            self._note([info for info in infos if info.byte_offset is not None])
            return
        self._dataset.id.chunk_iter(infos.append)
        self._note([info for info in infos if info.byte_offset is not None])
        self._fault_overlaps()
        self._complete = True
        self.whole = bool((self.at >= 0).all())

    def _note(self, infos: Sequence[h5py.h5d.StoreInfo]) -> None:
        """Check the entries that HDF5 returned, and store the usable ones."""
        if not infos:
            return
        table = np.array(
            [(i.chunk_offset[0], i.byte_offset, i.size, i.filter_mask) for i in infos], np.int64
        )
        chunk, rest = np.divmod(table[:, 0], self._chunk_rows)
        if (rest != 0).any() or chunk.max() >= self._count or len(np.unique(chunk)) < len(chunk):
            raise StoreError(f"{self._label}: the index of its chunks is damaged")
        at, size, mask = table[:, 1], table[:, 2], table[:, 3]
        outside = (at < 0) | (size < 1) | (at > self._file_bytes - size)
        odd = (mask != 0) | (size != self._chunk_bytes)
        odd &= not self._num_filters
        for i in np.flatnonzero(outside | odd).tolist():
            self._faults[int(chunk[i])] = (
                f"lies at bytes {at[i]} to {at[i] + size[i]}, the file has {self._file_bytes}"
                if outside[i]
                else f"has {size[i]} bytes and filter mask {mask[i]:#x}, expected "
                f"{self._chunk_bytes} and none"
            )
        good = ~(outside | odd)
        chunk = chunk[good]
        self.size[chunk], self.mask[chunk] = size[good], mask[good]
        # Other threads read without the lock: `at` is set last, as it says that the rest is valid.
        self.origin[chunk] = at[good] - chunk * self._chunk_bytes
        self.at[chunk] = at[good]

    def _fault_overlaps(self) -> None:
        """Mark chunks that share bytes as unusable: one would be read for the other."""
        order = np.argsort(self.at, kind="stable")
        order = order[self.at[order] >= 0]
        over = self.at[order[:-1]] + self.size[order[:-1]] > self.at[order[1:]]
        for i in np.flatnonzero(over).tolist():
            for chunk in (int(order[i]), int(order[i + 1])):
                self._faults[chunk] = "overlaps another one"
                self.at[chunk] = -1
