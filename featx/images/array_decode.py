"""Decoding of encoded bytes into an array of the numbers of the file, for `model.transform.scale`.

Nothing is converted: an image keeps its dtype and channels. A file whose decoder would reduce its
numbers to 8 bits, or change them otherwise, is a fault.
"""

from __future__ import annotations

import importlib.util
import io
import re
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from PIL import TiffImagePlugin

from featx.errors import counted
from featx.images.image_policy import ImagePolicy
from featx.images.orientation import ORIENTATION_TAG
from featx.images.pixel_scale import format_fault
from featx.types import ImageFault, Status

if TYPE_CHECKING:
    from PIL import ImageFile
    from tifffile import TiffPage, TiffPages

NPY = b"\x93NUMPY"
"""First bytes of a file of `numpy.save`."""

_TIFF = re.compile(rb"II[*+]\0|MM\0[*+]")

_NPY_HEADER = re.compile(
    rb"\{'descr': '([<>|=][biuf]\d+)', 'fortran_order': (True|False), "
    rb"'shape': \(([0-9, ]*)\), \}\s*"
)
"""Header as numpy writes it. `numpy.load` evaluates it as Python, which may end the process."""

_DTYPES = frozenset(["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<f2", "<f4", "<f8"])
"""Numbers that float32 holds, the larger ones rounded, in the byte order of numpy's names."""

_INTACT = frozenset({"L", "LA", "RGB", "RGBA", "I;16"})
"""Pillow modes that hold the numbers of a file."""

_FORMATS = frozenset({"JPEG", "MPO", "PNG", "WEBP", "BMP", "DIB", "PPM", "TIFF"})
"""Formats that Pillow reads without a change of numbers, in these modes. GIF has a palette; AVIF
and HEIC of more than 8 bits are reduced."""

_BITS, _PHOTOMETRIC, _SAMPLES, _SAMPLE_FORMAT = 258, 262, 277, 339
"""TIFF tags: bits of each sample, what they mean, samples of a pixel, and the kind of number."""
_EXACT_TIFF = {
    "L": ((8,), 1, 1),
    "RGB": ((8, 8, 8), 2, 1),
    "I;16": ((16,), 1, 1),
    "I;16B": ((16,), 1, 1),
    "F": ((32,), 1, 3),
}
"""Pillow mode -> bits, photometric interpretation and kind of number of the files that Pillow reads
exactly; all others need tifffile."""
_BLACK_IS_ZERO, _RGB = 1, 2


def decode_npy(data: bytes, policy: ImagePolicy) -> npt.NDArray[Any]:
    """Read a file of `numpy.save`.

    Args:
        data: encoded bytes.
        policy: number of channels, and limit of pixels.

    Returns:
        (H, W, channels).

    Raises:
        ImageFault: it is damaged, or of another dtype or shape.
    """
    assert policy.channels is not None
    dtype, is_fortran, shape, offset = npy_header(data)
    if dtype.newbyteorder("<").str not in _DTYPES:
        raise format_fault(f"the array is {dtype}; expected whole numbers or floats")
    axis = channel_axis(shape, policy.channels)
    _check_pixels(shape[1 if axis == 0 else 0], shape[2 if axis == 0 else 1], policy)
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


