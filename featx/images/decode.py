"""Decoding of encoded bytes into an upright RGB image, or an ImageFault with the reason.

This module and those that it imports are the only ones that name a decoder. Pillow opens every
image and decodes all unusual ones. simplejpeg decodes sound JPEGs to the same pixels in less time.
decode=fast decodes JPEGs that are far larger than needed at 1/2, 1/4 or 1/8 of their size, which
libjpeg does while it decodes. pillow-heif, if it is installed, decodes HEIC, and tifffile the TIFFs
that Pillow reads otherwise than their tags say.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import AvifImagePlugin, Image, ImageFile, UnidentifiedImageError

from featx.base import ProcessSetting
from featx.images.array_decode import (
    NPY,
    check_array,
    decode_deep_png,
    decode_npy,
    is_deep_png,
    pillow_array,
    why_not_rgb,
    wrong_channels,
)
from featx.images.image_policy import PILLOW, SIMPLEJPEG, ImagePolicy, warn
from featx.images.jpeg_decode import (
    JPEG,
    check_jpeg,
    decode_sound_jpeg,
    exif_of_jpeg,
    plain_jpeg_size,
    read_header,
    with_tables,
)
from featx.images.orientation import inverse, is_transposed, orientation_of, turn_array, turn_image
from featx.images.pixel_scale import format_fault
from featx.images.rgb_conversion import NumberRange, numbers_to_rgb, to_rgb
from featx.images.tiff_blocks import TiffBlocks, tiff_blocks
from featx.images.tiff_decode import (
    is_exact_by_pillow,
    is_right_by_pillow,
    tiff_numbers,
    tiff_rgb,
)
from featx.images.tiff_tags import (
    HEIGHT,
    ORIENTATION,
    SAMPLES,
    UNREADABLE,
    WIDTH,
    Tags,
    check_blocks,
    check_no_channel_pages,
    full_pages,
    is_tiff,
    jpeg_blocks,
    read_tags,
)
from featx.types import ImageFault, Status

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF")
"""Names of the Pillow parsers that may read an image, whatever its file name. JPEG includes MPO,
which Pillow does not register under a name of its own."""

_SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM|II[*+]\0|MM\0[*+]|RIFF....WEBP|P[1-6]\s|....ftypavi[fs]",
    re.DOTALL,
)
"""First bytes of the formats above."""

_NOT_READ = {
    b"\x76\x2f\x31\x01": "OpenEXR is not read; write its numbers as .npy or as TIFF of floats",
    b"\xff\x0a": "JPEG XL is not read; djxl IN.jxl OUT.png makes a PNG",
    b"\0\0\0\x0cJXL ": "JPEG XL is not read; djxl IN.jxl OUT.png makes a PNG",
    b"\0\0\0\x0cjP  ": "JPEG 2000 is not read; opj_decompress -i IN.jp2 -o OUT.png makes a PNG",
    b"\xff\x4f\xff\x51": "JPEG 2000 is not read; opj_decompress -i IN.j2k -o OUT.png makes a PNG",
}
"""First bytes of other formats -> reason and remedy."""

_HEIF = re.compile(rb"....ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
"""First bytes of HEVC in its container. The brands mif1 and msf1 may hold AVIF as well, which
Pillow tries first."""

_CUT_SHORT = re.compile(r"runcat|nd of file|outside of file bounds|Cannot read full|too small")
"""Parts of the messages of decoders for files that end too early."""

_PLAIN_HEADERS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "PPM")
"""Formats whose header has the size of the pixels as stored, before they are turned upright."""


def _pillow_settings_now() -> tuple[int | None, bool, int]:
    """The present settings of Pillow: limit of pixels, truncated files, AVIF threads."""
    lenient = ImageFile.LOAD_TRUNCATED_IMAGES
    return Image.MAX_IMAGE_PIXELS, lenient, AvifImagePlugin.DEFAULT_MAX_THREADS


def _set_pillow(settings: tuple[int | None, bool, int]) -> None:
    """Set the limit of pixels, truncated files and AVIF threads."""
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = settings[:2]
    AvifImagePlugin.DEFAULT_MAX_THREADS = settings[2]


# Pillow's own limit of pixels is off, because it only warns; `max_pixels` refuses and records the
# image. Truncated files are refused, even if another library in this process accepts them. An AVIF
# is decoded in one thread, as the loader has one for each CPU.
_pillow_settings: ProcessSetting[tuple[int | None, bool, int]] = ProcessSetting(
    _pillow_settings_now, _set_pillow, (None, False, 1)
)


def decode_array(data: bytes, policy: ImagePolicy, at_least: int | None) -> npt.NDArray[Any]:
    """Decode an image into an array, with the JPEG decoder of the policy.

    Args:
        data: encoded bytes.
        policy: treatment of orientation, transparency and size.
        at_least: as for `decode_pillow`.

    Returns:
        (H, W, 3) uint8 RGB, upright; (H, W, channels) of any numbers if the policy has `channels`.

    Raises:
        ImageFault: the image cannot be decoded; its status names the reason.
    """
    image = decode_image(data, policy, at_least)
    return image if isinstance(image, np.ndarray) else np.array(image)


def decode_image(
    data: bytes, policy: ImagePolicy, at_least: int | None
) -> Image.Image | npt.NDArray[Any]:
    """Decode an image, in the type of its decoder: a Pillow image, or an array of simplejpeg.

    Nothing is copied, other than by `decode_array`.

    Args:
        data: encoded bytes.
        policy: treatment of orientation, transparency and size.
        at_least: as for `decode_pillow`.

    Raises:
        ImageFault: the image cannot be decoded; its status names the reason.
    """
    # Damaged files raise not only OSError but also ValueError, TypeError, SyntaxError, struct.error
    # and others, so the boundary around one image catches Exception.
    try:
        with _pillow_settings:
            if policy.channels is not None:
                return _decode_channels(data, policy, policy.channels)
            return _decode_rgb(data, policy, at_least)
    except (ImageFault, MemoryError):
        raise
    except Exception as error:
        raise _fault(data, error) from error


def decode_box_image(
    data: bytes, policy: ImagePolicy, at_least: int | None
) -> Image.Image | npt.NDArray[Any] | TiffBlocks:
    """Decode an image of which boxes are cut; like `decode_image`, but for large TIFFs.

    The tiles of a large TIFF are left for `TiffBlocks.cut`, and one without compression is an array
    in the encoded bytes.

    Args:
        data: encoded bytes.
        policy: treatment of orientation, transparency and size.
        at_least: as for `decode_pillow`.

    Raises:
        ImageFault: the image cannot be decoded; its status names the reason.
    """
    try:
        large = tiff_blocks(data, policy) if is_tiff(data) else None
    except (ImageFault, MemoryError):
        raise
    except Exception as error:
        raise _fault(data, error) from error
    return decode_image(data, policy, at_least) if large is None else large


def decode_pillow(data: bytes, policy: ImagePolicy, at_least: int | None = None) -> Image.Image:
    """Decode an image into a Pillow image, a JPEG by Pillow as well.

    Args:
        data: encoded bytes.
        policy: treatment of orientation, transparency and size.
        at_least: pixels. A JPEG whose shorter side is at least four times as long may be decoded at
            a fraction of its size, with a shorter side of at least twice `at_least`. None decodes
            at full size.

    Returns:
        The first frame, mode RGB, upright.

    Raises:
        ImageFault: the image cannot be decoded; its status names the reason.
    """
    image = decode_image(data, replace(policy, jpeg=PILLOW), at_least)
    return image if isinstance(image, Image.Image) else Image.fromarray(image)


def image_sizes(
    data: bytes, policy: ImagePolicy, at_least: int | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Size of an image in its file and after `decode_pillow`; pixels are decoded if necessary.

    Args:
        data: encoded bytes.
        policy: treatment of orientation, transparency and size.
        at_least: as for `decode_pillow`.

    Returns:
        (height, width) of the upright image at full size, and (height, width) after decoding, which
        are smaller for a JPEG that is decoded at a fraction of its size.

    Raises:
        ImageFault: the image cannot be read.
    """
    try:
        with _pillow_settings:
            return _sizes(data, policy, at_least)
    except (ImageFault, MemoryError):
        raise
    except Exception as error:
        raise _fault(data, error) from error


