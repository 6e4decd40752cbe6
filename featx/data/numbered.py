"""Rows that have a number for a name: their keys, and marks that tell one data set from another."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

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
