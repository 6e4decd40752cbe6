"""Pictures that a data set holds as pixels -> bytes that the one decoder reads without loss.

A binary PPM or PGM is a line of text before the pixels: making and reading one copies them once.
What these formats cannot hold (transparency, palettes, 16 bits, an orientation) becomes a PNG or a
TIFF.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

_ORIENTATION = 0x0112
_AS_PNG = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_AS_TIFF = frozenset({"I", "F", "CMYK"})


def encode_pixels(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PPM or PGM of (H, W, 3), (H, W, 1) or (H, W) uint8.

    Raises:
        ValueError: another shape or type, or no pixel.
    """
    if pixels.dtype != np.uint8:
        raise ValueError(f"pixels are {pixels.dtype}; expected uint8 in 0 to 255")
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ValueError(f"pixels are {pixels.shape}; expected (H, W), (H, W, 1) or (H, W, 3)")
    if not pixels.size:
        raise ValueError(f"pixels are {pixels.shape}: there are none")
    height, width = pixels.shape[:2]
    kind = b"P6" if pixels.ndim == 3 else b"P5"
    return b"%s\n%d %d\n255\n" % (kind, width, height) + pixels.tobytes()


def encode_array(array: npt.NDArray[Any]) -> bytes:
    """An array as data sets give it: also (3, H, W) and (1, H, W), and RGBA.

    Raises:
        ValueError: as of `encode_pixels`.
    """
    if array.ndim == 3 and array.shape[2] == 4 and array.dtype == np.uint8:
        return encode_image(Image.fromarray(array, "RGBA"))
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)
    return encode_pixels(array)


def encode_image(image: Image.Image) -> bytes:
    """A Pillow image of any mode; its orientation and its transparency travel along.

    Raises:
        ValueError: the image has no pixel.
        Exception: whatever Pillow raises where it was not decoded yet and cannot be.
    """
    image.load()
    turn = image.getexif().get(_ORIENTATION, 1)
    plain = turn == 1 and "transparency" not in image.info
    if plain and image.mode in ("L", "RGB"):
        return encode_pixels(np.asarray(image))
    if image.mode not in _AS_PNG | _AS_TIFF:
        # Of premultiplied alpha, YCbCr, LAB, HSV and byte orders: to what has a file format.
        image = image.convert({"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}.get(image.mode, "RGB"))
    file = io.BytesIO()
    if image.mode in _AS_TIFF:
        image.save(file, "TIFF", tiffinfo={_ORIENTATION: turn}, compression=None)
    else:
        exif = Image.Exif()
        exif[_ORIENTATION] = turn
        image.save(file, "PNG", exif=exif, compress_level=1)
    return file.getvalue()