def _sizes(
    data: bytes, policy: ImagePolicy, at_least: int | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """`image_sizes` without its boundary for exceptions."""
    image = None if is_tiff(data) else _open(data)
    if image is None or image.format not in _PLAIN_HEADERS:
        decoded = _decode_rgb(data, replace(policy, jpeg=PILLOW), None)
        if isinstance(decoded, Image.Image):
            decoded = np.asarray(decoded)
        height, width, _ = decoded.shape
        return (height, width), (height, width)
    full = image.size
    _draft(image, at_least)
    turn = orientation_of(image) if policy.exif == "apply" else 1
    width, height = full
    columns, rows = image.size
    if is_transposed(turn):
        return (width, height), (columns, rows)
    return (height, width), (rows, columns)


def _decode_rgb(
    data: bytes, policy: ImagePolicy, at_least: int | None
) -> Image.Image | npt.NDArray[np.uint8]:
    """The image as Pillow's type, or as an array if another decoder has decoded it."""
    if policy.jpeg == SIMPLEJPEG and (pixels := _plain_jpeg(data, policy, at_least)) is not None:
        return pixels
    if is_tiff(data) and (pages := _pages(data)):
        return _decode_tiff(data, pages, policy)
    image = _open(data)
    policy.check_pixels(*image.size)
    if image.format == "PNG":
        check_png(data)
        _scale_transparent_colour(image)
    if image.info.get("bit_depth", 8) > 8:  # of pillow-heif
        return _deep_heif(data, policy)
    turn = orientation_of(image) if policy.exif == "apply" else 1
    if image.format in ("JPEG", "MPO"):
        _draft(image, at_least)
        if policy.jpeg == SIMPLEJPEG and image.mode in ("RGB", "L"):
            pixels = decode_sound_jpeg(data, image.size)
            if pixels is not None:
                return np.ascontiguousarray(turn_array(pixels, turn))
        check_jpeg(data, policy)
    image.load()
    return turn_image(to_rgb(image, policy.background, policy.white), turn)


def _deep_heif(data: bytes, policy: ImagePolicy) -> npt.NDArray[np.uint8]:
    """A HEIC of more than 8 bits as RGB, upright.

    libheif's own conversion to 8 bits drops bits before it computes RGB, and differs by up to 3.
    """
    from pillow_heif import open_heif

    image = open_heif(io.BytesIO(data), convert_hdr_to_8bit=False, hdr_to_16bit=False)
    values = np.asarray(image)
    values = values[:, :, None] if values.ndim == 2 else values
    alpha = values[:, :, -1] if values.shape[2] in (2, 4) else None
    colours = values if alpha is None else values[:, :, :-1]
    limits = NumberRange(0, 2 ** int(image.info["bit_depth"]) - 1)
    is_premultiplied = "a;" in image.mode
    return numbers_to_rgb(colours, limits, policy.background, alpha, is_premultiplied)


def _decode_tiff(
    data: bytes, pages: list[Tags], policy: ImagePolicy
) -> Image.Image | npt.NDArray[np.uint8]:
    """A TIFF as RGB: by Pillow if that reads it as its tags say, otherwise by tifffile."""
    number = _choose_page(pages, policy)
    tags = pages[number]
    check_blocks(tags)
    image = None
    if is_right_by_pillow(tags) and not data.startswith(UNREADABLE):
        with contextlib.suppress(UnidentifiedImageError):  # more channels, or other colours
            image = _open(data)
    if image is None:
        turn = _turn_of_tags(tags) if policy.exif == "apply" else 1
        pixels = tiff_rgb(data, number, tags, policy)
        return np.ascontiguousarray(turn_array(pixels, turn))
    for block, tables in jpeg_blocks(tags, data):
        check_jpeg(with_tables(block, tables), policy)
    if number:
        image.seek(number)
    # Pillow turns a TIFF upright in load() and drops its orientation, so that is read before.
    turn = 1 if policy.exif == "apply" else inverse(orientation_of(image))
    image.load()
    return turn_image(to_rgb(image, policy.background), turn)


def _pages(data: bytes) -> list[Tags]:
    """Tags of the pages of a TIFF; empty if it is damaged, so that Pillow says how."""
    try:
        return read_tags(data)
    except struct.error:
        return []


def _choose_page(pages: list[Tags], policy: ImagePolicy) -> int:
    """Number of the page that is the image, with a warning if there are several.

    Raises:
        ImageFault: there is none, or it has too many pixels.
    """
    full = full_pages(pages)
    tags = pages[full[0]]
    policy.check_pixels(*(int(tags.get(tag, (0,))[0]) for tag in (WIDTH, HEIGHT)))
    if len(full) > 1:
        check_no_channel_pages(tags)
        warn(f"TIFF of {len(full)} pages, of which the first is read")
    return full[0]


def _turn_of_tags(tags: Tags) -> int:
    """EXIF orientation of a TIFF from 1 to 8; 1 if it is missing or out of range."""
    turn = int(tags.get(ORIENTATION, (1,))[0])
    return turn if turn in range(1, 9) else 1


def _decode_channels(data: bytes, policy: ImagePolicy, channels: int) -> npt.NDArray[Any]:
    """(H, W, channels) with the numbers of the file, upright."""
    if data.startswith(NPY):
        return decode_npy(data, policy)
    if is_tiff(data) and (pages := _pages(data)):
        return _decode_tiff_channels(data, pages, policy, channels)
    image = _open(data)
    policy.check_pixels(*image.size)
    if image.format == "PNG":
        check_png(data)
    if image.format in ("JPEG", "MPO"):
        check_jpeg(data, policy)
    array = pillow_array(image)
    if array is None and is_deep_png(image):
        array = decode_deep_png(data)
    if array is None:
        raise format_fault(
            f"a {image.format} of mode {image.mode}, which cannot be read without a change of its "
            "numbers"
        )
    turn = orientation_of(image) if policy.exif == "apply" else 1
    return turn_array(check_array(array, channels), turn)


def _decode_tiff_channels(
    data: bytes, pages: list[Tags], policy: ImagePolicy, channels: int
) -> npt.NDArray[Any]:
    """`_decode_channels` of a TIFF; its channels may be pages of one channel each."""
    numbers = full_pages(pages)
    samples = int(pages[numbers[0]].get(SAMPLES, (1,))[0])
    if not samples == 1 != channels == len(numbers):
        if samples != channels:
            raise wrong_channels(samples, channels)
        numbers = [_choose_page(pages, policy)]
    for number in numbers:
        check_blocks(pages[number])
    tags = pages[numbers[0]]
    array, turn = None, _turn_of_tags(tags) if policy.exif == "apply" else 1
    is_exact = is_exact_by_pillow(tags) and not data.startswith(UNREADABLE)
    if len(numbers) == 1 and is_exact:
        for block, tables in jpeg_blocks(tags, data):
            check_jpeg(with_tables(block, tables), policy)
        image = _open(data)
        image.seek(numbers[0])
        stored_orientation = orientation_of(image)
        array = np.asarray(image)  # upright
        turn = 1 if policy.exif == "apply" else inverse(stored_orientation)
    if array is None:
        array = tiff_numbers(data, numbers, policy)
    return turn_array(check_array(array, channels), turn)


def _draft(image: ImageFile.ImageFile, at_least: int | None) -> None:
    """Let a JPEG that is far larger than needed be decoded at a fraction of its size."""
    # `draft` of a HEIC image would return its thumbnail.
    if at_least is not None and _is_reduced(image, at_least):
        width, height = image.size
        scale = 2 * at_least / min(width, height)
        image.draft("RGB", (int(width * scale), int(height * scale)))


def _plain_jpeg(
    data: bytes, policy: ImagePolicy, at_least: int | None
) -> npt.NDArray[np.uint8] | None:
    """Decode a sound JPEG of full size without EXIF data, without Pillow.

    Returns:
        (H, W, 3) uint8, or None for images that need more than that.
    """
    if not data.startswith(JPEG):
        return None
    header = read_header(data)
    size = plain_jpeg_size(data, header)
    if size is None or size[0] * size[1] > policy.max_pixels:
        return None
    if at_least is not None and _far_larger(size, at_least):
        return None
    return decode_sound_jpeg(data, size, header)


def _far_larger(size: tuple[int, int], at_least: int) -> bool:
    """Return whether a JPEG of this (width, height) is decoded at a fraction of its size."""
    return min(size) >= 4 * at_least


def is_decoded_reduced(data: bytes, at_least: int) -> bool:
    """Return whether `decode_pillow` reads an image at a fraction of its size.

    Args:
        data: encoded bytes.
        at_least: as for `decode_pillow`.
    """
    try:
        with _pillow_settings:
            image = _open(data)
    except (OSError, ImageFault):
        return False
    return _is_reduced(image, at_least)


def _is_reduced(image: Image.Image, at_least: int) -> bool:
    """Return whether an image that was opened is decoded at a fraction of its size."""
    scalable = image.format in ("JPEG", "MPO") and image.mode == "RGB"
    return scalable and _far_larger(image.size, at_least)


def _open(data: bytes) -> ImageFile.ImageFile:
    """An image whose header has been read, by an allowed parser of Pillow or by pillow-heif."""
    if data.startswith(JPEG) and is_tiff(exif := exif_of_jpeg(data)):
        _pages(exif)  # raises if they overlap: Pillow reads EXIF data when it opens a JPEG
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if not _HEIF.match(data):
            raise
    if importlib.util.find_spec("pillow_heif") is None:
        raise ImageFault(Status.UNSUPPORTED, 'HEIC needs pip install "featx[heif]"')
    from pillow_heif import HeifImageFile

    image: ImageFile.ImageFile = HeifImageFile(io.BytesIO(data))  # type: ignore[no-untyped-call]
    return image


def check_png(data: bytes) -> None:
    """Verify the checksums of the pixel data of a PNG, which Pillow does not.

    Raises:
        ImageFault: a checksum is wrong.
    """
    offset = 8
    while offset + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, offset)
        end = offset + 8 + length
        if kind == b"IEND" or end + 4 > len(data):
            return  # decoding finds out whether the file is complete
        if kind == b"IDAT":
            stored = int.from_bytes(data[end : end + 4])
            if zlib.crc32(memoryview(data)[offset + 4 : end]) != stored:
                raise ImageFault(Status.DECODE_ERROR, "the checksum of its pixels is wrong")
        offset = end + 4


