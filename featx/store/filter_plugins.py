"""Filters of hdf5plugin, called without the lock of HDF5.

A filter plugin is a shared library that describes one function (H5PLextern.h and H5Zdevelop.h of
HDF5); ctypes releases the GIL while the function runs.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import os
import struct
import sys
import threading
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError

Bytes: TypeAlias = npt.NDArray[np.uint8]

_MAX_OVERHEAD = 1 << 16
"""Bytes that a compressor may add to data that it cannot compress."""

_BLOSC2_MAGIC = b"\x9e\xa8b2frame\0"
_BLOSC2_HEADER = 62
_BLOSC2_MAX_PADDING = 16


class _PluginClass(ctypes.Structure):
    """H5Z_class2_t of H5Zdevelop.h: description of a filter."""

    _fields_ = [
        ("version", ctypes.c_int),
        ("id", ctypes.c_int),
        ("encoder_present", ctypes.c_uint),
        ("decoder_present", ctypes.c_uint),
        ("name", ctypes.c_char_p),
        ("can_apply", ctypes.c_void_p),
        ("set_local", ctypes.c_void_p),
        ("filter", ctypes.c_void_p),
    ]


_FILTER_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_void_p),
)


class PluginFilter(abc.ABC):
    """Filter: encodes with the function of the plugin, decodes with the library behind it.

    The function of the plugin is not used to decode. For a damaged chunk, that of zstd returns an
    error code as if it were a size, and that of blosc2 shuts the library down while other threads
    use it. The decoders of the libraries write into our memory, at most one chunk.

    Attributes:
        name: name of the filter.
        number: HDF5 filter number.
    """

    name: str
    number: int

    def __init__(self, library: ctypes.CDLL) -> None:
        library.H5PLget_plugin_info.restype = ctypes.POINTER(_PluginClass)
        description = library.H5PLget_plugin_info().contents
        if description.version != 1 or description.id != self.number:
            raise OSError(f"{library} is not the filter {self.number}")
        self._filter = _FILTER_TYPE(description.filter)
        self._library = library
        # The filter frees the buffer that it gets, and the caller the one that it returns, so both
        # must come from malloc.
        self._c = ctypes.CDLL(None)
        self._c.malloc.restype = ctypes.c_void_p
        self._c.malloc.argtypes = [ctypes.c_size_t]
        self._c.free.argtypes = [ctypes.c_void_p]

    def encode(self, values: tuple[int, ...], data: Bytes) -> Bytes:
        """Encode a chunk as HDF5 would store it."""
        buffer = ctypes.c_void_p(self._c.malloc(max(1, len(data))))
        if not buffer:
            raise MemoryError(f"no {len(data)} bytes for the {self.name} filter")
        try:
            ctypes.memmove(buffer, data.ctypes.data, len(data))
            capacity = ctypes.c_size_t(len(data))
            parameters = (ctypes.c_uint * len(values))(*values)
            size = self._filter(
                0, len(values), parameters, len(data), ctypes.byref(capacity), ctypes.byref(buffer)
            )
            if not 0 < size <= 2 * len(data) + _MAX_OVERHEAD:
                raise StoreError(f"the {self.name} filter cannot encode {len(data)} bytes")
            result = np.empty(size, np.uint8)
            ctypes.memmove(result.ctypes.data, buffer, size)
            return result
        finally:
            self._c.free(buffer)

    @abc.abstractmethod
    def decode(self, values: tuple[int, ...], frame: Bytes, size: int) -> Bytes:
        """Decode a chunk of `size` bytes; raises StoreError if the frame is damaged."""


class Zstd(PluginFilter):
    """zstd, HDF5 filter 32015; its plugin does not call HDF5."""

    name = "zstd"
    number = 32015

    def __init__(self) -> None:
        super().__init__(ctypes.CDLL(str(_plugin_path(self.name))))
        self._decompress = self._library.ZSTD_decompress
        self._decompress.restype = ctypes.c_size_t
        self._decompress.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_size_t,
        ]

    def decode(self, values: tuple[int, ...], frame: Bytes, size: int) -> Bytes:
        decoded = np.empty(size, np.uint8)
        count = self._decompress(decoded.ctypes.data, size, frame.ctypes.data, len(frame))
        if count != size:  # an error code is larger than any size
            raise StoreError(f"the zstd frame is damaged, or not of {size} bytes")
        return decoded


class Blosc2(PluginFilter):
    """blosc2, HDF5 filter 32026, from a copy of its library that is not connected to HDF5.

    hdf5plugin connects the library to HDF5, so its errors go to the error stack of HDF5, which only
    one thread at a time may use. A second copy stays silent. The dynamic loader identifies a
    library by its inode, so the copy must be a file of its own.
    """

    name = "blosc2"
    number = 32026

    def __init__(self) -> None:
        copy = os.memfd_create("featx-blosc2", os.MFD_CLOEXEC)
        try:
            with open(copy, "wb", closefd=False) as file:
                file.write(_plugin_path(self.name).read_bytes())
            library = ctypes.CDLL(f"/proc/self/fd/{copy}")
        finally:
            os.close(copy)
        super().__init__(library)
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library.b2nd_from_cframe.argtypes = [pointer, size, ctypes.c_bool, ctypes.POINTER(pointer)]
        library.b2nd_to_cbuffer.argtypes = [pointer, pointer, size]
        library.b2nd_free.argtypes = [pointer]
        library.blosc2_schunk_from_buffer.argtypes = [pointer, size, ctypes.c_bool]
        library.blosc2_schunk_from_buffer.restype = pointer
        library.blosc2_schunk_decompress_chunk.argtypes = [pointer, size, pointer, ctypes.c_int32]
        library.blosc2_schunk_free.argtypes = [pointer]
        library.blosc2_init()  # not thread-safe, so it is called before the library is used

    def decode(self, values: tuple[int, ...], frame: Bytes, size: int) -> Bytes:
        problem = _blosc2_problem(frame, size) or _array_problem(frame, values[8:])
        if problem:
            raise StoreError(f"the blosc2 frame {problem}; the chunk has {size} bytes")
        decoded = np.empty(size, np.uint8)
        # The plugin writes chunks of several dimensions as n-dimensional arrays (b2nd).
        fill = self._fill_plain if len(values) == 7 else self._fill_array
        if not fill(frame, decoded):
            raise StoreError(f"the blosc2 frame is damaged, or not of {size} bytes")
        return decoded

    def _fill_array(self, frame: Bytes, decoded: Bytes) -> bool:
        """Decode a b2nd array; return whether it succeeded."""
        array = ctypes.c_void_p()
        opened = self._library.b2nd_from_cframe(
            frame.ctypes.data, len(frame), False, ctypes.byref(array)
        )
        if opened < 0:
            return False
        copy, target, size = self._library.b2nd_to_cbuffer, decoded.ctypes.data, len(decoded)
        try:
            return bool(copy(array, target, size) >= 0)
        finally:
            self._library.b2nd_free(array)

    def _fill_plain(self, frame: Bytes, decoded: Bytes) -> bool:
        """Decode a plain frame; return whether it succeeded."""
        opened = self._library.blosc2_schunk_from_buffer(frame.ctypes.data, len(frame), False)
        if not opened:
            return False
        try:
            count = self._library.blosc2_schunk_decompress_chunk(
                opened, 0, decoded.ctypes.data, len(decoded)
            )
            return bool(count == len(decoded))
        finally:
            self._library.blosc2_schunk_free(opened)


_loading = threading.Lock()


def load_filter(kind: type[Zstd] | type[Blosc2]) -> PluginFilter | None:
    """Filter object, or None if it cannot be used: another system than Linux, or no hdf5plugin."""
    with _loading:
        return _load(kind)


@functools.cache
def _load(kind: type[Zstd] | type[Blosc2]) -> PluginFilter | None:
    """Filter object, cached; see `load_filter`."""
    try:
        return kind()
    except (ImportError, OSError, AttributeError):
        return None


def _plugin_path(name: str) -> Path:
    """Path of a plugin of hdf5plugin."""
    import hdf5plugin

    if sys.platform != "linux":
        raise OSError("only tried on Linux")
    return Path(hdf5plugin.PLUGIN_PATH) / f"libh5{name}.so"


def _blosc2_problem(frame: Bytes, size: int) -> str:
    """Check the header of a frame, as blosc2 divides by sizes in it and allocates them.

    The layout is described in README_CFRAME_FORMAT of C-Blosc2. A frame holds one blosc2 chunk;
    with several dimensions its blocks may extend beyond the HDF5 chunk and make it larger.
    """
    header = frame[:_BLOSC2_HEADER].tobytes()
    if len(header) < _BLOSC2_HEADER or not header.startswith(_BLOSC2_MAGIC):
        return "has no header"
    length, decoded = (struct.unpack_from(">q", header, offset)[0] for offset in (16, 30))
    itemsize, block, chunk = (
        struct.unpack_from(">i", header, offset)[0] for offset in (48, 53, 58)
    )
    if length != len(frame):
        return f"claims to be {length} bytes, there are {len(frame)}"
    if not size <= decoded <= _BLOSC2_MAX_PADDING * size or chunk != decoded:
        return f"claims {decoded} bytes in chunks of {chunk}"
    if itemsize < 1 or not 0 < block <= decoded:
        return f"claims blocks of {block} bytes and items of {itemsize}"
    return ""


def _array_problem(frame: Bytes, shape: tuple[int, ...]) -> str:
    """Check the description of a b2nd array, whose shape must be that of the chunk.

    The description is msgpack: a list of version, number of dimensions, shape, chunk shape, block
    shape and more, with shapes as lists of big-endian numbers. blosc2 would loop over any shape.
    """
    if not shape:
        return ""
    header = frame[: struct.unpack_from(">i", frame.data, 11)[0]].tobytes()
    offset = header.find(b"\xde\0\1\xa4b2nd\xd2")  # the only one in the frame's list
    if offset < 0 or offset + 13 > len(header):
        return "describes no array"
    start = struct.unpack_from(">i", header, offset + 9)[0] + 5
    count = bytes([0x90 + len(shape)])
    expected = count + b"".join(b"\xd3" + length.to_bytes(8, "big") for length in shape)
    expected += count + b"".join(b"\xd2" + length.to_bytes(4, "big") for length in shape) + count
    blocks = start + 3 + len(expected)
    if header[start + 2 : blocks] != bytes([len(shape)]) + expected:
        return f"describes an array of another shape than {shape}"
    if len(header) < blocks + 5 * len(shape):
        return "ends within its description"
    for i, length in enumerate(shape):
        block = struct.unpack_from(">i", header, blocks + 5 * i + 1)[0]
        if not 0 < block <= length:
            return f"describes blocks of {block} in a dimension of {length}"
    return ""
