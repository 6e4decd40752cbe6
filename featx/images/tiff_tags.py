"""Tags of a TIFF that decide about its pixels, and the choice of a page.

Pillow and libtiff copy the value of every tag. Tags may overlap, so that a file of 4 MiB would take
gigabytes; they are checked before a decoder sees them. tifffile reads only what it needs, but it is
an extra.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence

from featx.errors import counted
from featx.images.pixel_scale import format_fault
from featx.types import ImageFault, Status

_TIFF = re.compile(rb"II[*+]\0|MM\0[*+]")

UNREADABLE = b"MM\0+"
"""First bytes of a BigTIFF of big-endian numbers, whose orientation Pillow 13 does not find."""

SUBFILE, OLD_SUBFILE, WIDTH, HEIGHT, BITS, COMPRESSION = 254, 255, 256, 257, 258, 259
PHOTOMETRIC, DESCRIPTION, STRIP_OFFSETS, ORIENTATION, SAMPLES = 262, 270, 273, 274, 277
STRIP_ROWS, STRIP_COUNTS, PLANAR = 278, 279, 284
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

_CODES = {
    1: "B", 2: "B", 3: "H", 4: "I", 5: "II", 6: "b", 7: "B", 8: "h", 9: "i", 10: "ii", 11: "f",
    12: "d", 13: "I", 16: "Q", 17: "q", 18: "Q",
}  # fmt: skip
"""Type of a tag -> code of `struct` for one value."""

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


def read_tags(data: bytes) -> list[Tags]:
    """Read the pages of a TIFF, or the EXIF data of another image, which are a TIFF without pixels.

    Args:
        data: bytes that `is_tiff`.

    Returns:
        Tags of each page, up to one that is damaged.

    Raises:
        ImageFault: the tags of a page take more bytes than the file has.
        struct.error: the first page is damaged.
    """
    order = "<" if data[:2] == b"II" else ">"
    is_big = data[2:4] in (b"+\0", b"\0+")
    number, start = ("Q", 8) if is_big else ("I", 4)
    [offset] = struct.unpack_from(order + number, data, start)
    pages: list[Tags] = []
    offsets = set()
    while offset and offset not in offsets and len(pages) < MAX_PAGES:
        offsets.add(offset)
        try:
            page, offset = _read_page(data, offset, order, is_big)
        except struct.error:
            if not pages:
                raise
            break
        pages.append(page)
    return pages


def _read_page(data: bytes, offset: int, order: str, is_big: bool) -> tuple[Tags, int]:
    """Tags of a page, and the offset of the next one or 0."""
    number, entry, count_code = ("Q", "HHQ", "Q") if is_big else ("I", "HHI", "H")
    inline = struct.calcsize(order + number)
    [num_entries] = struct.unpack_from(order + count_code, data, offset)
    offset += struct.calcsize(order + count_code)
    tags: dict[int, Sequence[float]] = {}
    total = 0
    for _ in range(num_entries):
        tag, kind, count = struct.unpack_from(order + entry, data, offset)
        offset += struct.calcsize(order + entry)
        code = _CODES.get(kind, "B")
        size = count * struct.calcsize(order + code)
        begin = offset
        if size > inline:
            [begin] = struct.unpack_from(order + number, data, offset)
            total += min(size, max(0, len(data) - begin))
        if total > 2 * len(data):
            raise ImageFault(Status.DECODE_ERROR, "its tags overlap, to more bytes than it has")
        if tag in _READ and begin + size <= len(data) and count <= MAX_VALUES:
            tags[tag] = data[begin : begin + size]
            if code != "B":
                values = f"{order}{count * len(code)}{code[0]}"
                tags[tag] = struct.unpack_from(values, data, begin)
        offset += inline
    [following] = struct.unpack_from(order + number, data, offset)
    return tags, following


def full_pages(pages: list[Tags]) -> list[int]:
    """Numbers from 0 of the pages that are no thumbnails, pyramid levels or masks, at least one.

    Raises:
        ImageFault: there is none.
    """
    full = [i for i, tags in enumerate(pages) if _is_full(tags)]
    if not full and len(pages) == 1 and SUB_IFDS not in pages[0]:
        full = [0]
    if not full:
        raise format_fault("its pages are smaller versions of an image that lies elsewhere")
    return full


def check_no_channel_pages(tags: Tags) -> None:
    """Check that no OME or ImageJ metadata say that further pages are channels of the first one.

    Args:
        tags: tags of the first of several pages.

    Raises:
        ImageFault: they do.
    """
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
    """Check that all strips or tiles of a page are stored; decoders may leave them black.

    Raises:
        ImageFault: some are not.
    """
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