def _scale_transparent_colour(image: ImageFile.ImageFile) -> None:
    """Scale the transparent colour of a PNG to the 8 bits of its pixels.

    Pillow scales pixels of 2, 4 and 3 x 16 bits to 8 bits, but not the colour with which it
    compares them. Of 16 bits the upper 8 are compared, as Pillow keeps no others.
    """
    clear = image.info.get("transparency")
    raw_mode = image.tile[0].args if image.tile else None
    if isinstance(clear, int) and raw_mode in ("L;2", "L;4"):
        image.info["transparency"] = (clear & 3) * 85 if raw_mode == "L;2" else (clear & 15) * 17
    elif isinstance(clear, tuple) and raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in clear)


def _fault(data: bytes, error: Exception) -> ImageFault:
    """The fault that describes an exception of a decoder."""
    message = str(error).replace("\n", " ")[:200] or "no message"
    if isinstance(error, UnidentifiedImageError) and (why := why_not_rgb(data)) is not None:
        return format_fault(why)
    if isinstance(error, Image.DecompressionBombError):
        status = Status.TOO_LARGE
    elif isinstance(error, UnidentifiedImageError):
        status, message = _describe_unknown(data)
    elif isinstance(error, EOFError | struct.error | zlib.error) or _CUT_SHORT.search(message):
        status = Status.TRUNCATED
    else:
        status = Status.DECODE_ERROR
    return ImageFault(status, message, type(error).__name__)


def _describe_unknown(data: bytes) -> tuple[Status, str]:
    """Status and message for a file that no parser accepts."""
    if _SIGNATURE.match(data) is None:
        known = (reason for start, reason in _NOT_READ.items() if data.startswith(start))
        return Status.UNSUPPORTED, next(known, "not an image of a known format")
    if data[4:11] == b"ftypavi" and not AvifImagePlugin.SUPPORTED:
        return Status.UNSUPPORTED, "AVIF needs a Pillow that has it, such as its wheels on PyPI"
    if data.startswith(b"\xff\xd8"):
        return Status.DECODE_ERROR, "its header is damaged, or it is a lossless or 12-bit JPEG"
    return Status.DECODE_ERROR, "its header is damaged"
