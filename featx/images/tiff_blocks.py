"""Large TIFFs, decoded block by block: their tiles and strips are compressed one by one.

A block becomes a TIFF of its own in memory, with the tags that decide about pixels and the
compressed bytes as they are. The usual decoder reads it, so that a box has the pixels that it has
in the whole image, without the memory of the whole.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from featx.images.image_policy import ImagePolicy
from featx.types import Box, ImageFault, Status

LEAST_BYTES = 128 << 20
"""Least size of a decoded image that is read in blocks; smaller ones are decoded as a whole."""

CACHE_BYTES = 128 << 20
"""Size of the decoded blocks that an image keeps. Rows go down a column of boxes, and each tile of
the column should be decoded once."""

_LAZY_BYTES, _EAGER_BYTES = 1 << 20, 16 << 20
"""Least sizes of a block of strips: larger where the whole image is decoded at once."""

_WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_STRIP_OFFSETS, _ORIENTATION, _SAMPLES, _STRIP_ROWS, _STRIP_COUNTS = 273, 274, 277, 278, 279
_PLANAR, _TILE_WIDTH, _TILE_LENGTH, _TILE_OFFSETS, _TILE_COUNTS = 284, 322, 323, 324, 325
_SAMPLE_FORMAT, _XMP = 339, 700
"""Numbers of TIFF tags."""

_COPIED = {
    _BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _STRIP_ROWS, _PLANAR, _TILE_WIDTH, _TILE_LENGTH,
    _SAMPLE_FORMAT,
    254, 266, 317, 320, 332, 338, 347,  # sub-file, bit order, predictor, colours, inks, alpha, JPEG
    529, 530, 531, 532,  # YCbCr
}  # fmt: skip
"""Tags that a block has from its image, besides its size and the places of its bytes. No other tag
changes pixels."""

_UNCOMPRESSED = 1
_COMPRESSIONS = {_UNCOMPRESSED, 5, 7, 8, 32773, 32946}
"""Compressions whose blocks do not depend on each other: none, LZW, JPEG, deflate, and PackBits."""

_TYPE_BYTES = {
    1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8,
    18: 8,
}  # fmt: skip
_NUMBERS = {1: "B", 3: "H", 4: "I", 16: "Q"}
"""Type of a TIFF field -> bytes of one value, and code of `struct` for whole numbers."""
_LONG = 4


@dataclass(frozen=True)
class _Field:
    """Value of a tag.

    Attributes:
        kind: type number.
        count: number of values.
        data: the values, in the byte order of the file.
    """

    kind: int
    count: int
    data: bytes


@dataclass(frozen=True)
class _Header:
    """Tags of the first image of a TIFF.

    Attributes:
        order: '<' or '>', the byte order.
        fields: tag -> value.
    """

    order: str
    fields: dict[int, _Field]

    @classmethod
    def of(cls, data: bytes) -> _Header:
        """Read a TIFF or BigTIFF; raises LookupError or struct.error if it is damaged."""
        order = "<" if data[:2] == b"II" else ">"
        is_big = struct.unpack_from(f"{order}H", data, 2)[0] == 43
        number, entry, inline = ("Q", "HHQ", 8) if is_big else ("I", "HHI", 4)
        [offset] = struct.unpack_from(order + number, data, inline)
        [count] = struct.unpack_from(order + ("Q" if is_big else "H"), data, offset)
        offset += 8 if is_big else 2
        fields = {}
        for _ in range(count):
            tag, kind, length = struct.unpack_from(order + entry, data, offset)
            offset += struct.calcsize(order + entry)
            size = length * _TYPE_BYTES.get(kind, 0)
            begin = (
                offset if size <= inline else struct.unpack_from(order + number, data, offset)[0]
            )
            if begin + size > len(data):
                raise LookupError(f"tag {tag} lies behind the end")
            fields[tag] = _Field(kind, length, data[begin : begin + size])
            offset += inline
        return cls(order, fields)

    def numbers(self, tag: int, default: int | None = None) -> tuple[int, ...]:
        """Values of a tag; raises LookupError if it is missing and has no default."""
        field = self.fields.get(tag)
        if field is None and default is not None:
            return (default,)
        field = self.fields[tag]
        return struct.unpack(f"{self.order}{field.count}{_NUMBERS[field.kind]}", field.data)

    def number(self, tag: int, default: int | None = None) -> int:
        """The only value of a tag; raises as `numbers`, and ValueError for several values."""
        [value] = self.numbers(tag, default)
        return value

    def file_with(self, replaced: dict[int, tuple[int, ...]], blocks: list[bytes]) -> bytes:
        """A TIFF of one image with some of the tags.

        Args:
            replaced: tag -> numbers, instead of those of the image; offsets count from the first
                block.
            blocks: compressed bytes of the tiles or strips.
        """
        values = {tag: field for tag, field in self.fields.items() if tag in _COPIED}
        num_tags = len(values) + len(replaced)
        end = 8 + 2 + 12 * num_tags + 4
        # Long values lie behind the tags, and the blocks behind them.
        rest = sum(_even(len(field.data)) for field in values.values() if len(field.data) > 4)
        rest += sum(4 * len(numbers) for numbers in replaced.values() if len(numbers) > 1)
        for tag, numbers in replaced.items():
            if tag in (_STRIP_OFFSETS, _TILE_OFFSETS):
                numbers = tuple(end + rest + number for number in numbers)
            data = struct.pack(f"{self.order}{len(numbers)}I", *numbers)
            values[tag] = _Field(_LONG, len(numbers), data)
        entries, behind = b"", b""
        for tag, field in sorted(values.items()):
            inline = field.data.ljust(4, b"\0")
            if len(field.data) > 4:
                inline = struct.pack(f"{self.order}I", end + len(behind))
                behind += field.data.ljust(_even(len(field.data)), b"\0")
            entries += struct.pack(f"{self.order}HHI", tag, field.kind, field.count) + inline
        head = b"II*\0" if self.order == "<" else b"MM\0*"
        head += struct.pack(f"{self.order}IH", 8, num_tags)
        return b"".join([head, entries, bytes(4), behind, *blocks])


class TiffBlocks:
    """A TIFF of which boxes are decoded.

    Args:
        data: encoded bytes.
        header: its tags.
        is_lazy: whether boxes are to be cut; otherwise the whole image is decoded at once.
        decode: decodes encoded bytes.
        strip_bytes: least size of a block of several strips, decoded.

    Attributes:
        data: encoded bytes.
        width: pixels of a row.
        height: number of rows of pixels.
        is_lazy: as above.
    """

    def __init__(
        self,
        data: bytes,
        header: _Header,
        is_lazy: bool,
        decode: Callable[[bytes], Image.Image | npt.NDArray[Any]],
        strip_bytes: int,
    ) -> None:
        self.data = data
        self.width, self.height = header.number(_WIDTH), header.number(_LENGTH)
        self.is_lazy = is_lazy
        self._header = header
        self._decode = decode
        self._lock = threading.Lock()
        self._cache: dict[tuple[int, int], npt.NDArray[Any]] = {}
        self._cached_bytes = 0
        self._is_tiled = _TILE_OFFSETS in header.fields
        tags = (_TILE_OFFSETS, _TILE_COUNTS) if self._is_tiled else (_STRIP_OFFSETS, _STRIP_COUNTS)
        self._tags = tags
        self._offsets, self._counts = (header.numbers(tag) for tag in tags)
        self._strip_rows = min(self.height, header.number(_STRIP_ROWS, self.height))
        if self._is_tiled:
            self._strips, self._columns = 1, header.number(_TILE_WIDTH)
            self._rows = header.number(_TILE_LENGTH)
        else:
            self._strips = max(1, strip_bytes // (4 * self.width * self._strip_rows))
            self._columns, self._rows = self.width, self._strips * self._strip_rows

    @property
    def is_sound(self) -> bool:
        """Whether all blocks are there, and none is a large part of the image."""
        across, down = -(-self.width // self._columns), -(-self.height // self._rows)
        expected = across * down
        if not self._is_tiled:
            expected = -(-self.height // self._strip_rows)
        return (
            len(self._offsets) == len(self._counts) == expected
            and 4 * self._columns * self._rows <= self.width * self.height
            and all(
                count > 0 and start + count <= len(self.data)
                for start, count in zip(self._offsets, self._counts, strict=True)
            )
        )

    def cut(self, box: Box) -> npt.NDArray[Any]:
        """Decode a box; safe to call from several threads.

        Returns:
            (height, width, C) pixels.

        Raises:
            ImageFault: the box reaches outside the image, or a block cannot be decoded.
        """
        right, bottom = box.x + box.width, box.y + box.height
        if right > self.width or bottom > self.height:
            raise ImageFault(
                Status.TRANSFORM_ERROR,
                f"the box reaches outside the image of {self.width} x {self.height}",
            )
        rows_of_blocks = [
            [
                self._block(row, column)[
                    max(0, box.y - row * self._rows) : bottom - row * self._rows,
                    max(0, box.x - column * self._columns) : right - column * self._columns,
                ]
                for column in range(box.x // self._columns, -(-right // self._columns))
            ]
            for row in range(box.y // self._rows, -(-bottom // self._rows))
        ]
        return np.concatenate([np.concatenate(blocks, axis=1) for blocks in rows_of_blocks])

    def whole(self) -> npt.NDArray[Any]:
        """Decode the whole image, (H, W, C); raises ImageFault as `cut` does."""
        pixels: npt.NDArray[Any] | None = None
        for row in range(-(-self.height // self._rows)):
            for column in range(-(-self.width // self._columns)):
                block = self._decode_block(row, column)
                if pixels is None:
                    pixels = np.empty((self.height, self.width, block.shape[2]), block.dtype)
                y, x = row * self._rows, column * self._columns
                pixels[y : y + len(block), x : x + block.shape[1]] = block
        assert pixels is not None, "an image has a block"
        return pixels

    def _block(self, row: int, column: int) -> npt.NDArray[Any]:
        """A block from the cache, or decoded; two threads may decode the same one."""
        with self._lock:
            if (block := self._cache.pop((row, column), None)) is not None:
                self._cache[row, column] = block  # now the last one to be dropped
                return block
        block = self._decode_block(row, column)
        with self._lock:
            if (row, column) not in self._cache:
                self._cache[row, column] = block
                self._cached_bytes += block.nbytes
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.pop(next(iter(self._cache))).nbytes
        return block

    def _decode_block(self, row: int, column: int) -> npt.NDArray[Any]:
        """Decode a block, (h, w, C)."""
        height = min(self._rows, self.height - row * self._rows)
        width = min(self._columns, self.width - column * self._columns)
        first = row * self._strips
        if self._is_tiled:
            first = row * -(-self.width // self._columns) + column
        places = range(first, min(first + self._strips, len(self._offsets)))
        blocks = [self.data[self._offsets[i] : self._offsets[i] + self._counts[i]] for i in places]
        counts = tuple(map(len, blocks))
        starts = tuple(sum(counts[:i]) for i in range(len(counts)))
        tags: dict[int, tuple[int, ...]] = {_WIDTH: (width,), _LENGTH: (height,)}
        tags |= {self._tags[0]: starts, self._tags[1]: counts}
        pixels = np.asarray(self._decode(self._header.file_with(tags, blocks)))
        if pixels.shape[:2] != (height, width):
            raise ImageFault(Status.DECODE_ERROR, "a tile or strip has another size")
        return pixels


def tiff_blocks(
    data: bytes,
    policy: ImagePolicy,
    decode: Callable[[bytes], Image.Image | npt.NDArray[Any]],
    least_bytes: int = LEAST_BYTES,
    strip_bytes: tuple[int, int] = (_LAZY_BYTES, _EAGER_BYTES),
) -> TiffBlocks | None:
    """Find the blocks of a large TIFF that can be decoded one by one.

    Args:
        data: encoded bytes.
        policy: treatment of channels and limit of pixels.
        decode: decodes encoded bytes.
        least_bytes: least size of the decoded image, at 4 bytes a pixel.
        strip_bytes: least sizes of blocks of strips, of those that boxes are cut from and of those
            decoded at once.

    Returns:
        the blocks; None for images that are decoded as a whole: smaller ones, incomplete ones,
        those that have to be turned, and kinds whose pixels depend on the rest of the image.
    """
    try:
        header = _Header.of(data)
        width, height = header.number(_WIDTH), header.number(_LENGTH)
        if not least_bytes <= 4 * width * height <= 4 * policy.max_pixels:
            return None
        if not _has_own_blocks(header, policy):
            return None
        # The strips of an image without compression take its memory already.
        is_lazy = _TILE_OFFSETS in header.fields
        is_lazy |= header.number(_COMPRESSION, _UNCOMPRESSED) == _UNCOMPRESSED
        blocks = TiffBlocks(data, header, is_lazy, decode, strip_bytes[0 if is_lazy else 1])
    except (LookupError, ValueError, struct.error):
        return None  # the usual decoder says what is wrong
    return blocks if blocks.is_sound else None


def _has_own_blocks(header: _Header, policy: ImagePolicy) -> bool:
    """Return whether the pixels of a block depend on that block and the tags only."""
    samples = header.number(_SAMPLES, 1)
    if policy.channels is None:
        # Grey of floats becomes RGB by the range of the values of the whole image.
        is_plain = {*header.numbers(_BITS, 1)} == {8}
        is_plain &= {*header.numbers(_SAMPLE_FORMAT, 1)} == {1}
    else:
        is_plain = samples == policy.channels  # otherwise its pages may be the channels
    xmp = header.fields.get(_XMP)
    return (
        is_plain
        and header.number(_PLANAR, 1) == 1
        and header.number(_ORIENTATION, 1) == 1
        and (xmp is None or b"Orientation" not in xmp.data)
        and header.number(_COMPRESSION, _UNCOMPRESSED) in _COMPRESSIONS
    )


def _even(size: int) -> int:
    """A number of bytes, rounded up: values of a TIFF begin at even addresses."""
    return size + size % 2
