"""Decoding of encoded bytes into an upright RGB image, or an ImageFault with the reason.

This module and those that it imports are the only ones that name a decoder. simplejpeg decodes
sound JPEGs, to the same pixels as Pillow in less time, and Pillow all other images. decode=fast
decodes JPEGs that are far larger than needed at 1/2, 1/4 or 1/8 of their size, which libjpeg does
while it decodes. pillow-heif, if it is installed, decodes HEIC, and tifffile the TIFFs that Pillow
reads otherwise than their tags say.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace

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
)
from featx.images.decode_settings import PILLOW, SIMPLEJPEG, ImagePolicy
from featx.images.jpeg_decode import (
    JPEG,
    check_jpeg,
    decode_sound_jpeg,
    plain_jpeg_size,
    read_header,
)
from featx.images.rgb_conversion import (
    NumberRange,
    format_fault,
    is_transposed,
    numbers_to_rgb,
    orientation_of,
    to_rgb,
    turn_array,
    turn_image,
)
from featx.images.tiff_blocks import TiffBlocks, tiff_blocks
from featx.images.tiff_decode import decode_tiff, decode_tiff_channels
from featx.images.tiff_tags import is_tiff
from featx.types import Array, ImageFault, Status

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

_INTERLACED = (
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)
)  # fmt: skip
"""First column and row of each pass of an interlaced PNG, and their distances to the next ones."""

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


DecodedImage = Image.Image | Array
"""Upright image: a Pillow image, (H, W, 3) uint8 RGB, or (H, W, channels) of any numbers for a
transform with a scale. The fast path takes arrays, the reference Pillow images."""


@contextlib.contextmanager
def _faults_of(data: bytes) -> Iterator[None]:
    """Prepare Pillow, and turn the exceptions of decoders into an ImageFault."""
    # Damaged files raise not only OSError but also ValueError, TypeError, SyntaxError, struct.error
    # and others, so the boundary around one image catches Exception.
    try:
        with _pillow_settings:
            yield
    except (ImageFault, MemoryError):
        raise
    except Exception as error:
        raise _fault(data, error) from error


def decode_array(data: bytes, policy: ImagePolicy, at_least: int | None) -> Array:
    """Decode an image into an array, with the JPEG decoder of the policy.

    Returns (H, W, 3) uint8 RGB, upright; (H, W, channels) of any numbers if the policy has
    `channels`.
    """
    image = decode_image(data, policy, at_least)
    return image if isinstance(image, np.ndarray) else np.array(image)


def decode_image(data: bytes, policy: ImagePolicy, at_least: int | None) -> DecodedImage:
    """Decode an image, in the type of its decoder: a Pillow image, or an array of simplejpeg.

    Nothing is copied, other than by `decode_array`.
    """
    with _faults_of(data):
        if policy.channels is not None:
            return _decode_channels(data, policy, policy.channels)
        return _decode_rgb(data, policy, at_least)


def decode_box_image(
    data: bytes, policy: ImagePolicy, at_least: int | None
) -> DecodedImage | TiffBlocks:
    """Decode an image of which boxes are cut; like `decode_image`, but for large TIFFs.

    The tiles of a large TIFF are left for `TiffBlocks.cut`, and one without compression is an array
    in the encoded bytes.
    """
    with _faults_of(data):
        large = tiff_blocks(data, policy) if is_tiff(data) else None
    return decode_image(data, policy, at_least) if large is None else large


def decode_pillow(data: bytes, policy: ImagePolicy, at_least: int | None = None) -> Image.Image:
    """Decode an image into a Pillow image, a JPEG by Pillow as well.

    Args:
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
        at_least: as for `decode_pillow`.

    Returns:
        (height, width) of the upright image at full size, and (height, width) after decoding, which
        are smaller for a JPEG that is decoded at a fraction of its size.

    Raises:
        ImageFault: the image cannot be read.
    """
    with _faults_of(data):
        image = None if is_tiff(data) else _open(data)
        if image is None or image.format not in _PLAIN_HEADERS:
            decoded = np.asarray(_decode_rgb(data, replace(policy, jpeg=PILLOW), None))
            height, width, _ = decoded.shape
            return (height, width), (height, width)
        width, height = image.size
        _draft(image, at_least)
        columns, rows = image.size
        if policy.exif == "apply" and is_transposed(orientation_of(image)):
            return (width, height), (columns, rows)
        return (height, width), (rows, columns)


def _decode_rgb(data: bytes, policy: ImagePolicy, at_least: int | None) -> DecodedImage:
    """The image as Pillow's type, or as an array if another decoder has decoded it."""
    if data.startswith(JPEG) and policy.jpeg == SIMPLEJPEG:
        pixels = _decode_jpeg(data, policy, at_least)
        if pixels is not None:
            return pixels
    if is_tiff(data):
        return decode_tiff(data, policy)
    image = _open(data)
    policy.check_pixels(*image.size)
    if image.format == "PNG":
        check_png(data)
        _scale_transparent_colour(image)
    if image.info.get("bit_depth", 8) > 8:  # of pillow-heif
        return _deep_heif(data, policy)
    if image.format in ("JPEG", "MPO"):
        _draft(image, at_least)
        check_jpeg(data, policy)
    # Before `orientation_of`, which loads a PNG, hides its exceptions, and leaves black lines.
    image.load()
    if image.format == "PNG":
        check_png_rows(image, data)
    turn = orientation_of(image) if policy.exif == "apply" else 1
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


