"""Conversion of images of any Pillow mode to RGB."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from featx.types import ImageFault, Status

_STRIP_PIXELS = 1 << 22
"""Number of pixels that are converted at once. An image at the limit of pixels would take 350 MB
per copy if it were converted whole."""


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Convert any mode to RGB: composite transparency, scale 16-bit and float values to 8 bits.

    Args:
        image: loaded image.
        background: (R, G, B) in [0, 255] under transparent pixels.

    Raises:
        ImageFault: the range of the values is not known.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _deep_grey(image, background)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgb = Image.new("RGB", image.size)
    for box in _strips(image.size):
        strip = image.crop(box)
        if strip.mode in ("La", "RGBa"):
            strip = strip.convert("LA" if strip.mode == "La" else "RGBA")
        under = Image.new("RGBA", strip.size, (*background, 255))
        rgb.paste(Image.alpha_composite(under, strip.convert("RGBA")).convert("RGB"), box)
    return rgb


def _strips(size: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Boxes (left, top, right, bottom) of whole lines that cover an image of (width, height)."""
    width, height = size
    lines = max(1, _STRIP_PIXELS // width)
    return [(0, top, width, min(top + lines, height)) for top in range(0, height, lines)]


def _deep_grey(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Convert grey of more than 8 bits to RGB.

    16-bit integers are divided by 257, so that 65535 becomes 255. Floats in [0, 1] are multiplied
    by 255, and floats in [0, 255] are kept. Other ranges have no known white.

    Raises:
        ImageFault: the values are outside these ranges.
    """
    boxes = _strips(image.size)
    limits = [(v.min(), v.max()) for v in (np.asarray(image.crop(box)) for box in boxes)]
    low, high = float(np.min(limits)), float(np.max(limits))  # NaN if any value is
    if image.mode == "F":
        if not (np.isfinite(low) and np.isfinite(high)) or low < 0 or high > 255:
            raise ImageFault(
                Status.UNSUPPORTED, f"float pixels from {low} to {high}: no known white"
            )
        white = 1 if high <= 1 else 255
    else:
        if low < 0 or high > 65535:
            raise ImageFault(
                Status.UNSUPPORTED, f"integer pixels from {low:.0f} to {high:.0f}, not of 16 bits"
            )
        white = 65535
    rgb = np.empty((image.height, image.width, 3), np.uint8)
    for box in boxes:
        values, lines = np.asarray(image.crop(box)), rgb[box[1] : box[3]]
        lines[:] = np.rint(_scale(values, white))[..., None]
        if isinstance(clear := image.info.get("transparency"), int):
            lines[values == clear] = background
    return Image.fromarray(rgb, "RGB")


def _scale(values: npt.NDArray[Any], white: int) -> npt.NDArray[Any]:
    """Values in [0, white] scaled to [0, 255]."""
    if white == 65535:
        return values / 257
    return values * 255 if white == 1 else values
