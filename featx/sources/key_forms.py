"""Formats of keys that contain the origin of a row: the image of a box, the video of a frame.

Every store file contains the keys, also after a merge, so they identify rows of one origin more
reliably than the config of a run.
"""

from __future__ import annotations

import re

from featx.types import Box

_BOX = re.compile(rb"(.+)#(\d+),(\d+),(\d+),(\d+)", re.DOTALL)
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
        (key of the image, 'image') for a box; (key of the video, 'video') for a frame or a box in a
        frame; (the key itself, None) for any other row.
    """
    kind = None
    if match := _BOX.fullmatch(key):
        key, kind = match[1], "image"
    if match := _FRAME.fullmatch(key):
        key, kind = match[1], "video"
    return key, kind