def _decode_jpeg(
    data: bytes, policy: ImagePolicy, at_least: int | None
) -> npt.NDArray[np.uint8] | None:
    """A sound JPEG of RGB or grey, decoded by simplejpeg; None for others.

    Pillow, which takes 20 us, is asked only for an orientation and a fraction of the size.
    """
    header = read_header(data)
    size, turn = plain_jpeg_size(data, header), 1
    if size is None or (at_least is not None and min(size) >= 4 * at_least):
        image = _open(data)
        if image.mode not in ("RGB", "L"):
            return None
        policy.check_pixels(*image.size)
        turn = orientation_of(image) if policy.exif == "apply" else 1
        _draft(image, at_least)
        size = image.size
    policy.check_pixels(*size)
    pixels = decode_sound_jpeg(data, size, header)
    return None if pixels is None else np.ascontiguousarray(turn_array(pixels, turn))


def _decode_channels(data: bytes, policy: ImagePolicy, channels: int) -> Array:
    """(H, W, channels) with the numbers of the file, upright."""
    if data.startswith(NPY):
        return decode_npy(data, policy)
    if is_tiff(data):
        return decode_tiff_channels(data, policy, channels)
    image = _open(data)
    policy.check_pixels(*image.size)
    if image.format == "PNG":
        check_png(data)
    if image.format in ("JPEG", "MPO"):
        check_jpeg(data, policy)
    array = pillow_array(image)
    if array is not None and image.format == "PNG":
        check_png_rows(image, data)
    if array is None and is_deep_png(image):
        array = decode_deep_png(data)
    if array is None:
        raise format_fault(
            f"a {image.format} of mode {image.mode}, which cannot be read without a change of its "
            "numbers"
        )
    turn = orientation_of(image) if policy.exif == "apply" else 1
    return turn_array(check_array(array, channels), turn)


def _draft(image: ImageFile.ImageFile, at_least: int | None) -> None:
    """Let a JPEG that is far larger than needed be decoded at a fraction of its size."""
    # `draft` of a HEIC image would return its thumbnail.
    if at_least is not None and _is_reduced(image, at_least):
        width, height = image.size
        scale = 2 * at_least / min(width, height)
        image.draft("RGB", (int(width * scale), int(height * scale)))


def is_decoded_reduced(data: bytes, at_least: int) -> bool:
    """Return whether `decode_pillow` with `at_least` reads an image at a fraction of its size.

    Raises what Pillow raises for bytes that are no image, an OSError or ImageFault.
    """
    with _pillow_settings:
        return _is_reduced(_open(data), at_least)


def _is_reduced(image: Image.Image, at_least: int) -> bool:
    """Return whether an image that was opened is decoded at a fraction of its size."""
    scalable = image.format in ("JPEG", "MPO") and image.mode == "RGB"
    return scalable and min(image.size) >= 4 * at_least


def _open(data: bytes) -> ImageFile.ImageFile:
    """An image whose header has been read, by an allowed parser of Pillow or by pillow-heif."""
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
    """Verify the checksums of the pixel data of a PNG, which Pillow does not."""
    for _ in _png_data(data):
        pass


def _png_data(data: bytes) -> Iterator[memoryview]:
    """The compressed pixel data of each chunk of a PNG, whose checksum is right."""
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
            yield memoryview(data)[offset + 8 : end]
        offset = end + 4


def check_png_rows(image: Image.Image, data: bytes) -> None:
    """Refuse a PNG whose pixel data have an end before its last row.

    Pillow leaves the rows that are missing zero. So only images whose last row is zero, and
    interlaced ones, are decompressed once more.
    """
    width, height, bits, kind, interlace = struct.unpack_from(
        ">IIBB2xB", data, data.index(b"IHDR") + 4
    )
    if not interlace and any(image.crop((0, height - 1, width, height)).tobytes()):
        return
    row_bits = bits * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    num_missing = 0
    for x, y, dx, dy in _INTERLACED if interlace else ((0, 0, 1, 1),):
        columns, rows = -((x - width) // dx), -((y - height) // dy)
        num_missing += rows * (1 + -(-columns * row_bits // 8)) if columns else 0
    stream = zlib.decompressobj()
    for chunk in _png_data(data):
        num_missing -= len(stream.decompress(chunk, num_missing))
        if num_missing == 0:
            return
    raise ImageFault(Status.TRUNCATED, "its pixel data end before its last row")


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
    fault = ImageFault.of(error)
    if not isinstance(error, UnidentifiedImageError):
        if isinstance(error, EOFError | struct.error | zlib.error) or _CUT_SHORT.search(str(fault)):
            fault.status = Status.TRUNCATED
        return fault

    # No parser accepts the file.
    if (why := why_not_rgb(data)) is not None:
        return format_fault(why)
    status, message = Status.DECODE_ERROR, "its header is damaged"
    if _SIGNATURE.match(data) is None:
        known = (reason for start, reason in _NOT_READ.items() if data.startswith(start))
        status, message = Status.UNSUPPORTED, next(known, "not an image of a known format")
    elif data[4:11] == b"ftypavi" and not AvifImagePlugin.SUPPORTED:
        status = Status.UNSUPPORTED
        message = "AVIF needs a Pillow that has it, such as its wheels on PyPI"
    elif data.startswith(b"\xff\xd8"):
        message = "its header is damaged, or it is a lossless or 12-bit JPEG"
    return ImageFault(status, message, fault.error)
