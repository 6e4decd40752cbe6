"""EXIF orientation, 1 to 8: reading it, and turning stored images upright, in their own type."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

ORIENTATION_TAG = 0x0112
"""Number of the tag in EXIF and TIFF."""

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Orientation -> operation of Pillow that turns the image upright."""

_FLIPPED_AXES = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}
"""Orientation -> axes of (H, W) that are reversed, after height and width were exchanged."""

_INVERSE = {6: 8, 8: 6}
"""Orientation -> the inverse one, for those that are not their own inverse."""


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation from 1 to 8; 1 if it is missing, damaged or out of range."""
    try:
        value = image.getexif().get(ORIENTATION_TAG, 1)
    except (OSError, ValueError, TypeError, KeyError, SyntaxError, struct.error):
        return 1
    return value if value in _TRANSPOSE else 1


def inverse(orientation: int) -> int:
    """The orientation that undoes another one."""
    return _INVERSE.get(orientation, orientation)


def is_transposed(orientation: int) -> bool:
    """Return whether turning upright exchanges height and width."""
    return orientation >= 5


def turn_image(image: Image.Image, orientation: int) -> Image.Image:
    """Turn an image upright; the image itself if it is."""
    return image if orientation == 1 else image.transpose(_TRANSPOSE[orientation])


def turn_array(array: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """Turn an image upright; a view."""
    if is_transposed(orientation):
        array = array.swapaxes(0, 1)
    return np.flip(array, _FLIPPED_AXES.get(orientation, ()))
