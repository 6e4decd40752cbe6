"""Filters of a dataset, applied without HDF5 so that several threads compress and decompress.

h5py holds one lock during every call of HDF5, including its filters. The filters here are the same
code, gzip in zlib and zstd in the shared library of hdf5plugin, but called without the lock; chunks
are then written or read as raw bytes. Unknown filters are left to h5py.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from pathlib import Path
from typing import TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError, require
from featx.store.layout import Block

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""(n,) uint8, contiguous."""

_DEFLATE, _SHUFFLE, _ZSTD = 1, 2, 32015
"""Numbers of HDF5 filters."""

_ZSTD_LEVEL = 3
"""Level of the zstd filter without a parameter."""


class Pipeline:
    """Filters of a dataset, in the order in which they are applied when writing.

    Attributes:
        filters: number and parameters of each.
        chunk_bytes: size of a decoded chunk; edge chunks have the same size.
        is_supported: whether all filters are known here; otherwise h5py must be used.
    """

    def __init__(self, filters: list[tuple[int, tuple[int, ...]]], chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.filters = filters
        # The decoded size of a compressor is known only if it is the last filter.
        self.is_supported = all(
            _is_known(number, values) and (number == _SHUFFLE or i + 1 == len(filters))
            for i, (number, values) in enumerate(filters)
        )

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> Pipeline:
        """Filters of a chunked dataset, with the parameters that its file records."""
        properties = dataset.id.get_create_plist()
        recorded = (properties.get_filter(i) for i in range(properties.get_nfilters()))
        filters = [(number, values) for number, _, values, _ in recorded]
        num_values = int(np.prod(dataset.chunks, dtype=np.int64))
        return cls(filters, num_values * dataset.id.get_type().get_size())

    def encode(self, chunk: Block) -> bytes:
        """Encode a whole chunk for write_direct_chunk with filter mask 0."""
        require(self.is_supported, "only h5py knows a filter of this pipeline")
        data = _flat(chunk)
        require(len(data) == self.chunk_bytes, f"{len(data)} bytes, a chunk has {self.chunk_bytes}")
        for number, values in self.filters:
            data = _encode(number, values, data)
        return data.tobytes()

    def decode(self, stored: Block, filter_mask: int = 0) -> Bytes:
        """Decode a chunk to (chunk_bytes,) uint8."""
        require(self.is_supported, "only h5py knows a filter of this pipeline")
        data = _flat(stored)
        if filter_mask >> len(self.filters):
            raise StoreError(f"the filter mask {filter_mask:#x} names filters that are not there")
        for position, (number, values) in reversed(list(enumerate(self.filters))):
            if not filter_mask >> position & 1:
                data = _decode(number, values, data, self.chunk_bytes)
        if len(data) != self.chunk_bytes:
            raise StoreError(f"{len(data)} bytes instead of the {self.chunk_bytes} of a chunk")
        return data


def _is_known(number: int, values: tuple[int, ...]) -> bool:
    if number == _DEFLATE:
        return len(values) == 1 and values[0] <= 9
    if number == _SHUFFLE:
        return len(values) == 1 and values[0] > 0
    return number == _ZSTD and len(values) <= 1 and _zstd_library() is not None


def _encode(number: int, values: tuple[int, ...], data: Bytes) -> Bytes:
    if number == _DEFLATE:
        return _flat(zlib.compress(data.data, values[0]))
    if number == _SHUFFLE:
        # The lowest bytes of all numbers first, then the next ones, and so on.
        whole = len(data) - len(data) % values[0]
        planes = data[:whole].reshape(-1, values[0]).T
        return np.concatenate([np.ascontiguousarray(planes).reshape(-1), data[whole:]])
    library = _zstd_library()
    assert library is not None
    encoded = np.empty(library.ZSTD_compressBound(len(data)), np.uint8)
    level = values[0] if values else _ZSTD_LEVEL
    size = library.ZSTD_compress(
        encoded.ctypes.data, len(encoded), data.ctypes.data, len(data), level
    )
    if size > len(encoded):  # an error code is larger than any size
        raise StoreError(f"zstd cannot encode {len(data)} bytes")
    return encoded[:size]


def _decode(number: int, values: tuple[int, ...], data: Bytes, size: int) -> Bytes:
    if number == _DEFLATE:
        stream = zlib.decompressobj()
        try:
            # With room for one more byte, an exact stream reaches its end and a longer one shows.
            inflated = stream.decompress(data.data, size + 1)
        except zlib.error as error:
            raise StoreError(f"the gzip stream is damaged ({error})") from error
        if len(inflated) > size:
            raise StoreError(f"the gzip stream holds more than the {size} bytes of a chunk")
        if not stream.eof or stream.unused_data:
            raise StoreError("the gzip stream does not end where the chunk does")
        return _flat(inflated)
    if number == _SHUFFLE:
        whole = len(data) - len(data) % values[0]
        planes = data[:whole].reshape(values[0], -1).T
        return np.concatenate([np.ascontiguousarray(planes).reshape(-1), data[whole:]])
    library = _zstd_library()
    assert library is not None
    # Unlike the function of the filter, this one writes into our memory, at most one chunk.
    decoded = np.empty(size, np.uint8)
    if library.ZSTD_decompress(decoded.ctypes.data, size, data.ctypes.data, len(data)) != size:
        raise StoreError(f"the zstd frame is damaged, or not of {size} bytes")
    return decoded


@functools.cache
def _zstd_library() -> ctypes.CDLL | None:
    """zstd as hdf5plugin ships it, called without the GIL; None if it cannot be loaded."""
    try:
        import hdf5plugin

        library = ctypes.CDLL(str(Path(hdf5plugin.PLUGIN_PATH) / "libh5zstd.so"))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.ZSTD_compressBound.argtypes, library.ZSTD_compressBound.restype = [size], size
        library.ZSTD_compress.argtypes = [pointer, size, pointer, size, ctypes.c_int]
        library.ZSTD_decompress.argtypes = [pointer, size, pointer, size]
        library.ZSTD_compress.restype = library.ZSTD_decompress.restype = size
    except (ImportError, OSError, AttributeError):
        return None
    return library


def _flat(data: Block) -> Bytes:
    """View contiguous bytes as (n,) uint8, without a copy."""
    if isinstance(data, np.ndarray):
        require(data.flags.c_contiguous, "a chunk must be contiguous")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)
