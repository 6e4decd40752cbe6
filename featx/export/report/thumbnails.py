"""Thumbnails of images that are read again: data URIs, and one sprite of small tiles."""

from __future__ import annotations

import base64
import contextlib
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from featx.config import DataConfig
from featx.errors import FeatxError
from featx.images import CrashList, FaultTolerantDecoder, ImagePolicy, cut_out
from featx.sources import open_source
from featx.types import ImageFault, RegionSource, Source, Status

PIXELS = 144
"""Shorter side of a thumbnail in pixels."""

TILE_PIXELS = 64
"""Side of a tile in pixels."""

SPRITES = ((64, 56), (64, 36), (32, 56), (32, 30))
"""Side of a tile in the sprite, and quality of the WebP encoder, from the best to the smallest."""

SPRITE_BYTES = 560 << 10
"""Bytes of the sprite's data URI, below which the best of SPRITES is taken."""

TILES = 600
"""Number of tiles from which large ones are not even tried."""

MAX_BYTES = 640 << 10
"""Maximum bytes of the data URIs of a report, in addition to the sprite."""

_QUALITY = 66
"""Quality of the WebP encoder for thumbnails."""

_IMAGES_PER_BLOCK = 64
"""Images that are submitted to the decoder at a time."""

_MAX_FAILED_IMAGES = 128
"""Number of unreadable images, without a single readable one, after which no more are tried."""

_ORIENTATION = 0x0112
"""EXIF tag of the orientation."""

UNDECODED, UNREAD = "cannot be decoded", "cannot be read"
"""Reasons why a row has no thumbnail."""


@dataclass(frozen=True)
class Sprite:
    """Square tiles of many images in one image file.

    Attributes:
        uri: data URI of the WebP, or '' without a tile.
        columns: number of tiles in a line.
        pixels: side of a tile in pixels.
        place: row -> number of its tile, line by line.
    """

    uri: str
    columns: int
    pixels: int
    place: dict[int, int]


