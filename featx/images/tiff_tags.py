"""Tags of a TIFF that decide about its pixels, and the choice of a page."""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast, get_args

from PIL import Image

from featx.errors import counted
from featx.images.rgb_conversion import format_fault
from featx.types import ImageFault, Status

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffFormat, TiffPage, TiffTag

_TIFF = re.compile(rb"II[*+]\0|MM\0[*+]")

UNREADABLE = b"MM\0+"
"""First bytes of a BigTIFF of big-endian numbers, whose orientation Pillow 13 does not find."""

Tag = Literal[
    "BitsPerSample", "ColorMap", "Compression", "ExtraSamples", "ImageDescription", "ImageLength",
    "ImageWidth", "JPEGTables", "NewSubfileType", "Orientation", "PhotometricInterpretation",
    "PlanarConfiguration", "RowsPerStrip", "SMaxSampleValue", "SMinSampleValue", "SampleFormat",
    "SamplesPerPixel", "StripByteCounts", "StripOffsets", "SubIFDs", "SubfileType",
    "TileByteCounts", "TileLength", "TileOffsets", "TileWidth", "XMP", "YCbCrSubSampling",
]  # fmt: skip
"""Names of tags that decide about pixels."""

_READ = frozenset(get_args(Tag)) - {"ColorMap"}

_ESSENTIAL = frozenset(get_args(Tag)) - {"ImageDescription", "XMP"}
"""Tags without whose values a page is read otherwise."""

MAX_PAGES, MAX_VALUES = 10_000, 1 << 22
"""Number of pages that are read, and largest number of values of a tag; a file may have more."""

UNCOMPRESSED, JPEG_COMPRESSION = 1, 7
"""Values of the tag Compression."""

_REDUCED, _MASK = 1, 4
"""Bits of NewSubfileType: a smaller version of another page, and a mask."""

_OME_CHANNELS = re.compile(rb'<Pixels\b[^>]*?\bSizeC="(\d+)"')
_IMAGEJ_CHANNELS = re.compile(rb"\AImageJ=[^\0]*?\nchannels=(\d+)")

Tags = Mapping[Tag, Sequence[float]]
"""Tag -> values; bytes for texts and bytes."""


def first(tags: Tags, tag: Tag, default: float = 1) -> float:
    """Return the first value of a tag."""
    return tags.get(tag, (default,))[0]


def is_tiff(data: bytes) -> bool:
    """Return whether bytes begin like a TIFF."""
    return _TIFF.match(data) is not None


def open_tiff(data: bytes) -> TiffFile:
    """Open a TIFF by tifffile, as one without the conventions of two makers of microscopes."""
    from tifffile import TiffFile

    return TiffFile(io.BytesIO(data), is_scanimage=False, is_ndpi=False)


def read_tags(data: bytes) -> list[Tags]:
    """Read the tags of each page of a TIFF, up to one that is damaged."""
    pages: list[Tags] = []
    offsets: set[int] = set()
    problem: Exception = ValueError("it has no page")
    try:
        with open_tiff(data) as file:
            for page in cast("Iterable[TiffPage]", file.pages):
                if page.offset in offsets or len(pages) == MAX_PAGES:
                    break
                offsets.add(page.offset)
                # Pillow and libtiff copy the value of every tag, and tags may overlap.
                if sum(int(tag.valuebytecount) for tag in page.tags) > 2 * len(data):
                    raise ImageFault(
                        Status.DECODE_ERROR, "its tags overlap, to more bytes than it has"
                    )
                names = _names(data, file.tiff, page.offset)
                if lost := _ESSENTIAL & names - {tag.name for tag in page.tags}:
                    raise ImageFault(
                        Status.DECODE_ERROR, f"the value of its tag {min(lost)} is damaged"
                    )
                read = (t for t in page.tags if t.name in _READ and t.count <= MAX_VALUES)
                pages.append({cast("Tag", tag.name): _values(tag) for tag in read})
    except (ImageFault, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - as damaged images in featx.images.decode
        problem = error
    if not pages:
        Image.open(io.BytesIO(data), formats=["TIFF"])  # says how it is damaged
        raise ImageFault.of(problem, what="its tags are damaged: ") from problem
    return pages


def _names(data: bytes, layout: TiffFormat, offset: int) -> set[str]:
    """Return the names of all tags of a page; tifffile leaves out those that it cannot read."""
    from tifffile import TIFF

    [count] = struct.unpack_from(layout.tagnoformat, data, offset)
    start = offset + layout.tagnosize
    places = range(start, start + count * layout.tagsize, layout.tagsize)
    codes = [struct.unpack_from(f"{layout.byteorder}H", data, place)[0] for place in places]
    return {TIFF.TAGS.get(code, "") for code in codes}


def _values(tag: TiffTag) -> Sequence[float]:
    """Values of a tag; bytes for texts and bytes."""
    value = tag.value
    if isinstance(value, str):
        return value.encode()
    return value if isinstance(value, tuple | bytes) else (value,)


def full_pages(pages: list[Tags]) -> list[int]:
    """Numbers from 0 of the pages that are no thumbnails, pyramid levels or masks, at least one."""
    full = [i for i, tags in enumerate(pages) if _is_full(tags)]
    if not full and len(pages) == 1 and "SubIFDs" not in pages[0]:
        full = [0]
    if not full:
        raise format_fault("its pages are smaller versions of an image that lies elsewhere")
    return full


def check_no_channel_pages(tags: Tags) -> None:
    """Check that no OME or ImageJ metadata say that further pages are channels of the first one."""
    text = tags.get("ImageDescription")
    text = text if isinstance(text, bytes) else b""
    stated = _OME_CHANNELS.search(text) or _IMAGEJ_CHANNELS.match(text)
    if stated is not None and int(stated[1]) > first(tags, "SamplesPerPixel"):
        raise format_fault(
            f"its {int(stated[1])} channels are pages, whose colours are not known: "
            "model.transform.scale reads them as channels"
        )


def _is_full(tags: Tags) -> bool:
    """Return whether a page is an image, and none that is made from another one."""
    kind = int(first(tags, "NewSubfileType", 0))
    return not kind & (_REDUCED | _MASK) and first(tags, "SubfileType") != 2


def block_places(tags: Tags) -> tuple[Sequence[float], Sequence[float]]:
    """Return the offsets of the strips or tiles of a page, and their numbers of bytes."""
    if "TileOffsets" in tags:
        return tags["TileOffsets"], tags.get("TileByteCounts", ())
    return tags.get("StripOffsets", ()), tags.get("StripByteCounts", ())


def check_blocks(tags: Tags) -> None:
    """Check that all strips or tiles of a page are stored; decoders may leave them black."""
    offsets, counts = block_places(tags)
    height = tags["ImageLength"][0]
    if "TileOffsets" in tags:
        expected = math.ceil(height / tags["TileLength"][0])
        expected *= math.ceil(tags["ImageWidth"][0] / tags["TileWidth"][0])
    else:
        expected = math.ceil(height / first(tags, "RowsPerStrip", height))
    if first(tags, "PlanarConfiguration") == 2:
        expected *= int(first(tags, "SamplesPerPixel"))
    num_stored = sum(offset > 0 for offset in offsets)
    if len(counts) == len(offsets):
        num_stored = sum(o > 0 and c > 0 for o, c in zip(offsets, counts, strict=True))
    if offsets and num_stored < expected:
        raise ImageFault(
            Status.TRUNCATED,
            f"{counted(num_stored, 'strip or tile', 'strips or tiles')} of {expected} are stored",
        )
