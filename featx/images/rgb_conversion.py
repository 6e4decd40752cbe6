"""The values of decoded pixels: orientation, scale, and conversion of any mode to RGB."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from featx.errors import counted
from featx.types import Array, ImageFault, Status

DIVISORS = {"|u1": 255.0, "<u2": 65535.0}
"""dtype of pixels -> largest number, for scale=dtype. Other dtypes do not say what white is."""

NUMBER_TYPES = frozenset(["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<f2", "<f4", "<f8"])
"""Numbers that float32 holds, the larger ones rounded, in the byte order of numpy's names."""
NUMBERS = "bool, whole numbers of up to 32 bits, or floats"
"""`NUMBER_TYPES` in words."""


class PixelFormatError(Exception):
    """Name of the fault of an image whose dtype or channels are not those that a run states."""


def format_fault(message: str) -> ImageFault:
    """Return the fault of an image whose dtype or channels are not those that a run states."""
    return ImageFault(Status.UNSUPPORTED, message, PixelFormatError.__name__)


def unknown_white(kind: str) -> ImageFault:
    """The fault of an image whose file does not say which number is white."""
    return format_fault(
        f"{kind}, whose white is not stated: data.white=1 (or 255, ...) says it for all images, "
        "model.transform.scale for a model that takes such numbers"
    )


def missing_codecs(what: str) -> ImageFault:
    """The fault of an image that needs the package imagecodecs, which is not installed."""
    return ImageFault(Status.UNSUPPORTED, f'{what} needs pip install "featx[channels]"')


@dataclass(frozen=True)
class PixelScale:
    """Conversion of the numbers of an image to those of a model.

    Attributes:
        divisor: number by which pixels are divided; None for the largest number of their dtype.
        channels: number of channels of the images.
        bands: channels that the model gets, in its order; None for all.
    """

    divisor: float | None
    channels: int
    bands: tuple[int, ...] | None = None

    def describe(self) -> str:
        """Part of the line that describes a transform."""
        divisor = "the largest of their dtype" if self.divisor is None else f"{self.divisor:.17g}"
        bands = "" if self.bands is None else f", bands {list(self.bands)}"
        named = counted(self.channels, "channel")
        return f"float32 pixels of {named}{bands} divided by {divisor}, "

    def apply(self, image: Array) -> npt.NDArray[np.float32]:
        """Take the bands of an image and divide them.

        Args:
            image: (H, W, channels) of any numbers.

        Returns:
            (H, W, C) float32, C the number of bands.

        Raises:
            ImageFault: the dtype has no largest number, or a pixel is not finite.
        """
        divisor = self.divisor
        if divisor is None:
            divisor = DIVISORS.get(image.dtype.newbyteorder("<").str)
            if divisor is None:
                raise format_fault(
                    f"{image.dtype} pixels, whose white is not known: model.transform.scale=dtype "
                    "divides uint8 and uint16 only; give the number"
                )
        if self.bands is not None:
            image = image[:, :, list(self.bands)]
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite
            pixels = image.astype(np.float32)
        pixels /= np.float32(divisor)
        if not np.isfinite(pixels).all():
            raise ImageFault(Status.UNSUPPORTED, "some pixels are NaN or infinite")
        return pixels


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


def turn_array(array: Array, orientation: int) -> Array:
    """Turn an image upright; a view."""
    if is_transposed(orientation):
        array = array.swapaxes(0, 1)
    return np.flip(array, _FLIPPED_AXES.get(orientation, ()))


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
    values: Array,
    limits: NumberRange,
    background: tuple[int, int, int],
    alpha: Array | None = None,
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
