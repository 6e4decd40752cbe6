"""The filters of hdf5plugin, called as HDF5 calls them but without HDF5's lock.

A filter plugin is a shared library that describes one function (HDF5's H5PLextern.h and
H5Zdevelop.h); ctypes lets other threads run while it works.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError

Bytes: TypeAlias = npt.NDArray[np.uint8]

ZSTD = 32015
BLOSC2 = 32026

_REVERSE = 0x0100
"""H5Z_FLAG_REVERSE: the filter undoes itself."""

_MAX_OVERHEAD = 1 << 16
"""Bytes that a compressor may add to what it cannot compress."""

_BLOSC2_MAGIC = b"\x9e\xa8b2frame\0"
_BLOSC2_HEADER = 62
_BLOSC2_MAX_PADDING = 16


class _PluginClass(ctypes.Structure):
    """H5Z_class2_t of HDF5's H5Zdevelop.h: how a filter describes itself."""

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


class PluginFilter:
    """The function H5Z_func_t of one plugin; ctypes lets other threads run while it works."""

    def __init__(
        self,
        library: ctypes.CDLL,
        number: int,
        name: str,
        fault: Callable[[Bytes, int], str],
    ) -> None:
        self.name = name
        self.fault = fault
        library.H5PLget_plugin_info.restype = ctypes.POINTER(_PluginClass)
        described = library.H5PLget_plugin_info().contents
        if described.version != 1 or described.id != number:
            raise OSError(f"{library} is not the filter {number}")
        self._filter = _FILTER_TYPE(described.filter)
        self._library = library
        # The filter frees the buffer that it is given, and we the one that it returns: malloc's.
        self._c = ctypes.CDLL(None)
        self._c.malloc.restype = ctypes.c_void_p
        self._c.malloc.argtypes = [ctypes.c_size_t]
        self._c.free.argtypes = [ctypes.c_void_p]

    def __call__(self, values: tuple[int, ...], data: Bytes, decoded: int | None = None) -> Bytes:
        """The filter's output for `data`; `decoded`: its size where the filter is undone."""
        buffer = ctypes.c_void_p(self._c.malloc(max(1, len(data))))
        if not buffer:
            raise MemoryError(f"no {len(data)} bytes for the {self.name} filter")
        try:
            ctypes.memmove(buffer, data.ctypes.data, len(data))
            room = ctypes.c_size_t(len(data))
            parameters = (ctypes.c_uint * len(values))(*values)
            size = self._filter(
                0 if decoded is None else _REVERSE,
                len(values),
                parameters,
                len(data),
                ctypes.byref(room),
                ctypes.byref(buffer),
            )
            # The zstd filter returns its negative error codes as if they were sizes.
            if decoded is not None and size != decoded:
                raise StoreError(f"the {self.name} frame is damaged")
            if not 0 < size <= 2 * len(data) + _MAX_OVERHEAD and decoded is None:
                raise StoreError(f"the {self.name} filter cannot encode {len(data)} bytes")
            result = np.empty(size, np.uint8)
            ctypes.memmove(result.ctypes.data, buffer, size)
            return result
        finally:
            self._c.free(buffer)


@functools.cache
def zstd_filter() -> PluginFilter | None:
    try:
        library = ctypes.CDLL(str(_plugin_path("zstd")))
        size_of = library.ZSTD_getFrameContentSize
        size_of.restype = ctypes.c_ulonglong
        size_of.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

        def fault(frame: Bytes, size: int) -> str:
            claimed = size_of(frame.ctypes.data, len(frame))
            return "" if claimed == size else f"claims {claimed} bytes"

        return PluginFilter(library, ZSTD, "zstd", fault)
    except (ImportError, OSError, AttributeError):
        return None


@functools.cache
def blosc2_filter() -> PluginFilter | None:
    """The blosc2 filter from a copy of its library that knows nothing of HDF5.

    hdf5plugin ties the library to HDF5, and the filter then reports its failures to HDF5's error
    stack, which only one thread at a time may touch. A second copy that was never tied stays
    silent. The loader knows a library by its inode, so the copy must be a file of its own.
    """
    try:
        copy = os.memfd_create("featx-blosc2", os.MFD_CLOEXEC)
        try:
            with open(copy, "wb", closefd=False) as file:
                file.write(_plugin_path("blosc2").read_bytes())
            library = ctypes.CDLL(f"/proc/self/fd/{copy}")
        finally:
            os.close(copy)
        return PluginFilter(library, BLOSC2, "blosc2", _blosc2_fault)
    except (ImportError, OSError, AttributeError):
        return None


def _plugin_path(name: str) -> Path:
    import hdf5plugin

    if sys.platform != "linux":
        raise OSError("only tried on Linux")
    return Path(hdf5plugin.PLUGIN_PATH) / f"libh5{name}.so"


def _blosc2_fault(frame: Bytes, size: int) -> str:
    """What is wrong with a frame's header: blosc2 divides by its sizes, and allocates them.

    The layout is that of C-Blosc2's README_CFRAME_FORMAT. A frame holds one blosc2 chunk; in more
    than one dimension its blocks may stick out, and so make it larger than the HDF5 chunk.
    """
    header = frame[:_BLOSC2_HEADER].tobytes()
    if len(header) < _BLOSC2_HEADER or not header.startswith(_BLOSC2_MAGIC):
        return "has no header"
    length, decoded = (
        struct.unpack_from(">Q", header, 16)[0],
        struct.unpack_from(">q", header, 30)[0],
    )
    itemsize, block, chunk = (struct.unpack_from(">i", header, at)[0] for at in (48, 53, 58))
    if length != len(frame):
        return f"claims to be {length} bytes, there are {len(frame)}"
    if not size <= decoded <= _BLOSC2_MAX_PADDING * size or chunk != decoded:
        return f"claims {decoded} bytes in chunks of {chunk}"
    if itemsize < 1 or not 0 < block <= decoded:
        return f"claims blocks of {block} bytes and items of {itemsize}"
    return ""
