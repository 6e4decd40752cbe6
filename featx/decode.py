"""Encoded bytes -> one upright RGB picture, or an ImageFault that says why not.

The only file that names a decoder. Pillow decodes everything; for decode=fast, JPEGs far larger
than needed are decoded at a half, a quarter or an eighth of their size, which libjpeg does while it
decodes.
"""

from __future__ import annotations

import contextlib
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageColor, UnidentifiedImageError

from featx.config import DataConfig
from featx.errors import ConfigError
from featx.types import ImageFault, Status

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")
"""The only parsers an image can reach, whatever its name says."""

_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")
_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_pixel_limit_lock = threading.Lock()


@dataclass(frozen=True)
class ImagePolicy:
    """What to do with odd pictures; part of the fingerprint.

    Attributes:
        exif: 'apply' or 'ignore' the EXIF orientation.
        background: (R, G, B) under transparent pixels.
        max_pixels: a picture of more pixels is refused before it is decoded.
    """

    exif: str
    background: tuple[int, int, int]
    max_pixels: int

    @classmethod
    def from_config(cls, config: DataConfig) -> ImagePolicy:
        """Raises ConfigError where the background is no colour."""
        try:
            colour = ImageColor.getrgb(config.background)
        except ValueError as error:
            raise ConfigError(
                f"data.background={config.background}: expected a colour name such as white, "
                "or '#rrggbb'."
            ) from error
        return cls(config.exif, (colour[0], colour[1], colour[2]), config.max_pixels)


@contextlib.contextmanager
def own_pixel_limit() -> Iterator[None]:
    """Pillow's own limit off while ours is in force: it only warns where we record a failure."""
    with _pixel_limit_lock:
        before = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        with _pixel_limit_lock:
            Image.MAX_IMAGE_PIXELS = before


def decode(data: bytes, policy: ImagePolicy, at_least: int | None = None) -> Image.Image:
    """Decode an image whole.

    Args:
        data: the encoded bytes.
        policy: for orientation, transparency and size.
        at_least: a JPEG may come back smaller than it is, with its shorter side still twice this
            many pixels; None decodes at full size.

    Returns:
        The first frame, mode RGB, upright.

    Raises:
        ImageFault: with the status that names the reason.
    """
    # One guarded boundary around one image: of the files that fail, many raise something other
    # than OSError (ValueError, TypeError, SyntaxError, struct.error, ...).
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > policy.max_pixels:
            raise ImageFault(
                Status.TOO_LARGE, f"{width} x {height} pixels, over {policy.max_pixels}"
            )
        if at_least is not None and min(width, height) >= 4 * at_least and image.mode == "RGB":
            scale = 2 * at_least / min(width, height)
            image.draft("RGB", (int(width * scale), int(height * scale)))
        image.load()
        orientation = _orientation(image) if policy.exif == "apply" else 1
        rgb = to_rgb(image, policy.background)
        return rgb if orientation == 1 else rgb.transpose(_TRANSPOSE[orientation])
    except (ImageFault, MemoryError):
        raise
    except Exception as error:
        raise _fault(data, error) from error


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Any mode as RGB: transparency over the background, 16 bits scaled by their range."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _deep_grey(image, background)
    transparent = image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info
    if not transparent:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode in ("La", "RGBa"):
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    layer = image.convert("RGBA")
    under = Image.new("RGBA", layer.size, (*background, 255))
    return Image.alpha_composite(under, layer).convert("RGB")


def _deep_grey(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Grey of more than 8 bits as RGB.

    16-bit integers are divided by 257, so that 65535 becomes 255; floats in [0, 1] are multiplied
    by 255, floats in [0, 255] are kept. Other ranges have no known white and are refused.
    """
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    if image.mode == "F":
        if not (np.isfinite(low) and np.isfinite(high)) or low < 0 or high > 255:
            raise ImageFault(
                Status.UNSUPPORTED, f"float pixels from {low} to {high}: no known white"
            )
        grey = values * 255 if high <= 1 else values
    else:
        if low < 0 or high > 65535:
            raise ImageFault(
                Status.UNSUPPORTED, f"integer pixels from {low:.0f} to {high:.0f}, not of 16 bits"
            )
        grey = values / 257
    rgb = np.repeat(np.rint(grey).astype(np.uint8)[..., None], 3, axis=2)
    if isinstance(clear := image.info.get("transparency"), int):
        rgb[values == clear] = background
    return Image.fromarray(rgb, "RGB")


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 where there is none, it is damaged, or out of range."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except (OSError, ValueError, TypeError, KeyError, SyntaxError, struct.error):
        return 1
    return value if value in _TRANSPOSE else 1


def _fault(data: bytes, error: Exception) -> ImageFault:
    message = str(error).replace("\n", " ")[:200] or "no message"
    if isinstance(error, Image.DecompressionBombError):
        status = Status.TOO_LARGE
    elif isinstance(error, UnidentifiedImageError):
        known = data.startswith(_SIGNATURES)
        status = Status.DECODE_ERROR if known else Status.UNSUPPORTED
        message = "its header is damaged" if known else "not an image of a known format"
    elif isinstance(error, EOFError | struct.error | zlib.error) or "runcat" in message:
        status = Status.TRUNCATED
    else:
        status = Status.DECODE_ERROR
    return ImageFault(status, message, type(error).__name__)
