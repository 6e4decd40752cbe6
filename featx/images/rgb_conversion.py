"""Conversion of images of any Pillow mode to RGB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from featx.images.pixel_scale import format_fault, unknown_white

TOLERANCE = 0.1
"""Share of the range of numbers by which they may be outside it."""

_STRIP_PIXELS = 1 << 22
"""Number of pixels that are converted at once. An image at the limit of pixels would take 350 MB
per copy if it were converted whole."""


def to_rgb(
    image: Image.Image, background: tuple[int, int, int], white: float | None = None
) -> Image.Image:
    """Convert any mode to RGB: composite transparency, scale 16-bit and float values to 8 bits."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _deep_grey(image, background, white)
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


@dataclass(frozen=True)
class NumberRange:
    """Numbers of a file that are black and white; black is the larger one of an inverted image."""

    black: float
    white: float


def numbers_to_rgb(
    values: npt.NDArray[Any],
    limits: NumberRange,
    background: tuple[int, int, int],
    alpha: npt.NDArray[Any] | None = None,
    is_premultiplied: bool = False,
) -> npt.NDArray[np.uint8]:
    """Convert numbers of any range to RGB of 8 bits.

    Numbers a little outside the range, as resampling makes them, are black or white.

    Returns (H, W, 3) uint8.
    """
    low, high = sorted((limits.black, limits.white))
    tolerance = TOLERANCE * (high - low)
    height, width = values.shape[:2]
    rgb = np.empty((height, width, 3), np.uint8)
    for _, top, _, bottom in _strips((width, height)):
        lines = values[top:bottom].astype(np.float64)
        smallest, largest = float(lines.min()), float(lines.max())  # NaN if any value is
        if not (low - tolerance <= smallest and largest <= high + tolerance):
            raise format_fault(
                f"pixels from {smallest:g} to {largest:g}, outside black at {limits.black:g} and "
                f"white at {limits.white:g}"
            )
        lines = (lines - limits.black) * (255 / (limits.white - limits.black))
        if alpha is not None:
            opaque = np.clip((alpha[top:bottom, :, None] - low) / (high - low), 0, 1)
            if not np.isfinite(opaque).all():
                raise format_fault("some values of alpha are NaN")
            under = np.array(background, np.float64) * (1 - opaque)
            lines = (lines if is_premultiplied else lines * opaque) + under
        rgb[top:bottom] = np.rint(np.clip(lines, 0, 255))
    return rgb


def _deep_grey(
    image: Image.Image, background: tuple[int, int, int], white: float | None
) -> Image.Image:
    """Convert grey of more than 8 bits to RGB; of a PNG with a transparent number as well."""
    if image.mode not in ("I", "F") or (image.mode == "I" and image.format == "PPM"):
        white = 65535
    if white is None:
        raise unknown_white(f"a {image.format or 'Pillow image'} of mode {image.mode}")
    values = np.asarray(image)
    rgb = numbers_to_rgb(values[:, :, None], NumberRange(0, white), background)
    if isinstance(clear := image.info.get("transparency"), int):
        rgb[values == clear] = background
    return Image.fromarray(rgb, "RGB")
