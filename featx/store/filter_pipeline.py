"""The filters of one dataset, applied by us: many threads compress and decompress at once.

h5py holds one lock around every call of HDF5, its filters included. The filters are the same code
here, gzip in zlib and the others in hdf5plugin's own shared libraries, but called without the lock;
the bytes are then written or read as raw chunks. What is not known here is left to h5py.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError, require
from featx.store.filter_plugins import Blosc2, PluginFilter, Zstd, load

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""(n,) uint8, contiguous."""

_DEFLATE = 1
_SHUFFLE = 2


class _Stage(Protocol):
    def encode(self, data: Bytes) -> Bytes: ...

    def decode(self, data: Bytes, size: int) -> Bytes: ...


class Pipeline:
    """The filters of one dataset, in the order in which they are applied when writing.

    Attributes:
        chunk_bytes: of a whole chunk when decoded; edge chunks are as large as the others.
        supported: whether all filters are known here; else the dataset is a case for h5py.
    """

    def __init__(self, filters: list[tuple[int, tuple[int, ...]]], chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._stages: list[_Stage] = []
        self.supported = True
        for position, (number, values) in enumerate(filters):
            stage = _stage(number, values, chunk_bytes)
            # A compressor must come last: only then is the size of what it decodes known.
            if stage is None or (number != _SHUFFLE and position + 1 < len(filters)):
                self.supported = False
                return
            self._stages.append(stage)

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> Pipeline:
        """The filters of a chunked dataset, with the parameters that HDF5 stored for them."""
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
        """A whole chunk, C order, as the bytes for write_direct_chunk (filter mask 0).

        Args:
            chunk: anything with chunk_bytes contiguous bytes.
        """
        require(self.supported, "this pipeline is a case for h5py")
        data = _flat(chunk)
        require(len(data) == self.chunk_bytes, f"{len(data)} bytes, a chunk has {self.chunk_bytes}")
        for stage in self._stages:
            data = stage.encode(data)
        return data.tobytes()

    def decode(self, stored: Any, filter_mask: int = 0) -> Bytes:
        """The bytes of a whole chunk, (chunk_bytes,) uint8, from what the file holds of it.

        Args:
            stored: the chunk's bytes, anything contiguous.
            filter_mask: bit i is set where filter i was left out when this chunk was written.

        Raises:
            StoreError: the bytes are damaged; no more than a chunk is ever made of them.
        """
        require(self.supported, "this pipeline is a case for h5py")
        data = _flat(stored)
        if filter_mask >> len(self._stages):
            raise StoreError(f"the filter mask {filter_mask:#x} names filters that are not there")
        for position in reversed(range(len(self._stages))):
            if not filter_mask >> position & 1:
                data = self._stages[position].decode(data, self.chunk_bytes)
        if len(data) != self.chunk_bytes:
            raise StoreError(f"{len(data)} bytes instead of the {self.chunk_bytes} of a chunk")
        return data


def _stage(number: int, values: tuple[int, ...], chunk_bytes: int) -> _Stage | None:
    """The filter of that number, or None where it is not known here."""
    if number == _DEFLATE and len(values) == 1 and values[0] <= 9:
        return _Deflate(values[0])
    if number == _SHUFFLE and len(values) == 1 and values[0] > 0:
        return _Shuffle(values[0])
    called = None
    if number == Zstd.number and len(values) <= 1:
        called = load(Zstd)
    elif number == Blosc2.number and len(values) >= 7 and values[3] == chunk_bytes:
        # For a chunk of several dimensions, their number and its shape follow.
        called = load(Blosc2) if len(values) in (7, 8 + (*values, 0)[7]) else None
    return None if called is None else _Plugged(called, values)


class _Deflate:
    def __init__(self, level: int) -> None:
        self._level = level

    def encode(self, data: Bytes) -> Bytes:
        return _flat(zlib.compress(data.data, self._level))

    def decode(self, data: Bytes, size: int) -> Bytes:
        stream = zlib.decompressobj()
        try:
            # One byte more than fits: an exact stream comes to its end, a longer one shows.
            decoded = stream.decompress(data.data, size + 1)
        except zlib.error as error:
            raise StoreError(f"the gzip stream is damaged ({error})") from error
        if len(decoded) > size:
            raise StoreError(f"the gzip stream holds more than the {size} bytes of a chunk")
        if not stream.eof or stream.unused_data:
            raise StoreError("the gzip stream does not end where the chunk does")
        return _flat(decoded)


class _Shuffle:
    """HDF5's shuffle: first the lowest byte of every number, then the next one, and so on."""

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
        """Whole numbers, and the bytes behind the last one, which stay where they are."""
        whole = len(data) - len(data) % self._itemsize
        return data[:whole], data[whole:]


class _Plugged:
    """A filter of hdf5plugin, called as HDF5 calls it."""

    def __init__(self, called: PluginFilter, values: tuple[int, ...]) -> None:
        self._called = called
        self._values = values

    def encode(self, data: Bytes) -> Bytes:
        return self._called.encode(self._values, data)

    def decode(self, data: Bytes, size: int) -> Bytes:
        return self._called.decode(self._values, data, size)


def _flat(data: Any) -> Bytes:
    """Anything with contiguous bytes as (n,) uint8, without a copy."""
    if isinstance(data, np.ndarray):
        require(data.flags.c_contiguous, "a chunk must be contiguous")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)
