"""Lossless encoding of images that a data set holds as pixels, for the decoder of all sources.

A binary PPM or PGM is a line of text before the pixels, so writing and reading it copies the pixels
once. Images that these formats cannot represent (transparency, palettes, 16 bits, an orientation)
become PNG or TIFF, and arrays of other numbers or channels files of `numpy.save`.
"""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from featx.types import Array

_ORIENTATION = 0x0112
_AS_PNG = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
"""Pillow modes that PNG stores without loss."""
_AS_TIFF = frozenset({"I", "F", "CMYK"})
"""Pillow modes that PNG does not have and uncompressed TIFF stores without loss."""


def encode_pixels(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode (H, W, 3) uint8 as PPM, (H, W, 1) or (H, W) uint8 as PGM."""
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


def encode_array(array: Array) -> bytes:
    """Encode an array in any layout that data sets use."""
    is_uint8 = array.ndim == 3 and array.dtype == np.uint8
    if is_uint8 and array.shape[0] in (1, 3) and array.shape[2] in (1, 3, 4):
        raise ValueError(
            f"the channels of the array {array.shape} may come first or last; give a Pillow image"
        )
    if array.ndim == 3 and array.shape[2] == 4 and array.dtype == np.uint8:
        return encode_image(Image.fromarray(array, "RGBA"))
    if array.dtype != np.uint8:
        return encode_numbers(array)
    if array.ndim == 3 and array.shape[2] not in (1, 3):
        if array.shape[0] not in (1, 3):
            return encode_numbers(array)
        array = array.transpose(1, 2, 0)
    return encode_pixels(array)


def encode_numbers(array: Array) -> bytes:
    """Encode an array as `numpy.save` does, in little-endian order."""
    if array.ndim not in (2, 3) or not array.size or array.dtype.kind not in "biuf":
        raise ValueError(
            f"the array is {array.shape} {array.dtype}; expected numbers (H, W), (H, W, C) or "
            "(C, H, W)"
        )
    file = io.BytesIO()
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    # Another version of the header would be another checksum of the same image.
    np.lib.format.write_array(file, little, version=(1, 0), allow_pickle=False)
    return file.getvalue()


def encode_image(image: Image.Image) -> bytes:
    """Encode a Pillow image of any mode, with its EXIF orientation and transparency."""
    image.load()
    turn = image.getexif().get(_ORIENTATION, 1)
    is_plain = turn == 1 and "transparency" not in image.info
    if is_plain and image.mode in ("L", "RGB"):
        return encode_pixels(np.asarray(image))
    if image.mode in ("I;16B", "I;16L", "I;16N"):  # convert would cut the numbers off at 255
        image = Image.fromarray(np.asarray(image).astype(np.uint16))
    if image.mode not in _AS_PNG | _AS_TIFF:
        # Modes without a file format (premultiplied alpha, YCbCr, LAB, HSV) are converted to the
        # nearest mode that has one.
        image = image.convert({"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}.get(image.mode, "RGB"))
    file = io.BytesIO()
    if image.mode in _AS_TIFF:
        image.save(file, "TIFF", tiffinfo={_ORIENTATION: turn}, compression=None)
    else:
        exif = Image.Exif()
        exif[_ORIENTATION] = turn
        image.save(file, "PNG", exif=exif, compress_level=1)
    return file.getvalue()
