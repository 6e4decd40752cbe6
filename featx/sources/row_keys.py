"""Keys of rows: unique names, and the forms of keys of boxes and frames."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import get_args

import numpy as np
import numpy.typing as npt

from featx.base import name_text
from featx.config import ViewName
from featx.errors import DataError
from featx.types import Box, ImageFault, Status

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
    """Find the rows of several keys. Returns (n,) int64; of a key that is not in the listing, any
    number up to len(keys)."""
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


_BOX = re.compile(rb"(.+)#(\d+),(\d+),(\d+),(\d+)", re.DOTALL)
_VIEW = re.compile(rb"(.+)#(?:%b|crop\d+)" % "|".join(get_args(ViewName)).encode(), re.DOTALL)
_FRAME = re.compile(rb"(.+)@\d{5,}\.\d{3}", re.DOTALL)


def box_key(image: bytes, x: int, y: int, width: int, height: int) -> bytes:
    """Format the key of a box (data.boxes): 'cat/001.jpg#10,20,64,48'."""
    return b"%s#%d,%d,%d,%d" % (image, x, y, width, height)


def parse_box_key(key: bytes) -> tuple[bytes, Box] | None:
    """Return the key of the image and the box that a key of `box_key` names, or None for others."""
    match = _BOX.fullmatch(key)
    if match is None:
        return None
    x, y, width, height = map(int, match.groups()[1:])
    return match[1], Box(x, y, width, height)


def frame_key(video: bytes, time_s: float) -> bytes:
    """Format the key of a frame (data=video): 'talks/clip.mp4@00012.000'.

    Leading zeros make keys of a video sort by time up to 99,999 seconds.
    """
    # Rounded down, after a small addition: a multiple of data.every_s such as 0.3 may lie just
    # below a whole millisecond.
    milliseconds = int(time_s * 1000 + 1e-6)
    return b"%s@%05d.%03d" % (video, *divmod(milliseconds, 1000))


def origin_of(key: bytes) -> tuple[bytes, str | None]:
    """Return the key and the kind of what a row was taken from.

    Returns:
        (key of the image, 'image') for a box or a view; (key of the video, 'video') for a frame or
        a box or view of one; (the key itself, None) for any other row.
    """
    kind = None
    if match := _VIEW.fullmatch(key):
        key, kind = match[1], "image"
    if match := _BOX.fullmatch(key):
        key, kind = match[1], "image"
    if match := _FRAME.fullmatch(key):
        key, kind = match[1], "video"
    return key, kind


def origins_of(
    keys: npt.NDArray[np.bytes_],
) -> tuple[npt.NDArray[np.bytes_], str | None]:
    """Return what (n,) rows were taken from, see `origin_of`: the (n,) keys of their images and
    videos, and 'image', 'video', 'image or video', or None if no two rows can have one in common.
    """
    origins = [origin_of(key) for key in keys.tolist()]
    kinds = {kind for _, kind in origins if kind is not None}
    kind = " or ".join(sorted(kinds)) or None
    return np.array([origin for origin, _ in origins], dtype=np.bytes_), kind
