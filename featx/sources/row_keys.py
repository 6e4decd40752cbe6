"""Keys made from row numbers, and lookup of keys in a sorted listing."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from featx.base import name_text
from featx.errors import DataError
from featx.types import ImageFault, Status

_DIGITS = 6
"""Minimum number of digits of a numbered key."""

_NAMES_SHOWN = 5
"""Maximum number of keys that a message names."""


def numbered_keys(count: int, prefix: str = "") -> npt.NDArray[np.bytes_]:
    """Make keys '000000', '000001', ... with a prefix.

    All keys have the same length, so bytewise order is the order of the rows.

    Returns (count,) fixed-length bytes.
    """
    digits = max(_DIGITS, len(str(count - 1)))
    keys = np.empty(count, dtype=f"S{len(prefix) + digits}")
    form = f"{prefix}%0{digits}d".encode()
    # In blocks, because a Python bytes object needs several times the memory of an array entry.
    for start in range(0, count, 1 << 16):
        stop = min(count, start + (1 << 16))
        keys[start:stop] = [form % row for row in range(start, stop)]
    return keys


def parse_numbered_key(key: bytes, prefix: str = "") -> int:
    """Return the row number that a numbered key holds."""
    return int(key[len(prefix) :])


def sampled_content_tags(count: int, read: Callable[[int], bytes]) -> npt.NDArray[np.int64]:
    """Compute the content tags of a data set that has no sizes or times of files.

    They are checksums of the rows 0, 1, 2, 4, 8, ...

    The sampled rows do not depend on `count`, so a data set that has grown keeps its tags.

    Returns (count,) int64, 0 in rows that are not sampled.
    """
    content_tags = np.zeros(count, dtype=np.int64)
    row = 0
    while row < count:
        content_tags[row] = zlib.crc32(read(row))
        row = 2 * row or 1
    return content_tags


def find_row(keys: npt.NDArray[np.bytes_], key: bytes) -> int:
    """Find the row of a key."""
    # With another dtype, searchsorted would convert the whole array of keys.
    row = int(np.searchsorted(keys, np.array(key, dtype=keys.dtype)))
    if row == len(keys) or keys[row] != key:
        raise ImageFault(Status.MISSING, "not in the data set")
    return row


def find_rows(keys: npt.NDArray[np.bytes_], some: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
    """Find the rows of several keys, all of which must be in the listing. Returns (n,) int64."""
    rows: npt.NDArray[np.int64] = np.searchsorted(keys, some.astype(keys.dtype))
    return rows


def sorting_order(keys: npt.NDArray[np.bytes_], what: str) -> npt.NDArray[np.int64]:
    """Return the order of keys by their bytes.

    Raises DataError if a key occurs more than once; `what` begins the message, such as 't.csv has
    some paths'.
    """
    if (keys[1:] > keys[:-1]).all():
        return np.arange(len(keys))
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    if (is_double := keys[1:] == keys[:-1]).any():
        names = ", ".join(map(name_text, np.unique(keys[1:][is_double])[:_NAMES_SHOWN].tolist()))
        raise DataError(f"{what} more than once: {names}. A key stands for one row.")
    return order
