"""Forms of keys that name what a row was taken from: the image of a box, the video of a frame.

The keys are in every file of a store, of every age, also in merged files, so they say more reliably
than a config which rows belong together.
"""

from __future__ import annotations

import re

_BOX = re.compile(rb"(.+)#\d+,\d+,\d+,\d+", re.DOTALL)
_FRAME = re.compile(rb"(.+)@\d{5,}\.\d{3}", re.DOTALL)


def box_key(image: bytes, x: int, y: int, width: int, height: int) -> bytes:
    """Key of a box (data.boxes): 'cat/001.jpg#10,20,64,48'."""
    return b"%s#%d,%d,%d,%d" % (image, x, y, width, height)


def frame_key(video: bytes, time_s: float) -> bytes:
    """Key of a frame (data=video): 'talks/clip.mp4@00012.000'; zeros let keys sort by time."""
    milliseconds = int(time_s * 1000 + 1e-6)
    return b"%s@%05d.%03d" % (video, *divmod(milliseconds, 1000))


def origin_of(key: bytes) -> tuple[bytes, str | None]:
    """What a row was taken from.

    Returns:
        The key of the image and 'image' for a box; the key of the video and 'video' for a frame or
        a box in a frame; the key itself and None for any other row.
    """
    what = None
    if found := _BOX.fullmatch(key):
        key, what = found[1], "image"
    if found := _FRAME.fullmatch(key):
        key, what = found[1], "video"
    return key, what
