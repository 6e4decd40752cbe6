"""Boxes of large TIFFs, without the memory of the whole image: its tiles are compressed one by one.

Only kinds whose numbers are the pixels: grey and RGB of 8 bits, and with `model.transform.scale`
all that tifffile reads. Others are decoded as a whole.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, cast

import numpy as np
from PIL import Image

from featx.base import LruCache
from featx.images.decode_settings import ImagePolicy
from featx.images.jpeg_decode import check_jpeg, with_tables
from featx.images.tiff_decode import BLACK_IS_ZERO, COMPRESSIONS, RGB, YCBCR, check_page
from featx.images.tiff_tags import (
    JPEG_COMPRESSION,
    Tags,
    check_blocks,
    first,
    full_pages,
    open_tiff,
    read_tags,
)
from featx.types import Array, Box, ImageFault, Status

if TYPE_CHECKING:
    from tifffile import TiffPage

LARGE_BYTES = 128 << 20
"""Least size of a decoded image that is read in tiles, at 4 bytes a pixel; smaller ones are decoded
as a whole."""

CACHE_BYTES = 128 << 20
"""Size of the decoded tiles that an image keeps. Rows go down a column of boxes, and each tile of
the column should be decoded once."""


class TiffBlocks:
    """A TIFF of which boxes are decoded."""

    def __init__(self, data: bytes, page: TiffPage, policy: ImagePolicy) -> None:
        self.data = data
        self.width, self.height = page.imagewidth, page.imagelength
        self._page = page
        self._policy = policy
        self._tiles: LruCache[int, Array] = LruCache(CACHE_BYTES, lambda tile: tile.nbytes)

    def cut(self, box: Box) -> Array:
        """Decode a box within the image; safe to call from several threads.

        Returns (height, width, C) pixels.
        """
        right, bottom = box.x + box.width, box.y + box.height
        rows, columns = self._page.tilelength, self._page.tilewidth
        tiles_across = -(-self.width // columns)
        pixels = np.concatenate(
            [
                np.concatenate(
                    [
                        self._tile(row * tiles_across + column)[
                            max(0, box.y - row * rows) : bottom - row * rows,
                            max(0, box.x - column * columns) : right - column * columns,
                        ]
                        for column in range(box.x // columns, -(-right // columns))
                    ],
                    axis=1,
                )
                for row in range(box.y // rows, -(-bottom // rows))
            ]
        )
        return np.ascontiguousarray(_as_rgb(pixels)) if self._policy.channels is None else pixels

    def _tile(self, number: int) -> Array:
        """A tile from the cache, or decoded; two threads may decode the same one."""
        if (cached := self._tiles.get(number)) is not None:
            return cached
        try:
            tile = self._decode_tile(number)
        except (ImageFault, MemoryError):
            raise
        except Exception as error:  # damaged data raise many types, as in featx.images.decode
            raise ImageFault.of(error) from error
        self._tiles.put(number, tile)
        return tile

    def _decode_tile(self, number: int) -> Array:
        """Decode a tile, (h, w, C)."""
        page = self._page
        start, tables = page.dataoffsets[number], page.jpegtables
        encoded = self.data[start : start + page.databytecounts[number]]
        if page.compression == JPEG_COMPRESSION:
            whole = with_tables(encoded, tables or b"")
            # A hostile tile may be larger than it says.
            with Image.open(io.BytesIO(whole), formats=["JPEG"]) as image:
                is_right = image.size == (page.tilewidth, page.tilelength)
                is_right &= image.mode in ("RGB", "L")
            if not is_right:
                raise ImageFault(Status.DECODE_ERROR, "a tile is a JPEG of another size or kind")
            check_jpeg(whole, self._policy)
        tiles, _, _ = page.decode(encoded, number, jpegtables=tables)
        assert tiles is not None, "bytes have pixels"
        tile: Array = tiles[0]
        return tile


def tiff_blocks(
    data: bytes, policy: ImagePolicy, least_bytes: int = LARGE_BYTES
) -> TiffBlocks | Array | None:
    """Open a large TIFF for its boxes.

    Returns its tiles; (H, W, C) pixels for strips, which are in the encoded bytes if they are not
    compressed; None for images that are decoded as a whole.
    """
    try:
        pages = read_tags(data)
        number = full_pages(pages)[0]
        tags = pages[number]
        if not _is_plain(tags, policy, least_bytes):
            return None
        check_blocks(tags)
    except Exception:  # noqa: BLE001 - the usual decoder says what is wrong
        return None
    with open_tiff(data) as file:
        page = cast("TiffPage", file.pages[number])
        check_page(page, data, policy, COMPRESSIONS | {JPEG_COMPRESSION})
        if page.is_tiled:
            return TiffBlocks(data, page, policy)
        if page.is_contiguous and page.dtype is not None:
            dtype = page.dtype.newbyteorder(file.byteorder)
            offset, count = page.dataoffsets[0], page.imagelength * page.imagewidth
            numbers = np.frombuffer(data, dtype, count * page.samplesperpixel, offset)
            pixels = numbers.reshape(page.imagelength, page.imagewidth, page.samplesperpixel)
        else:
            array = page.asarray(maxworkers=1)
            pixels = array[:, :, None] if array.ndim == 2 else array
    return _as_rgb(pixels) if policy.channels is None else pixels


def _as_rgb(pixels: Array) -> Array:
    """Return RGB without a copy: (H, W, 3) of (H, W, 1|3)."""
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3))


def _is_plain(tags: Tags, policy: ImagePolicy, least_bytes: int) -> bool:
    """Return whether an image is large, and its numbers are its pixels."""
    width, height = int(tags["ImageWidth"][0]), int(tags["ImageLength"][0])
    if not least_bytes <= 4 * width * height <= 4 * policy.max_pixels:
        return False
    samples = int(first(tags, "SamplesPerPixel"))
    photometric = tags["PhotometricInterpretation"][0]
    bits, compression = {*tags.get("BitsPerSample", (1,))}, first(tags, "Compression")
    if compression == JPEG_COMPRESSION and "TileOffsets" in tags:
        is_supported = policy.channels is None
    else:
        is_supported = compression in COMPRESSIONS and photometric != YCBCR
    if policy.channels is None:
        is_right = bits == {8} and {*tags.get("SampleFormat", (1,))} == {1}
        is_right &= (photometric, samples) in ((BLACK_IS_ZERO, 1), (RGB, 3), (YCBCR, 3))
    else:
        # Otherwise its pages may be the channels.
        is_right = bits <= {8, 16, 32, 64} and samples == policy.channels
        is_right &= photometric in (BLACK_IS_ZERO, RGB)
    xmp = tags.get("XMP", b"")
    return (
        is_supported
        and is_right
        and first(tags, "PlanarConfiguration") == 1
        and first(tags, "Orientation") == 1
        and (not isinstance(xmp, bytes) or b"Orientation" not in xmp)
    )
