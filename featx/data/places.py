"""Key -> row of a sorted listing: by search, so that 10^7 rows need no dictionary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from featx.types import ImageFault, Status


def place_of(keys: npt.NDArray[np.bytes_], key: bytes) -> int:
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
