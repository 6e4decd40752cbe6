"""Thumbnails of images that are read again: data URIs, and one sprite of small tiles."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from featx.base import num_cpus
from featx.config import DataConfig
from featx.errors import FeatxError
from featx.images import FORMATS, ImagePolicy, cut_view, decode_pillow
from featx.sources import open_source
from featx.types import Array, ImageFault, Json, Source, Status, ViewSource

if TYPE_CHECKING:
    from featx.images import DecodingClock

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

_JOB_ROWS = 8
"""Images that are loaded together."""

_JOBS_AHEAD = 8
"""Number of jobs that are loaded ahead."""

_MAX_PIXELS = 8 * PIXELS * PIXELS
"""Largest number of pixels of a thumbnail; those of very long images are smaller than PIXELS."""

_SIZE_BYTES = 8
"""Bytes of the width and height, two little-endian numbers, before the pixels of a thumbnail."""

_MAX_FAILED_IMAGES = 128
"""Number of unreadable images, without a single readable one, after which no more are tried."""

_ORIENTATION = 0x0112
"""EXIF tag of the orientation."""

UNDECODED, UNREAD = "cannot be decoded", "cannot be read"
"""Reasons why a row has no thumbnail."""


class Thumbnails:
    """Thumbnails of a page, one per row; a context manager while images are decoded.

    Images are decoded as in a run: one that crashes or hangs its decoder has no thumbnail, and the
    others are not affected.

    Attributes:
        why_none: reason why there are none at all, or ''.
        unread: row -> UNREAD or UNDECODED, for images that could not be read or decoded.
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
        self._explain_none()

    def open(self, config: DataConfig) -> None:
        """Open the data set; `why_none` is set if that fails."""
        if self.why_none:
            return
        from featx.images import DecoderPool  # imports torch

        try:
            source = open_source(config)
            policy = ImagePolicy.from_config(config)
            makers = [_ThumbnailMaker(source, self._keys, policy, p) for p in (False, True)]
            self._pool = self._stack.enter_context(
                DecoderPool(
                    makers,
                    config.workers or num_cpus(),
                    config.timeout_s,
                    reads_in_decoders=getattr(source, "reads_in_decoders", False),
                )
            )
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
        """Make thumbnails of rows, or of what is readable of them, until a limit is reached."""
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

    def _explain_none(self) -> None:
        """Set `why_none` if images were tried and none could be read."""
        if self.unread and not self._tiles and not self.why_none:
            self.why_none = (
                f"none of {len(self.unread)} images can be read now ({self._last_error}). If they "
                "are in another folder, give data=folder data.root=DIR."
            )

    def sprite(self, rows: Sequence[int]) -> Json:
        """Return one WebP with the square tiles of some rows, as far as they were read. Return uri
        ('' without a tile), columns (number of tiles in a line), pixels (side of a tile), and the
        place of each row in the order of lines, -1 without a tile.
        """
        tiles = [self._tiles[row] for row in rows if row in self._tiles]
        numbers = itertools.count()
        place = [next(numbers) if row in self._tiles else -1 for row in rows]
        sprite = {"uri": "", "columns": 1, "pixels": TILE_PIXELS, "place": place}
        columns = math.ceil(math.sqrt(len(tiles)))
        for pixels, quality in SPRITES if len(tiles) <= TILES else SPRITES[2:]:
            if not tiles or 0 < len(str(sprite["uri"])) <= SPRITE_BYTES:
                break
            sheet = Image.new("RGB", (columns * pixels, math.ceil(len(tiles) / columns) * pixels))
            for number, tile in enumerate(tiles):
                small = tile.resize((pixels, pixels), Image.Resampling.BICUBIC)
                sheet.paste(small, (number % columns * pixels, number // columns * pixels))
            sprite |= {"uri": _data_uri(sheet, quality), "columns": columns, "pixels": pixels}
        return sprite

    def rows_that(self, why_not: str) -> list[int]:
        """Return the rows without an image for a reason, UNREAD or UNDECODED."""
        return [row for row, reason in self.unread.items() if reason == why_not]

    def _images(self, rows: Iterable[int], partial: bool) -> Iterable[tuple[int, Image.Image]]:
        """Read images, and yield the row and a small image of each that is readable."""
        untried = [row for row in dict.fromkeys(rows) if row not in self.unread]
        for start in range(0, len(untried), _JOB_ROWS * _JOBS_AHEAD):
            if self.why_none:
                return
            block = untried[start : start + _JOB_ROWS * _JOBS_AHEAD]
            try:
                yield from self._load(block, partial)
            except FeatxError as error:  # the data set, which is listed with the first image
                self.why_none = str(error)
            if not self._tiles and len(self.unread) >= _MAX_FAILED_IMAGES:
                self._explain_none()

    def _load(self, rows: Sequence[int], partial: bool) -> Iterable[tuple[int, Image.Image]]:
        """Load the small images of some rows, and make their tiles; others get their reason."""
        chunks = [rows[i : i + _JOB_ROWS] for i in range(0, len(rows), _JOB_ROWS)]
        jobs = [self._pool.begin(int(partial), np.array(chunk), _JOB_ROWS) for chunk in chunks]
        for job in jobs:
            packed, _ = self._pool.finish(job)
            fault_of = {failure.row: failure for failure in job.failures}
            for number, row in enumerate(job.rows.tolist()):
                if (fault := fault_of.get(row)) is not None:
                    self._last_error = fault.message
                    is_unread = fault.status in (Status.MISSING, Status.EMPTY)
                    self.unread[row] = UNREAD if is_unread else UNDECODED
                elif row in self._tiles or not self.is_full:
                    image = _unpacked(packed[number].numpy())
                    self._tiles[row] = ImageOps.fit(image, (TILE_PIXELS, TILE_PIXELS))
                    yield row, image


class _ThumbnailMaker:
    """Makes small images in a decoder: the worker of a `DecoderPool`."""

    shape = (_SIZE_BYTES + 3 * _MAX_PIXELS,)
    dtype: np.dtype[np.generic] = np.dtype(np.uint8)

    def __init__(
        self, source: Source, keys: npt.NDArray[np.bytes_], policy: ImagePolicy, partial: bool
    ) -> None:
        self.keys = keys
        self._source, self._policy, self._partial = source, policy, partial

    def image_key(self, row: int) -> bytes:
        """Key of the row."""
        return bytes(self.keys[row])

    def read(self, row: int) -> bytes:
        """Read the encoded image of a row, or raise ImageFault, also if the disk fails."""
        try:
            return self._source.read(bytes(self.keys[row]))
        except (OSError, LookupError) as error:
            raise ImageFault(Status.MISSING, str(error), type(error).__name__) from error

    def fill(
        self,
        row: int,
        read: Callable[[], bytes],
        out: Array,
        checksum: npt.NDArray[np.uint64],
        clock: DecodingClock,
    ) -> None:
        """Write width, height and RGB pixels of the small image of a row into `out`."""
        try:
            data = read()
            with clock:
                small = self._small(bytes(self.keys[row]), data).convert("RGB")
        except MemoryError as error:
            raise ImageFault(Status.MISSING, str(error) or "out of memory") from error
        out[:_SIZE_BYTES] = np.array(small.size, "<u4").view(np.uint8)
        pixels = np.asarray(small).reshape(-1)
        out[_SIZE_BYTES : _SIZE_BYTES + len(pixels)] = pixels

    def clear(self, out: Array) -> None:
        """Clear the size of a failed row."""
        out[:_SIZE_BYTES] = 0

    def warm_up(self) -> None:
        """Do nothing: thumbnails are few."""

    def _small(self, key: bytes, data: bytes) -> Image.Image:
        """An image with a shorter side of at most PIXELS, and at most _MAX_PIXELS pixels."""
        if self._partial:
            decoded = readable_part(data, self._policy.max_pixels)
        elif isinstance(self._source, ViewSource):
            decoded = cut_view(decode_pillow(data, self._policy), self._source.view(key))
        else:
            decoded = decode_pillow(data, self._policy, PIXELS)
        width, height = decoded.size
        scale = min(PIXELS / min(width, height), math.sqrt(_MAX_PIXELS / (width * height)))
        if scale >= 1:
            return decoded
        columns = min(max(1, round(width * scale)), _MAX_PIXELS)
        lines = min(max(1, round(height * scale)), _MAX_PIXELS // columns)
        return decoded.resize((columns, lines), Image.Resampling.BICUBIC, reducing_gap=2)


def _unpacked(packed: npt.NDArray[np.uint8]) -> Image.Image:
    width, height = packed[:_SIZE_BYTES].copy().view("<u4").tolist()
    pixels = packed[_SIZE_BYTES : _SIZE_BYTES + 3 * width * height]
    return Image.fromarray(pixels.reshape(height, width, 3).copy())


def readable_part(data: bytes, max_pixels: int) -> Image.Image:
    """Decode the readable part of a truncated image; the lines that are missing are grey."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            size = opened.size
            if size[0] * size[1] > max_pixels:
                raise ImageFault(Status.TOO_LARGE, f"{size[0]} x {size[1]} pixels")
            try:
                opened.load()
            except OSError:
                # The lines that were decoded before the error stay in the image. Without tiles
                # Pillow does not try to decode the rest. ImageFile.LOAD_TRUNCATED_IMAGES does the
                # same for all threads of the process, and so would let truncated images pass there.
                opened.tile = []
            orientation = opened.getexif().get(_ORIENTATION, 1)  # loads a PNG
            pixels = np.array(opened.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageFault(Status.TRUNCATED, str(error)) from error
    lines = np.flatnonzero(pixels.any((1, 2)))
    pixels[(lines[-1] + 1 if len(lines) else 0) :] = 128
    image = Image.fromarray(pixels)
    image.getexif()[_ORIENTATION] = orientation
    return ImageOps.exif_transpose(image)


def _data_uri(image: Image.Image, quality: int) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=4)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
