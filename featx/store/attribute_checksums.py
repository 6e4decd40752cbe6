"""Checksums for the texts of attributes: HDF5 keeps them in heaps that have none.

All other metadata of the format's version has a checksum of HDF5's own. A heap has not, and one
flipped bit in it can keep HDF5 busy for ever, so nobody reads a text before its heap was compared.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable

import h5py
import numpy as np

from featx.errors import StoreError
from featx.store import layout

_SIGNATURE = b"GCOL\x01\0\0\0"
"""What a heap begins with; its length in bytes follows, 8 of them, little-endian."""


def seal_texts(file: h5py.File, raw: io.RawIOBase | io.BytesIO) -> None:
    """Note where the heaps lie and what they sum to.

    Args:
        file: open for writing, with all of its texts, and no rows yet.
        raw: the very same file, as bytes.
    """
    file.flush()
    raw.seek(0)
    data = raw.read()
    heaps = []
    address = data.find(_SIGNATURE)
    while address >= 0:
        begin = address + len(_SIGNATURE)
        size = int.from_bytes(data[begin : begin + 8], "little")
        heaps.append((address, size, zlib.crc32(data[address : address + size])))
        address = data.find(_SIGNATURE, address + size)
    file.attrs[layout.TEXT_CHECKSUMS] = np.array(heaps, dtype=np.uint64)


def check_texts(file: h5py.File, read: Callable[[int, int], bytes]) -> None:
    """Compare the heaps of a file with their checksums.

    Args:
        file: open for reading.
        read: (size, address) -> the bytes of the very same file.

    Raises:
        StoreError: one of them is damaged.
    """
    # samples.h5 has no attributes with texts, so it has no heaps and no checksums of heaps.
    heaps = np.reshape(file.attrs.get(layout.TEXT_CHECKSUMS, ()), (-1, 3))
    for address, size, crc in heaps.tolist():
        if address + size > file.id.get_filesize() or zlib.crc32(read(size, address)) != crc:
            raise StoreError("the texts of its attributes differ from their checksum")