def npy_header(data: bytes) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """Read the header of a file of `numpy.save`.

    Args:
        data: encoded bytes, which begin with NPY.

    Returns:
        dtype, whether the first axis varies fastest, shape, and the offset of the numbers.

    Raises:
        ImageFault: it is damaged, or its dtype is none of numbers.
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
    """Return the axis of the channels of an array: 0 or 2, and 2 for a grey image (H, W).

    Raises:
        ImageFault: no axis has this length, or the first and the last have.
    """
    expected = f"expected (H, W, {channels}) or ({channels}, H, W)"
    expected += ", or (H, W)" if channels == 1 else ""
    if len(shape) not in (2, 3) or 0 in shape:
        raise format_fault(f"the array has the shape {shape}; {expected}")
    if len(shape) == 2:
        if channels != 1:
            raise _wrong_channels(1, channels)
        return 2
    first, last = shape[0] == channels, shape[2] == channels
    if first and last:
        raise format_fault(f"the channels of {shape} may come first or last; {expected}")
    if not first and not last:
        raise format_fault(f"the array has the shape {shape}; {expected}, {_HOW_CHANNELS}")
    return 0 if first else 2


def decode_tiff(data: bytes, policy: ImagePolicy) -> tuple[npt.NDArray[Any], int]:
    """Read the first image of a TIFF with tifffile.

    Args:
        data: encoded bytes.
        policy: number of channels, and limit of pixels.

    Returns:
        (H, W, channels) as stored, and its orientation from 1 to 8.

    Raises:
        ImageFault: it is incomplete, of another number of channels, or tifffile is not installed.
    """
    assert policy.channels is not None
    _require("tifffile", "a TIFF of such numbers")
    from tifffile import TiffFile

    with TiffFile(io.BytesIO(data)) as file:
        page = file.pages.first
        pages = [page]
        if page.samplesperpixel == 1 != policy.channels == len(file.pages):
            pages = _stack(file.pages)
        elif page.samplesperpixel != policy.channels:
            raise _wrong_channels(page.samplesperpixel, policy.channels)
        _check_pixels(page.imagelength, page.imagewidth, policy)
        arrays = [_page(each, data) for each in pages]
        turn = page.tags.valueof(ORIENTATION_TAG, default=1)
        return np.concatenate(arrays, axis=2), turn if turn in range(1, 9) else 1


def _require(package: str, what: str) -> None:
    """Check that a package of the extra `channels` is installed.

    Raises:
        ImageFault: it is not.
    """
    if importlib.util.find_spec(package) is None:
        raise ImageFault(Status.UNSUPPORTED, f'{what} needs pip install "featx[channels]"')


def _stack(pages: TiffPages) -> list[TiffPage]:
    """Pages of one channel each, of which a program has made the channels of an image.

    Raises:
        ImageFault: they have different sizes or dtypes.
    """
    channel_pages = [cast("TiffPage", pages.get(i)) for i in range(len(pages))]
    if len({(page.shape, page.dtype) for page in channel_pages}) > 1:
        raise format_fault("1 channel; its pages have different sizes, so they are no channels")
    return channel_pages


def _page(page: TiffPage, data: bytes) -> npt.NDArray[Any]:
    """(H, W, channels) of a page."""
    if page.dtype is None or page.dtype.newbyteorder("<").str not in _DTYPES:
        raise format_fault(f"its pixels are {page.dtype}; expected whole numbers or floats")
    if page.photometric not in (_BLACK_IS_ZERO, _RGB):
        raise format_fault(f"its colours are {getattr(page.photometric, 'name', 'unknown')}")
    if page.axes not in ("YX", "YXS", "SYX"):
        raise format_fault(f"its axes are {page.axes}; expected YX, YXS or SYX")
    # tifffile fills what a cut file lacks with zeros.
    ends = zip(page.dataoffsets, page.databytecounts, strict=True)
    if any(offset + count > len(data) for offset, count in ends):
        raise ImageFault(Status.TRUNCATED, "its pixels are outside of file bounds")
    array: npt.NDArray[Any] = page.asarray(maxworkers=1)
    if page.axes == "YX":
        return array[:, :, None]
    return array.transpose(1, 2, 0) if page.axes == "SYX" else array


def is_tiff(data: bytes) -> bool:
    """Return whether bytes begin like a TIFF."""
    return _TIFF.match(data) is not None


def is_big_tiff(data: bytes) -> bool:
    """Return whether bytes begin like a BigTIFF; Pillow 13 reads some with warnings only."""
    return data[:4] in (b"II+\0", b"MM\0+")


def pillow_array(image: ImageFile.ImageFile) -> npt.NDArray[Any] | None:
    """Load an image with Pillow, if it then has the numbers of the file.

    Returns:
        (H, W) or (H, W, C); None if Pillow would change them. A TIFF is upright.
    """
    if image.format not in _FORMATS or not _is_exact(image):
        return None
    array = np.asarray(image)
    return array.astype(np.uint16) if image.mode == "I" else array


def _is_exact(image: ImageFile.ImageFile) -> bool:
    """Return whether Pillow reads the numbers of an image as they are in the file."""
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]
        layout = tags.get(_BITS), tags.get(_PHOTOMETRIC), tags.get(_SAMPLE_FORMAT, (1,))[0]
        return _EXACT_TIFF.get(image.mode) == layout
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


def decode_deep_png(data: bytes) -> npt.NDArray[Any]:
    """Decode a PNG of 16 bits and several channels, which Pillow reduces to 8 bits.

    Returns:
        (H, W, C) uint16.

    Raises:
        ImageFault: imagecodecs is not installed.
    """
    _require("imagecodecs", "a PNG of 16 bits in several channels")
    from imagecodecs import png_decode

    pixels: npt.NDArray[Any] = png_decode(data)
    return pixels


def check_array(array: npt.NDArray[Any], channels: int) -> npt.NDArray[Any]:
    """Return a decoded image as (H, W, channels).

    Raises:
        ImageFault: it has another number of channels.
    """
    if array.ndim == 2:
        array = array[:, :, None]
    if array.shape[2] != channels:
        raise _wrong_channels(array.shape[2], channels)
    return array


def why_not_rgb(data: bytes) -> str | None:
    """Return why an image of numbers is none of RGB, or None if the bytes are something else.

    Args:
        data: encoded bytes that Pillow does not read.
    """
    advice = "and its white is not stated: model.transform.scale states it, and reads any channels"
    if data.startswith(NPY):
        dtype, _, shape, _ = npy_header(data)
        return f"an array {shape} of {dtype}, which is no RGB image of 8 bits, {advice}"
    if not is_tiff(data):
        return None
    try:
        with io.BytesIO(data) as file:
            tags = TiffImagePlugin.ImageFileDirectory_v2(file.read(8))
            file.seek(tags.next)
            tags.load(file)
        bits = "/".join(str(number) for number in sorted({*tags[_BITS]}))
        samples = int(tags.get(_SAMPLES, 1))
    except Exception:  # noqa: BLE001 - a damaged header, which the caller reports
        return None
    named = f"a TIFF of {counted(samples, 'channel')} of {bits} bits"
    return f"{named}, which is no RGB image of 8 bits, {advice}"


_HOW_CHANNELS = (
    "by model.transform.channels, or the number of model.transform.mean without that option"
)


def _wrong_channels(match: int, expected: int) -> ImageFault:
    """The fault of an image of another number of channels."""
    return format_fault(f"{counted(match, 'channel')}; expected {expected}, {_HOW_CHANNELS}")


def _check_pixels(height: int, width: int, policy: ImagePolicy) -> None:
    """Check the limit of pixels.

    Raises:
        ImageFault: the image has more.
    """
    if height * width > policy.max_pixels:
        raise ImageFault(Status.TOO_LARGE, f"{width} x {height} pixels, over {policy.max_pixels}")
