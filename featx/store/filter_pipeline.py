"""Filters of a dataset, applied without HDF5 so that several threads compress and decompress.

h5py holds one lock during every call of HDF5, including its filters. The filters here are the same
code, gzip in zlib and the others in the shared libraries of hdf5plugin, but called without the
lock; chunks are then written or read as raw bytes. Unknown filters are left to h5py.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError, require
from featx.store.filter_plugins import Blosc2, PluginFilter, Zstd, load_filter

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""(n,) uint8, contiguous."""

_DEFLATE = 1
_SHUFFLE = 2


class _Stage(Protocol):
    """One filter."""

    def encode(self, data: Bytes) -> Bytes: ...

    def decode(self, data: Bytes, size: int) -> Bytes: ...


class Pipeline:
    """Filters of a dataset, in the order in which they are applied when writing.

    Args:
        filters: number and parameters of each filter.
        chunk_bytes: size of a decoded chunk; edge chunks have the same size.

    Attributes:
        chunk_bytes: as above.
        is_supported: whether all filters are known here; otherwise h5py must be used.
    """

    def __init__(self, filters: list[tuple[int, tuple[int, ...]]], chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._stages: list[_Stage] = []
        self.is_supported = True
        for position, (number, values) in enumerate(filters):
            stage = _create_stage(number, values, chunk_bytes)
            # The decoded size of a compressor is known only if it is the last filter.
            if stage is None or (number != _SHUFFLE and position + 1 < len(filters)):
                self.is_supported = False
                return
            self._stages.append(stage)

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> Pipeline:
        """Filters of a chunked dataset, with the parameters that its file records."""
        properties = dataset.id.get_create_plist()
        filters = []
        for i in range(properties.get_nfilters()):
            number, _, values, _ = properties.get_filter(i)
            filters.append((number, values))
        chunk_bytes = (
            int(np.prod(dataset.chunks, dtype=np.int64)) * dataset.id.get_type().get_size()
        )
        return cls(filters, chunk_bytes)

    def __len__(self) -> int:
        return len(self._stages)

    def encode(self, chunk: Any) -> bytes:
        """Encode a whole chunk for write_direct_chunk with filter mask 0."""
        require(self.is_supported, "only h5py knows a filter of this pipeline")
        data = _flat(chunk)
        require(len(data) == self.chunk_bytes, f"{len(data)} bytes, a chunk has {self.chunk_bytes}")
        for stage in self._stages:
            data = stage.encode(data)
        return data.tobytes()

    def decode(self, stored: Any, filter_mask: int = 0) -> Bytes:
        """Decode a chunk.

        Returns:
            (chunk_bytes,) uint8.
        """
        require(self.is_supported, "only h5py knows a filter of this pipeline")
        data = _flat(stored)
        if filter_mask >> len(self._stages):
            raise StoreError(f"the filter mask {filter_mask:#x} names filters that are not there")
        for position in reversed(range(len(self._stages))):
            if not filter_mask >> position & 1:
                data = self._stages[position].decode(data, self.chunk_bytes)
        if len(data) != self.chunk_bytes:
            raise StoreError(f"{len(data)} bytes instead of the {self.chunk_bytes} of a chunk")
        return data


def _create_stage(number: int, values: tuple[int, ...], chunk_bytes: int) -> _Stage | None:
    """Filter for an HDF5 filter number and parameters, or None if featx does not implement it."""
    if number == _DEFLATE and len(values) == 1 and values[0] <= 9:
        return _Deflate(values[0])
    if number == _SHUFFLE and len(values) == 1 and values[0] > 0:
        return _Shuffle(values[0])
    plugin = None
    if number == Zstd.number and len(values) <= 1:
        plugin = load_filter(Zstd)
    elif number == Blosc2.number and len(values) >= 7 and values[3] == chunk_bytes:
        # For chunks of several dimensions, their number and the chunk shape follow.
        plugin = load_filter(Blosc2) if len(values) in (7, 8 + (*values, 0)[7]) else None
    return None if plugin is None else _PluginStage(plugin, values)


class _Deflate:
    """HDF5 filter 1, gzip."""

    def __init__(self, level: int) -> None:
        self._level = level

    def encode(self, data: Bytes) -> Bytes:
        return _flat(zlib.compress(data.data, self._level))

    def decode(self, data: Bytes, size: int) -> Bytes:
        stream = zlib.decompressobj()
        try:
            # With room for one more byte, an exact stream reaches its end and a longer one shows.
            decoded = stream.decompress(data.data, size + 1)
        except zlib.error as error:
            raise StoreError(f"the gzip stream is damaged ({error})") from error
        if len(decoded) > size:
            raise StoreError(f"the gzip stream holds more than the {size} bytes of a chunk")
        if not stream.eof or stream.unused_data:
            raise StoreError("the gzip stream does not end where the chunk does")
        return _flat(decoded)


class _Shuffle:
    """HDF5 filter 2: the lowest bytes of all numbers first, then the next ones, and so on."""

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize

    def encode(self, data: Bytes) -> Bytes:
        numbers, rest = self._split(data)
        planes = numbers.reshape(-1, self._itemsize).T
        return np.concatenate([np.ascontiguousarray(planes).reshape(-1), rest])

    def decode(self, data: Bytes, size: int) -> Bytes:
        numbers, rest = self._split(data)
        planes = numbers.reshape(self._itemsize, -1).T
        return np.concatenate([np.ascontiguousarray(planes).reshape(-1), rest])

    def _split(self, data: Bytes) -> tuple[Bytes, Bytes]:
        """Whole numbers, and the bytes after the last one, which stay in place."""
        whole = len(data) - len(data) % self._itemsize
        return data[:whole], data[whole:]


class _PluginStage:
    """Filter of hdf5plugin, called as HDF5 calls it."""

    def __init__(self, plugin: PluginFilter, values: tuple[int, ...]) -> None:
        self._plugin = plugin
        self._values = values

    def encode(self, data: Bytes) -> Bytes:
        return self._plugin.encode(self._values, data)

    def decode(self, data: Bytes, size: int) -> Bytes:
        return self._plugin.decode(self._values, data, size)


def _flat(data: Any) -> Bytes:
    """View contiguous bytes as (n,) uint8, without a copy."""
    if isinstance(data, np.ndarray):
        require(data.flags.c_contiguous, "a chunk must be contiguous")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)
