"""Tags of a TIFF that decide about its pixels, and the choice of a page."""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from PIL import Image

from featx.errors import counted
from featx.images.rgb_conversion import format_fault
from featx.types import ImageFault, Status

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffFormat, TiffPage, TiffTag

_TIFF = re.compile(rb"II[*+]\0|MM\0[*+]")

UNREADABLE = b"MM\0+"
"""First bytes of a BigTIFF of big-endian numbers, whose orientation Pillow 13 does not find."""

SUBFILE, OLD_SUBFILE, WIDTH, HEIGHT, BITS, COMPRESSION = 254, 255, 256, 257, 258, 259
PHOTOMETRIC, DESCRIPTION, STRIP_OFFSETS, ORIENTATION, SAMPLES = 262, 270, 273, 274, 277
STRIP_ROWS, STRIP_COUNTS, PLANAR, COLOUR_MAP = 278, 279, 284, 320
TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_COUNTS, SUB_IFDS = 322, 323, 324, 325, 330
EXTRA_SAMPLES, SAMPLE_FORMAT, SMALLEST, LARGEST, JPEG_TABLES = 338, 339, 340, 341, 347
CHROMA_SUBSAMPLING, XMP = 530, 700
"""Numbers of tags; SMALLEST and LARGEST are SMinSampleValue and SMaxSampleValue."""

_READ = frozenset({
    SUBFILE, OLD_SUBFILE, WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, DESCRIPTION, STRIP_OFFSETS,
    ORIENTATION, SAMPLES, STRIP_ROWS, STRIP_COUNTS, PLANAR, TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS,
    TILE_COUNTS, SUB_IFDS, EXTRA_SAMPLES, SAMPLE_FORMAT, SMALLEST, LARGEST, JPEG_TABLES,
    CHROMA_SUBSAMPLING, XMP,
})  # fmt: skip

_ESSENTIAL = (_READ - {DESCRIPTION, XMP}) | {COLOUR_MAP}
"""Tags without whose values a page is read otherwise."""

MAX_PAGES, MAX_VALUES = 10_000, 1 << 22
"""Number of pages that are read, and largest number of values of a tag; a file may have more."""

UNCOMPRESSED, JPEG_COMPRESSION = 1, 7
"""Values of the tag Compression."""

_REDUCED, _MASK = 1, 4
"""Bits of NewSubfileType: a smaller version of another page, and a mask."""

_OME_CHANNELS = re.compile(rb'<Pixels\b[^>]*?\bSizeC="(\d+)"')
_IMAGEJ_CHANNELS = re.compile(rb"\AImageJ=[^\0]*?\nchannels=(\d+)")

Tags = Mapping[int, Sequence[float]]
"""Tag -> values; bytes for texts and bytes."""


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
                codes = _codes(data, file.tiff, page.offset)
                if lost := _ESSENTIAL & codes - {*page.tags.keys()}:
                    raise ImageFault(
                        Status.DECODE_ERROR, f"the value of its tag {min(lost)} is damaged"
                    )
                read = (t for t in page.tags if t.code in _READ and t.count <= MAX_VALUES)
                pages.append({tag.code: _values(tag) for tag in read})
    except (ImageFault, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - as damaged images in featx.images.decode
        problem = error
    if not pages:
        Image.open(io.BytesIO(data), formats=["TIFF"])  # says how it is damaged
        message = f"its tags are damaged: {str(problem)[:150]}"
        raise ImageFault(Status.DECODE_ERROR, message, type(problem).__name__) from problem
    return pages


def _codes(data: bytes, layout: TiffFormat, offset: int) -> set[int]:
    """Return the numbers of all tags of a page; tifffile leaves out those that it cannot read."""
    [count] = struct.unpack_from(layout.tagnoformat, data, offset)
    first = offset + layout.tagnosize
    return {
        struct.unpack_from(f"{layout.byteorder}H", data, first + i * layout.tagsize)[0]
        for i in range(count)
    }


def _values(tag: TiffTag) -> Sequence[float]:
    """Values of a tag; bytes for texts and bytes."""
    value = tag.value
    if isinstance(value, str):
        return value.encode()
    return value if isinstance(value, tuple | bytes) else (value,)


def full_pages(pages: list[Tags]) -> list[int]:
    """Numbers from 0 of the pages that are no thumbnails, pyramid levels or masks, at least one."""
    full = [i for i, tags in enumerate(pages) if _is_full(tags)]
    if not full and len(pages) == 1 and SUB_IFDS not in pages[0]:
        full = [0]
    if not full:
        raise format_fault("its pages are smaller versions of an image that lies elsewhere")
    return full


def check_no_channel_pages(tags: Tags) -> None:
    """Check that no OME or ImageJ metadata say that further pages are channels of the first one."""
    text = tags.get(DESCRIPTION)
    text = text if isinstance(text, bytes) else b""
    stated = _OME_CHANNELS.search(text) or _IMAGEJ_CHANNELS.match(text)
    if stated is not None and int(stated[1]) > tags.get(SAMPLES, (1,))[0]:
        raise format_fault(
            f"its {int(stated[1])} channels are pages, whose colours are not known: "
            "model.transform.scale reads them as channels"
        )


def _is_full(tags: Tags) -> bool:
    """Return whether a page is an image, and none that is made from another one."""
    kind = int(tags.get(SUBFILE, (0,))[0])
    return not kind & (_REDUCED | _MASK) and tags.get(OLD_SUBFILE, (1,))[0] != 2


def check_blocks(tags: Tags) -> None:
    """Check that all strips or tiles of a page are stored; decoders may leave them black."""
    is_tiled = TILE_OFFSETS in tags
    offsets = tags.get(TILE_OFFSETS if is_tiled else STRIP_OFFSETS, ())
    counts = tags.get(TILE_COUNTS if is_tiled else STRIP_COUNTS, (1,))
    if is_tiled:
        columns, rows = tags[TILE_WIDTH][0], tags[TILE_HEIGHT][0]
        expected = math.ceil(tags[WIDTH][0] / columns) * math.ceil(tags[HEIGHT][0] / rows)
    else:
        rows = tags.get(STRIP_ROWS, tags[HEIGHT])[0]
        expected = math.ceil(tags[HEIGHT][0] / rows)
    if tags.get(PLANAR, (1,))[0] == 2:
        expected *= int(tags.get(SAMPLES, (1,))[0])
    num_stored = sum(offset > 0 for offset in offsets)
    if len(counts) == len(offsets):
        num_stored = sum(o > 0 and c > 0 for o, c in zip(offsets, counts, strict=True))
    if offsets and num_stored < expected:
        raise ImageFault(
            Status.TRUNCATED,
            f"{counted(num_stored, 'strip or tile', 'strips or tiles')} of {expected} are stored",
        )


def jpeg_blocks(tags: Tags, data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the strips or tiles of a page that are JPEGs, with their common tables."""
    if tags.get(COMPRESSION, (1,))[0] != JPEG_COMPRESSION:
        return
    is_tiled = TILE_OFFSETS in tags
    offsets = tags.get(TILE_OFFSETS if is_tiled else STRIP_OFFSETS, ())
    counts = tags.get(TILE_COUNTS if is_tiled else STRIP_COUNTS, ())
    tables = tags.get(JPEG_TABLES, b"")
    for offset, count in zip(offsets, counts, strict=False):
        yield data[int(offset) : int(offset + count)], bytes(tables)  # type: ignore[arg-type]
