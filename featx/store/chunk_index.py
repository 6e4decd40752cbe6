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

_MAX_LOOK_UPS = 32
_MANY_CHUNKS = 20_000
"""Number of chunks above which the first _MAX_LOOK_UPS chunks are looked up one by one.

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
        address: (chunks,) address of the first byte, -1 if unknown or not usable.
        origin: (chunks,) address that row 0 would have if all chunks lay in line with this one.
        size: (chunks,) bytes in the file.
        mask: (chunks,) filter mask.
        is_complete: whether every chunk is known and usable.

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
        self._num_chunks = -(-dataset.shape[0] // self._chunk_rows)
        if self._num_chunks * (1 if self._num_filters else self._chunk_bytes) > file_bytes:
            raise StoreError(
                f"{label} claims {self._num_chunks} chunks; the file has {file_bytes} bytes, "
                "refused."
            )
        self.address = np.full(self._num_chunks, -1, np.int64)
        self.origin = self.address.copy()
        self.size = np.zeros(self._num_chunks, np.int64)
        self.mask = np.zeros(self._num_chunks, np.int64)
        self._faults: dict[int, str] = {}
        self._num_look_ups = 0
        self._is_listed = False
        self.is_complete = False
        self._lock = threading.Lock()

    def find(self, chunks: npt.NDArray[np.int64]) -> None:
        """Make `address`, `size`, `mask` and `origin` valid for some chunks.

        Raises:
            StoreError: a chunk is not in the file, or its address is impossible.
        """
        if self.is_complete or (self.address[chunks] >= 0).all():
            return
        with self._lock:
            missing = np.unique(chunks[self.address[chunks] < 0])
            try:
                self._request(missing)
            except (OSError, RuntimeError, ValueError, OverflowError) as error:
                if not layout.is_damage(error):
                    raise
                raise StoreError(f"{self._label}: its chunks cannot be listed ({error})") from error
        unknown = missing[self.address[missing] < 0]
        if len(unknown):
            chunk = int(unknown[0])
            reason = self._faults.get(chunk, "was never written")
            row = chunk * self._chunk_rows
            raise StoreError(f"{self._label}: the chunk that starts with row {row} {reason}")

    def _request(self, missing: npt.NDArray[np.int64]) -> None:
        """Request chunks from HDF5: some of them, or all at once."""
        if self._is_listed:
            return
        infos: list[h5py.h5d.StoreInfo] = []
        self._num_look_ups += len(missing)
        if self._num_chunks > _MANY_CHUNKS and self._num_look_ups <= _MAX_LOOK_UPS:
            rest = (0,) * (self._dataset.ndim - 1)
            for chunk in missing.tolist():
                corner = (chunk * self._chunk_rows, *rest)
                infos.append(self._dataset.id.get_chunk_info_by_coord(corner))
            self._add_entries([info for info in infos if info.byte_offset is not None])
            return
        self._dataset.id.chunk_iter(infos.append)
        self._add_entries([info for info in infos if info.byte_offset is not None])
        self._exclude_overlaps()
        self._is_listed = True
        self.is_complete = bool((self.address >= 0).all())

    def _add_entries(self, infos: Sequence[h5py.h5d.StoreInfo]) -> None:
        """Check the entries that HDF5 returned, and store the usable ones."""
        if not infos:
            return
        table = np.array(
            [(i.chunk_offset[0], i.byte_offset, i.size, i.filter_mask) for i in infos], np.int64
        )
        chunk, rest = np.divmod(table[:, 0], self._chunk_rows)
        is_repeated = len(np.unique(chunk)) < len(chunk)
        if (rest != 0).any() or chunk.max() >= self._num_chunks or is_repeated:
            raise StoreError(f"{self._label}: the index of its chunks is damaged")
        address, size, mask = table[:, 1], table[:, 2], table[:, 3]
        is_outside = (address < 0) | (size < 1) | (address > self._file_bytes - size)
        is_malformed = (mask != 0) | (size != self._chunk_bytes)
        is_malformed &= not self._num_filters
        for i in np.flatnonzero(is_outside | is_malformed).tolist():
            self._faults[int(chunk[i])] = (
                f"lies at bytes {address[i]} to {address[i] + size[i]}, the file has "
                f"{self._file_bytes}"
                if is_outside[i]
                else f"has {size[i]} bytes and filter mask {mask[i]:#x}, expected "
                f"{self._chunk_bytes} and none"
            )
        is_usable = ~(is_outside | is_malformed)
        chunk = chunk[is_usable]
        self.size[chunk], self.mask[chunk] = size[is_usable], mask[is_usable]
        # Other threads read without the lock: `address` is set last, as it says that the rest is
        # valid.
        self.origin[chunk] = address[is_usable] - chunk * self._chunk_bytes
        self.address[chunk] = address[is_usable]

    def _exclude_overlaps(self) -> None:
        """Mark chunks that share bytes as unusable: one would be read for the other."""
        order = np.argsort(self.address, kind="stable")
        order = order[self.address[order] >= 0]
        is_overlapping = self.address[order[:-1]] + self.size[order[:-1]] > self.address[order[1:]]
        for i in np.flatnonzero(is_overlapping).tolist():
            for chunk in (int(order[i]), int(order[i + 1])):
                self._faults[chunk] = "overlaps another one"
                self.address[chunk] = -1
