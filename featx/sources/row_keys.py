"""Keys of rows: made from numbers, and found in a sorted listing."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from featx.types import ImageFault, Status

_DIGITS = 6


def numbered_keys(count: int, prefix: str = "") -> npt.NDArray[np.bytes_]:
    """(N,) bytes: '000000', '000001', ...; all of one length, so that they sort as numbers."""
    digits = max(_DIGITS, len(str(count - 1)))
    keys = np.empty(count, dtype=f"S{len(prefix) + digits}")
    form = f"{prefix}%0{digits}d".encode()
    for start in range(0, count, 1 << 16):
        stop = min(count, start + (1 << 16))
        keys[start:stop] = [form % row for row in range(start, stop)]
    return keys


def row_of(key: bytes, prefix: str = "") -> int:
    """The row that a numbered key stands for."""
    return int(key[len(prefix) :])


def sampled_marks(count: int, read: Callable[[int], bytes]) -> npt.NDArray[np.int64]:
    """(N,) marks: checksums of rows 0, 1, 2, 4, 8, ..., 0 elsewhere.

    The rows that are looked at do not depend on N: a data set that grew keeps its marks.
    """
    marks = np.zeros(count, dtype=np.int64)
    row = 0
    while row < count:
        marks[row] = zlib.crc32(read(row))
        row = 2 * row or 1
    return marks


def row_of_key(keys: npt.NDArray[np.bytes_], key: bytes) -> int:
    """The row of a key.

    Args:
        keys: (N,) in bytewise order.
        key: one of them.

    Raises:
        ImageFault: it is none of them.
    """
    # Of the array's own type: numpy would convert all keys to a longer one.
    row = int(np.searchsorted(keys, np.array(key, dtype=keys.dtype)))
    if row == len(keys) or keys[row] != key:
        raise ImageFault(Status.MISSING, "not in the data set")
    return row


def rows_of(keys: npt.NDArray[np.bytes_], some: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
    """The rows of some keys, all of which are in the listing.

    Args:
        keys: (N,) in bytewise order.
        some: (n,) of them, in any order.
    """
    rows: npt.NDArray[np.int64] = np.searchsorted(keys, some.astype(keys.dtype))
    return rows


def doubles(keys: npt.NDArray[np.bytes_], most: int = 5) -> list[bytes]:
    """Some keys that stand more than once in a sorted array."""
    found: list[bytes] = np.unique(keys[1:][keys[1:] == keys[:-1]])[:most].tolist()
    return found
