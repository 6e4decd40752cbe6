"""Checksums for texts in attributes, which HDF5 keeps in global heaps without checksums.

All other metadata of this version of HDF5 files has checksums. One flipped bit in a heap can send
HDF5 into an endless loop, so heaps are compared before any text is read.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import h5py
import numpy as np

from featx.errors import StoreError
from featx.store import layout

_SIGNATURE = b"GCOL\x01\0\0\0"
"""First bytes of a heap; its length in bytes follows, 8 bytes little-endian."""


def seal_texts(file: h5py.File, raw: io.RawIOBase | io.BytesIO) -> None:
    """Record the addresses and checksums of the heaps in an attribute."""
    file.flush()
    raw.seek(0)
    data = raw.read()
    heaps = []
    address = data.find(_SIGNATURE)
    while address >= 0:
        begin = address + len(_SIGNATURE)
        size = int.from_bytes(data[begin : begin + 8], "little")
        heaps.append((address, size, layout.checksum(data[address : address + size])))
        address = data.find(_SIGNATURE, address + size)
    file.attrs[layout.TEXT_CHECKSUMS] = np.array(heaps, dtype=np.uint64)


def check_texts(file: h5py.File, read: Callable[[int, int], bytes]) -> None:
    """Compare the heaps of a file with their checksums."""
    # samples.h5 has no attributes with texts, so it has no heaps and no checksums of heaps.
    heaps = np.reshape(file.attrs.get(layout.TEXT_CHECKSUMS, ()), (-1, 3))
    for address, size, crc in heaps.tolist():
        if address + size > file.id.get_filesize() or layout.checksum(read(size, address)) != crc:
            raise StoreError("the texts of its attributes differ from their checksum")