class Thumbnails:
    """Thumbnails of a page, one per row; a context manager while images are decoded.

    Images are decoded as in a run: one that crashes or hangs its decoder has no thumbnail, and the
    others are not affected.

    Args:
        keys: (N,) key of every row.
        limit: maximum number of images that are read.
        max_bytes: maximum bytes of the data URIs, in addition to the sprite.

    Attributes:
        uris: row -> data URI.
        why_none: reason why there are none at all, or ''.
        unread: row -> UNREAD or UNDECODED, for images that could not be read or decoded.
        limit: as given.
    """

    def __init__(
        self, keys: npt.NDArray[np.bytes_], limit: int, max_bytes: int = MAX_BYTES
    ) -> None:
        self.uris: dict[int, str] = {}
        self.unread: dict[int, str] = {}
        self.limit = limit
        self.why_none = "" if limit else "report.thumbnails=0 leaves them out."
        self._keys = keys
        self._tiles: dict[int, Image.Image] = {}
        self._bytes = 0
        self._max_bytes = max_bytes
        self._last_error = ""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Thumbnails:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def open(self, config: DataConfig) -> None:
        """Open the data set; `why_none` is set if that fails.

        Args:
            config: options of the data set.
        """
        if self.why_none:
            return
        try:
            self._source: Source = open_source(config)
            self._policy = ImagePolicy.from_config(config)
            decoder = FaultTolerantDecoder(
                self._source,
                self._policy,
                PIXELS,
                config.timeout_s,
                CrashList(None),
                "featx-thumbnail",
            )
            self._decoder = self._stack.enter_context(decoder)
            decoder.decode_crash_list(self._keys)
        except FeatxError as error:
            self.why_none = str(error)

    @property
    def num_read(self) -> int:
        """Number of images that were read."""
        return len(self._tiles)

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of images is reached."""
        return self.num_read >= self.limit

    def add(self, rows: Iterable[int], partial: bool = False) -> None:
        """Make thumbnails of some rows in this order, until a limit is reached.

        Args:
            rows: rows.
            partial: whether the readable part of a truncated image is shown.
        """
        missing = [row for row in rows if row not in self.uris]
        for row, image in self._images(missing, partial):
            if self._bytes < self._max_bytes:
                self.uris[row] = _data_uri(image, _QUALITY)
                self._bytes += len(self.uris[row])

    def add_tiles(self, rows: Sequence[int]) -> None:
        """Make tiles of rows that are evenly spaced in a list, as many as the limit allows."""
        missing = [row for row in rows if row not in self._tiles]
        room = self.limit - self.num_read
        if room > 0 and missing:
            step = max(1.0, len(missing) / room)
            chosen = [missing[int(i * step)] for i in range(min(room, len(missing)))]
            for _ in self._images(chosen, partial=False):
                pass

    def finish(self) -> None:
        """End the addition of thumbnails, and set `why_none` if no image could be read."""
        if self.unread and not self._tiles and not self.why_none:
            self.why_none = (
                f"none of {len(self.unread)} images can be read now ({self._last_error}). If they "
                "are in another folder, give data=folder data.root=DIR."
            )

    def sprite(self, rows: Sequence[int]) -> Sprite:
        """Return the sprite with the tiles of some rows, as far as they were read."""
        tile_rows = [row for row in rows if row in self._tiles]
        if not tile_rows:
            return Sprite("", 1, TILE_PIXELS, {})
        columns = math.ceil(math.sqrt(len(tile_rows)))
        place = {row: number for number, row in enumerate(tile_rows)}
        for pixels, quality in SPRITES if len(tile_rows) <= TILES else SPRITES[2:]:
            sheet = Image.new(
                "RGB", (columns * pixels, math.ceil(len(tile_rows) / columns) * pixels)
            )
            for row, number in place.items():
                tile = self._tiles[row].resize((pixels, pixels), Image.Resampling.BICUBIC)
                sheet.paste(tile, (number % columns * pixels, number // columns * pixels))
            sprite = Sprite(_data_uri(sheet, quality), columns, pixels, place)
            if len(sprite.uri) <= SPRITE_BYTES:
                break
        return sprite

    def rows_that(self, why_not: str) -> list[int]:
        """Return the rows without an image for a reason, UNREAD or UNDECODED."""
        return [row for row, reason in self.unread.items() if reason == why_not]

    def _images(self, rows: Iterable[int], partial: bool) -> Iterable[tuple[int, Image.Image]]:
        """Read images, and yield the row and a small image of each that is readable."""
        untried = [row for row in dict.fromkeys(rows) if row not in self.unread]
        for start in range(0, len(untried), _IMAGES_PER_BLOCK):
            if self.why_none:
                return
            block = untried[start : start + _IMAGES_PER_BLOCK]
            futures = [self._decoder.submit(self._try, row, partial) for row in block]
            for row, future in zip(block, futures, strict=True):
                image, why_not = future.result()
                if image is None:
                    self.unread[row] = why_not
                elif row in self._tiles or not self.is_full:
                    self._tiles[row] = ImageOps.fit(image, (TILE_PIXELS, TILE_PIXELS))
                    yield row, image
            if not self._tiles and len(self.unread) >= _MAX_FAILED_IMAGES:
                self.finish()

    def _try(self, row: int, partial: bool) -> tuple[Image.Image | None, str]:
        """Return the small image of a row, or None and the reason why there is none."""
        try:
            return self._small(bytes(self._keys[row]), partial), ""
        except FeatxError as error:  # the data set, which is listed with the first image
            self.why_none = str(error)
        except ImageFault as fault:
            self._last_error = str(fault)
            if fault.status not in (Status.MISSING, Status.EMPTY):
                return None, UNDECODED
        except (OSError, LookupError, MemoryError) as error:
            self._last_error = str(error) or "out of memory"
        return None, UNREAD

    def _small(self, key: bytes, partial: bool) -> Image.Image:
        """Return the image of a row with a shorter side of at most PIXELS.

        Raises:
            ImageFault: the image is missing or cannot be decoded.
            OSError: the disk or mount fails.
        """
        data = self._source.read(key)
        if partial:
            decoded = readable_part(data, self._policy.max_pixels)
        else:
            decoded = self._decoder.decode_pillow(key, data)
            if isinstance(self._source, RegionSource):
                decoded = cut_out(decoded, self._source.box(key))
        scale = PIXELS / min(decoded.size)
        if scale >= 1:
            return decoded
        size = (max(1, round(decoded.width * scale)), max(1, round(decoded.height * scale)))
        return decoded.resize(size, Image.Resampling.BICUBIC, reducing_gap=2)


def readable_part(data: bytes, max_pixels: int) -> Image.Image:
    """Decode the readable part of a truncated image; the lines that are missing are grey.

    Args:
        data: encoded bytes of the image.
        max_pixels: maximum number of pixels.

    Raises:
        ImageFault: not even the size is readable, or it is above the limit.
    """
    try:
        with Image.open(io.BytesIO(data)) as opened:
            size, orientation = opened.size, opened.getexif().get(_ORIENTATION, 1)
            if size[0] * size[1] > max_pixels:
                raise ImageFault(Status.TOO_LARGE, f"{size[0]} x {size[1]} pixels")
            try:
                opened.load()
            except OSError:
                # The lines that were decoded before the error stay in the image. Without tiles
                # Pillow does not try to decode the rest. ImageFile.LOAD_TRUNCATED_IMAGES does the
                # same for all threads of the process, and so would let truncated images pass there.
                opened.tile = []
            pixels = np.array(opened.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageFault(Status.TRUNCATED, str(error)) from error
    lines = np.flatnonzero(pixels.any((1, 2)))
    pixels[(lines[-1] + 1 if len(lines) else 0) :] = 128
    image = Image.fromarray(pixels)
    image.getexif()[_ORIENTATION] = orientation
    return ImageOps.exif_transpose(image)


def _data_uri(image: Image.Image, quality: int) -> str:
    """Return an image as a WebP in a data URI."""
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=4)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
