"""Decoding of encoded bytes into an array of the numbers of the file, for `model.transform.scale`.

Nothing is converted: an image keeps its dtype and channels. A file whose decoder would reduce its
numbers to 8 bits, or change them otherwise, is a fault.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from featx.errors import counted
from featx.images.decode_settings import ImagePolicy
from featx.images.rgb_conversion import NUMBER_TYPES, NUMBERS, format_fault, missing_codecs
from featx.types import Array, ImageFault, Status

if TYPE_CHECKING:
    from PIL import ImageFile

NPY = b"\x93NUMPY"
"""First bytes of a file of `numpy.save`."""

_NPY_HEADER = re.compile(
    rb"\{'descr': '([<>|=][biuf]\d+)', 'fortran_order': (True|False), "
    rb"'shape': \(([0-9, ]*)\), \}\s*"
)
"""Header as numpy writes it. `numpy.load` evaluates it as Python, which may end the process."""

_INTACT = frozenset({"L", "LA", "RGB", "RGBA", "I;16"})
"""Pillow modes that hold the numbers of a file."""

_FORMATS = frozenset({"JPEG", "MPO", "PNG", "WEBP", "BMP", "DIB", "PPM"})
"""Formats that Pillow reads without a change of numbers, in these modes. GIF has a palette; AVIF
and HEIC of more than 8 bits are reduced."""


def decode_npy(data: bytes, policy: ImagePolicy) -> Array:
    """Read a file of `numpy.save`. Returns (H, W, channels)."""
    assert policy.channels is not None
    dtype, is_fortran, shape, offset = npy_header(data)
    if dtype.newbyteorder("<").str not in NUMBER_TYPES:
        raise format_fault(f"the array is {dtype}; expected {NUMBERS}")
    axis = channel_axis(shape, policy.channels)
    policy.check_pixels(shape[2 if axis == 0 else 1], shape[1 if axis == 0 else 0])
    num_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(data) - offset < num_bytes:
        raise ImageFault(Status.TRUNCATED, f"{len(data) - offset} bytes of {num_bytes}")
    if len(data) - offset > num_bytes:
        raise ImageFault(Status.DECODE_ERROR, "there are more bytes than its header says")
    values = np.frombuffer(data, dtype, offset=offset)
    array = values.reshape(shape[::-1]).T if is_fortran else values.reshape(shape)
    if array.ndim == 2:
        return array[:, :, None]
    return array.transpose(1, 2, 0) if axis == 0 else array


def npy_header(data: bytes) -> tuple[np.dtype[np.generic], bool, tuple[int, ...], int]:
    """Read the header of a file of `numpy.save`.

    Returns dtype, whether the first axis varies fastest, shape, and the offset of the numbers.
    """
    wide = data[6:7] != b"\x01"
    start = 12 if wide else 10
    stop = start + int.from_bytes(data[8:start], "little")
    if len(data) < stop or stop == start:
        raise ImageFault(Status.TRUNCATED, "its header is incomplete")
    match = _NPY_HEADER.fullmatch(data[start : min(stop, start + 4096)])
    if match is None:
        raise ImageFault(
            Status.UNSUPPORTED, "its header is damaged, or it is no array of plain numbers"
        )
    descr, fortran, sizes = match.groups()
    try:
        shape = tuple(int(size) for size in sizes.replace(b" ", b"").split(b",") if size)
        return np.dtype(descr.decode()), fortran == b"True", shape, stop
    except (TypeError, ValueError) as error:
        raise ImageFault(Status.UNSUPPORTED, f"its header is damaged: {error}") from error


def channel_axis(shape: tuple[int, ...], channels: int) -> int:
    """Return the axis of the channels of an array: 0 or 2, and 2 for a grey image (H, W)."""
    expected = f"expected (H, W, {channels}) or ({channels}, H, W)"
    expected += ", or (H, W)" if channels == 1 else ""
    if len(shape) not in (2, 3) or 0 in shape:
        raise format_fault(f"the array has the shape {shape}; {expected}")
    if len(shape) == 2:
        if channels != 1:
            raise wrong_channels(1, channels)
        return 2
    first, last = shape[0] == channels, shape[2] == channels
    if first and last:
        raise format_fault(f"the channels of {shape} may come first or last; {expected}")
    if not first and not last:
        raise format_fault(f"the array has the shape {shape}; {expected}, {_HOW_CHANNELS}")
    return 0 if first else 2


def pillow_array(image: ImageFile.ImageFile) -> Array | None:
    """Load an image with Pillow, if it then has the numbers of the file.

    Returns (H, W) or (H, W, C); None if Pillow would change them.
    """
    if image.format not in _FORMATS or not _is_exact(image):
        return None
    array = np.asarray(image)
    return array.astype(np.uint16) if image.mode == "I" else array


def _is_exact(image: ImageFile.ImageFile) -> bool:
    """Return whether Pillow reads the numbers of an image as they are in the file."""
    if image.mode not in _INTACT and (image.format, image.mode) != ("PPM", "I"):
        return False
    if image.mode not in ("LA", "RGBA") and "transparency" in image.info:
        return False
    raw_mode = image.tile[0].args if image.tile else None
    # Pillow reduces pixels of 16 bits in several channels to 8, and scales other ranges of PPM.
    if image.format == "PNG":
        return image.mode == "I;16" or raw_mode in (image.mode, "L;2", "L;4")
    return image.format != "PPM" or raw_mode in ("L", "RGB", "I;16B")


def is_deep_png(image: ImageFile.ImageFile) -> bool:
    """Return whether an image is a 16-bit PNG of several channels; Pillow reduces it to 8 bits."""
    raw_mode = image.tile[0].args if image.tile else None
    is_deep = raw_mode in ("RGB;16B", "RGBA;16B", "LA;16B")
    return is_deep and image.format == "PNG" and "transparency" not in image.info


def decode_deep_png(data: bytes) -> Array:
    """Decode a PNG of 16 bits and several channels, which Pillow reduces to 8 bits.

    Returns (H, W, C) uint16.
    """
    try:
        from imagecodecs import png_decode
    except ImportError as error:
        raise missing_codecs("a PNG of 16 bits in several channels") from error
    pixels: Array = png_decode(data)
    return pixels


def check_array(array: Array, channels: int) -> Array:
    """Return a decoded image as (H, W, channels)."""
    if array.ndim == 2:
        array = array[:, :, None]
    if array.shape[2] != channels:
        raise wrong_channels(array.shape[2], channels)
    return array


def why_not_rgb(data: bytes) -> str | None:
    """Return why a file of `numpy.save` is no RGB image, or None if it is none."""
    if not data.startswith(NPY):
        return None
    dtype, _, shape, _ = npy_header(data)
    return (
        f"an array {shape} of {dtype}, which is no RGB image of 8 bits, and its white is not "
        "stated: model.transform.scale states it, and reads any channels. A data set of your own "
        "gives images without ToTensor and Normalize"
    )


_HOW_CHANNELS = (
    "by model.transform.channels, or the number of model.transform.mean without that option"
)


def wrong_channels(match: int, expected: int) -> ImageFault:
    """The fault of an image of another number of channels."""
    return format_fault(f"{counted(match, 'channel')}; expected {expected}, {_HOW_CHANNELS}")
