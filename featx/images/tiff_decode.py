"""Decoding of TIFFs, by tifffile where Pillow reads them otherwise than their tags say."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Set
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from featx.errors import counted
from featx.images.array_decode import check_array, wrong_channels
from featx.images.decode_settings import ImagePolicy
from featx.images.decoder_warnings import warn
from featx.images.jpeg_decode import check_jpeg, frame_size, with_tables
from featx.images.rgb_conversion import (
    NUMBER_TYPES,
    NUMBERS,
    NumberRange,
    format_fault,
    inverse,
    missing_codecs,
    numbers_to_rgb,
    orientation_of,
    to_rgb,
    turn_array,
    turn_image,
    unknown_white,
)
from featx.images.tiff_tags import (
    JPEG_COMPRESSION,
    UNCOMPRESSED,
    UNREADABLE,
    Tags,
    block_places,
    check_blocks,
    check_no_channel_pages,
    first,
    full_pages,
    open_tiff,
    read_tags,
)
from featx.types import Array, ImageFault, Status

if TYPE_CHECKING:
    from tifffile import TiffPage

WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, YCBCR = 0, 1, 2, 6
"""Values of the tag PhotometricInterpretation."""

_COLOURS = {3: "a palette", 4: "a mask", 5: "CMYK", 6: "YCbCr", 8: "Lab", 32803: "a colour filter"}
"""Others -> what messages call them."""

_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
"""What Pillow takes for the orientation in XMP data."""

_UNSIGNED = 1
"""Value of the tag SampleFormat."""

_ASSOCIATED, _UNASSOCIATED = 1, 2
"""Values of the tag ExtraSamples: alpha by which colours are multiplied, or are not."""

_EXACT = {
    ((8,), BLACK_IS_ZERO, _UNSIGNED),
    ((16,), BLACK_IS_ZERO, _UNSIGNED),
    ((32,), BLACK_IS_ZERO, 3),
    ((8, 8, 8), RGB, _UNSIGNED),
}
"""Bits, photometric interpretation and kind of number of the pages that Pillow reads exactly."""

COMPRESSIONS = frozenset({1, 5, 8, 32773, 32946, 34925, 50000})
"""None, LZW, deflate, PackBits, deflate again, LZMA, and Zstandard: the result is never larger than
a strip or tile. Codecs of images take their size from the compressed bytes, so that a small hostile
file would decide about memory."""


def decode_tiff(data: bytes, policy: ImagePolicy) -> Image.Image | npt.NDArray[np.uint8]:
    """A TIFF as RGB: by Pillow if that reads it as its tags say, otherwise by tifffile."""
    pages = read_tags(data)
    number = _choose_page(pages, policy)
    tags = pages[number]
    check_blocks(tags)
    image = None
    if is_right_by_pillow(tags) and not data.startswith(UNREADABLE):
        with contextlib.suppress(UnidentifiedImageError):  # more channels, or other colours
            image = Image.open(io.BytesIO(data), formats=["TIFF"])
    if image is None:
        turn = _turn_of_tags(tags) if policy.exif == "apply" else 1
        pixels = tiff_rgb(data, number, tags, policy)
        return np.ascontiguousarray(turn_array(pixels, turn))
    _check_jpeg_blocks(tags, data, policy)
    if number:
        image.seek(number)
    # Pillow turns a TIFF upright in load() and drops its orientation, so that is read before.
    turn = 1 if policy.exif == "apply" else inverse(orientation_of(image))
    image.load()
    return turn_image(to_rgb(image, policy.background), turn)


def decode_tiff_channels(data: bytes, policy: ImagePolicy, channels: int) -> Array:
    """(H, W, channels) with the numbers of a TIFF; channels may be pages of one channel each."""
    pages = read_tags(data)
    numbers = full_pages(pages)
    samples = int(first(pages[numbers[0]], "SamplesPerPixel"))
    if not samples == 1 != channels == len(numbers):
        if samples != channels:
            raise wrong_channels(samples, channels)
        numbers = [_choose_page(pages, policy)]
    for number in numbers:
        check_blocks(pages[number])
    tags = pages[numbers[0]]
    array, turn = None, _turn_of_tags(tags) if policy.exif == "apply" else 1
    is_exact = is_exact_by_pillow(tags) and not data.startswith(UNREADABLE)
    # Pillow 13 exchanges the bytes of compressed floats once more than libtiff.
    is_exact &= not (data.startswith(b"MM") and tags.get("BitsPerSample") == (32,))
    if len(numbers) == 1 and is_exact:
        _check_jpeg_blocks(tags, data, policy)
        image = Image.open(io.BytesIO(data), formats=["TIFF"])
        image.seek(numbers[0])
        stored_orientation = orientation_of(image)
        array = np.asarray(image)  # upright
        turn = 1 if policy.exif == "apply" else inverse(stored_orientation)
    if array is None:
        array = tiff_numbers(data, numbers, policy)
    return turn_array(check_array(array, channels), turn)


def _check_jpeg_blocks(tags: Tags, data: bytes, policy: ImagePolicy) -> None:
    """Check the strips or tiles of a page that are JPEGs: their data and their sizes.

    libtiff leaves in a strip or tile what its JPEG lacks: zeros, or the pixels of another one.
    """
    if first(tags, "Compression") != JPEG_COMPRESSION:
        return
    tables = bytes(tags.get("JPEGTables", b""))  # type: ignore[arg-type]
    width, height = tags["ImageWidth"][0], tags["ImageLength"][0]
    rows = min(first(tags, "RowsPerStrip", height), height)
    for number, (offset, count) in enumerate(zip(*block_places(tags), strict=False)):
        block = with_tables(data[int(offset) : int(offset + count)], tables)
        check_jpeg(block, policy)
        if "TileOffsets" in tags:
            expected = tags["TileWidth"][0], tags["TileLength"][0]
        else:
            top = number % math.ceil(height / rows) * rows
            expected = width, min(rows, height - top)
        found = frame_size(block)
        if found[0] < expected[0] or found[1] < expected[1]:
            raise ImageFault(
                Status.TRUNCATED,
                f"its strip or tile {number} is a JPEG of {found[0]} x {found[1]} pixels; expected "
                f"{expected[0]:.0f} x {expected[1]:.0f}",
            )


def _choose_page(pages: list[Tags], policy: ImagePolicy) -> int:
    """Number of the page that is the image, with a warning if there are several."""
    full = full_pages(pages)
    tags = pages[full[0]]
    policy.check_pixels(int(first(tags, "ImageWidth", 0)), int(first(tags, "ImageLength", 0)))
    if len(full) > 1:
        check_no_channel_pages(tags)
        warn(f"TIFF of {len(full)} pages, of which the first is read")
    return full[0]


def _turn_of_tags(tags: Tags) -> int:
    """Orientation of a TIFF from 1 to 8; 1 if it is missing or out of range.

    As with Pillow, that of its XMP data counts if it has no tag.
    """
    turn, xmp = int(first(tags, "Orientation")), tags.get("XMP")
    if "Orientation" not in tags and isinstance(xmp, bytes):
        match = _XMP_ORIENTATION.search(xmp)
        turn = 1 if match is None else int(match[1])
    return turn if turn in range(1, 9) else 1


def is_right_by_pillow(tags: Tags) -> bool:
    """Return whether Pillow, if it reads a page at all, reads it as its tags say.

    Pillow looks at no limits of samples, does not invert grey of 16 bits, reads signed bytes as
    unsigned ones, rounds colours of 16 bits that are multiplied by alpha twice, mixes planes up if
    there are others than grey or RGB of 8 bits, and knows no subsampling without compression.
    """
    bits, samples = {*tags.get("BitsPerSample", (1,))}, int(first(tags, "SamplesPerPixel"))
    photometric = first(tags, "PhotometricInterpretation", -1)
    is_planar = first(tags, "PlanarConfiguration") != 1
    if {*tags.get("SampleFormat", (_UNSIGNED,))} != {_UNSIGNED}:
        return False
    if is_planar and (bits != {8} or (photometric, samples) not in ((BLACK_IS_ZERO, 1), (RGB, 3))):
        return False
    is_raw = first(tags, "Compression") == UNCOMPRESSED
    if is_raw and photometric == YCBCR and set(tags.get("YCbCrSubSampling", (2, 2))) != {1}:
        return False
    if bits == {16}:
        has_limits = "SMinSampleValue" in tags or "SMaxSampleValue" in tags
        is_multiplied = _ASSOCIATED in tags.get("ExtraSamples", ())
        return photometric != WHITE_IS_ZERO and not has_limits and not is_multiplied
    return bits <= {1, 2, 4, 8}


def is_exact_by_pillow(tags: Tags) -> bool:
    """Return whether Pillow reads the numbers of a page as they are in the file."""
    bits = tuple(tags.get("BitsPerSample", (1,)))
    photometric = first(tags, "PhotometricInterpretation", -1)
    is_known = (bits, photometric, first(tags, "SampleFormat")) in _EXACT
    return is_known and int(first(tags, "SamplesPerPixel")) == len(bits)


def describe_tiff(tags: Tags) -> str:
    """Name the numbers of a TIFF: its channels, and the bits and kind of each."""
    bits = "/".join(str(number) for number in sorted({*tags.get("BitsPerSample", (1,))}))
    kinds = {1: "", 2: ", signed", 3: ", floats"}
    kind = kinds.get(int(first(tags, "SampleFormat")), ", others")
    channels = counted(int(first(tags, "SamplesPerPixel")), "channel")
    return f"a TIFF of {channels} of {bits} bits{kind}"


def tiff_numbers(data: bytes, pages: list[int], policy: ImagePolicy) -> Array:
    """Decode an image, with the numbers of the file. Returns (H, W, channels)."""
    with open_tiff(data) as file:
        found = [cast("TiffPage", file.pages[number]) for number in pages]
        for page in found:
            check_page(page, data, policy)
        if len({(page.shape, page.dtype) for page in found}) > 1:
            raise format_fault("1 channel; its pages have different sizes, so they are no channels")
        try:
            arrays = [page.asarray(maxworkers=1) for page in found]
        except ValueError as error:
            if "imagecodecs" in str(error):
                raise missing_codecs("a TIFF of this compression") from error
            raise
        axes = found[0].axes
    if axes == "YX":
        return np.stack(arrays, axis=2)
    [array] = arrays
    return array.transpose(1, 2, 0) if axes == "SYX" else array


def check_page(
    page: TiffPage, data: bytes, policy: ImagePolicy, compressions: Set[int] = COMPRESSIONS
) -> None:
    """Check that tifffile reads a page completely, within the limit of pixels."""
    sides = [(page.imagewidth, page.imagelength)]
    if page.is_tiled:
        sides.append((page.tilewidth, page.tilelength))
    for width, height in sides:
        policy.check_pixels(width, height)
    if page.dtype is None or page.dtype.newbyteorder("<").str not in NUMBER_TYPES:
        raise format_fault(f"its pixels are {page.dtype}; expected {NUMBERS}")
    if page.axes not in ("YX", "YXS", "SYX"):
        raise format_fault(f"its axes are {page.axes}; expected YX, YXS or SYX")
    if page.compression not in compressions:
        name = getattr(page.compression, "name", page.compression)
        raise format_fault(f"its compression {name} is not supported for such numbers")
    if not isinstance(page.bitspersample, int):
        raise format_fault(f"its channels are of {page.bitspersample} bits; expected equal ones")
    # tifffile fills what a cut file lacks with zeros.
    if not 0 < len(page.dataoffsets) == len(page.databytecounts):
        raise ImageFault(Status.DECODE_ERROR, "the places of its strips or tiles are damaged")
    ends = zip(page.dataoffsets, page.databytecounts, strict=True)
    if any(offset + count > len(data) for offset, count in ends):
        raise ImageFault(Status.TRUNCATED, "its pixels are outside of file bounds")
    planes = 1 if page.planarconfig == 1 else page.samplesperpixel
    num_bits = page.imagewidth * page.bitspersample * page.samplesperpixel // planes
    num_bytes = planes * page.imagelength * math.ceil(num_bits / 8)
    if page.compression == UNCOMPRESSED and sum(page.databytecounts) < num_bytes:
        raise ImageFault(Status.TRUNCATED, "it has fewer bytes than its pixels take")


def tiff_rgb(data: bytes, number: int, tags: Tags, policy: ImagePolicy) -> npt.NDArray[np.uint8]:
    """Decode a page to RGB of 8 bits, by what its tags say about black and white.

    Returns (H, W, 3) uint8.
    """
    photometric = first(tags, "PhotometricInterpretation", -1)
    samples = int(first(tags, "SamplesPerPixel"))
    extra = [int(kind) for kind in tags.get("ExtraSamples", ())]
    colours = 3 if photometric == RGB else 1
    if samples == colours + 1 and not extra:
        extra = [_UNASSOCIATED]  # as in files of 8 bits, where Pillow decides
    if photometric not in (WHITE_IS_ZERO, BLACK_IS_ZERO, RGB):
        kind = _COLOURS.get(int(photometric), f"colours of kind {photometric:.0f}")
        raise format_fault(f"{describe_tiff(tags)} of {kind}, which cannot be read in this layout")
    if samples != colours + len(extra):
        raise format_fault(
            f"{describe_tiff(tags)}, which is no RGB image of 8 bits: model.transform.scale reads "
            "any channels"
        )
    limits = tiff_range(tags, policy)
    array = tiff_numbers(data, [number], policy)
    alpha = next((i for i, kind in enumerate(extra) if kind in (_ASSOCIATED, _UNASSOCIATED)), None)
    return numbers_to_rgb(
        array[:, :, :colours],
        limits,
        policy.background,
        None if alpha is None else array[:, :, colours + alpha],
        is_premultiplied=alpha is not None and extra[alpha] == _ASSOCIATED,
    )


def tiff_range(tags: Tags, policy: ImagePolicy) -> NumberRange:
    """Numbers that are black and white: by the tags of samples, else by the bits."""
    bits = {*tags.get("BitsPerSample", (1,))}
    black = min(tags.get("SMinSampleValue", (0,)))
    white: float | None = None
    if "SMaxSampleValue" in tags:
        white = max(tags["SMaxSampleValue"])
    elif first(tags, "SampleFormat") == _UNSIGNED and len(bits) == 1 and max(bits) < 32:
        white = 2 ** int(max(bits)) - 1
    elif policy.white is not None:
        white = policy.white
    if white is None:
        raise unknown_white(describe_tiff(tags))
    if not black < white:
        raise format_fault(f"its tags say that black is {black:g} and white {white:g}")
    is_inverted = first(tags, "PhotometricInterpretation") == WHITE_IS_ZERO
    return NumberRange(white, black) if is_inverted else NumberRange(black, white)
