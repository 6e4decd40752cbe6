"""A writer of TIFFs of any kind, by the rules of TIFF 6.0, so that no library has a say in them."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

CODES = {1: "B", 3: "H", 4: "I", 8: "h", 11: "f", 12: "d", 9: "i"}


@dataclass(frozen=True)
class Kind:
    """A kind of TIFF.

    Attributes:
        sample_format: 1 unsigned, 2 signed, 3 float.
        bits: bits of each sample.
        order: '<' or '>'.
        photometric: 0 white is zero, 1 black is zero, 2 RGB.
        planar: 1 for pixels, 2 for planes.
        tile: side of tiles, or None for strips of 7 rows.
        compression: 1 none, 8 deflate.
        predictor: 1 none, 2 differences, 3 of floats.
        extra: the tag ExtraSamples, or () for none.
        tags: further tags: tag -> (type, values).
    """

    sample_format: int = 1
    bits: int = 8
    order: str = "<"
    photometric: int = 2
    planar: int = 1
    tile: int | None = None
    compression: int = 1
    predictor: int = 1
    extra: tuple[int, ...] = ()
    tags: dict[int, tuple[int, tuple[float, ...]]] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the numbers, native; of 12 bits in 16."""
        letter = {1: "u", 2: "i", 3: "f"}[self.sample_format]
        return np.dtype(f"{letter}{max(1, 2 if self.bits == 12 else self.bits // 8)}")


def write_tiff(*pages: tuple[npt.NDArray[Any], Kind], is_big: bool = False) -> bytes:
    """A TIFF of pages, each (H, W, C) numbers and their kind; all of one byte order."""
    order = pages[0][1].order
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}H", 43 if is_big else 42)
    number, entry, count_code, inline = ("Q", "HHQ", "Q", 8) if is_big else ("I", "HHI", "H", 4)
    data = bytearray(head + (struct.pack(f"{order}HH", 8, 0) if is_big else b"") + bytes(inline))
    link = len(data) - inline
    for array, kind in pages:
        blocks = list(blocks_of(array, kind))
        offsets = []
        for block in blocks:
            offsets.append(len(data))
            data += block + bytes(len(block) % 2)
        tags = _tags(array, kind) | kind.tags
        counts = tuple(map(len, blocks))
        places = (324, 325) if kind.tile else (273, 279)
        tags = {places[0]: (4, tuple(offsets)), places[1]: (4, counts)} | tags
        entries, long_values = b"", []
        for tag, (code, values) in sorted(tags.items()):
            packed = struct.pack(f"{order}{len(values)}{CODES[code]}", *values)
            if len(packed) > inline:
                long_values.append((tag, packed))
            entries += (
                struct.pack(order + entry, tag, code, len(values))
                + packed.ljust(inline, b"\0")[:inline]
            )
        data += bytes(len(data) % 2)
        entries_at = len(data) + struct.calcsize(order + count_code)
        size = struct.calcsize(order + entry) + inline
        data[link : link + inline] = struct.pack(order + number, len(data))
        data += struct.pack(order + count_code, len(tags)) + entries
        link = len(data)
        data += bytes(inline)
        for tag, packed in long_values:
            at = entries_at + sorted(tags).index(tag) * size + size - inline
            data[at : at + inline] = struct.pack(order + number, len(data))
            data += packed + bytes(len(packed) % 2)
    return bytes(data)


def _tags(array: npt.NDArray[Any], kind: Kind) -> dict[int, tuple[int, tuple[float, ...]]]:
    """Tags of a page without the places of its blocks."""
    height, width, channels = array.shape
    tags: dict[int, tuple[int, tuple[float, ...]]] = {
        256: (4, (width,)), 257: (4, (height,)), 258: (3, (kind.bits,) * channels),
        259: (3, (kind.compression,)), 262: (3, (kind.photometric,)), 277: (3, (channels,)),
        284: (3, (kind.planar,)), 317: (3, (kind.predictor,)),
        339: (3, (kind.sample_format,) * channels),
    }  # fmt: skip
    if kind.tile:
        tags |= {322: (3, (kind.tile,)), 323: (3, (kind.tile,))}
    else:
        tags[278] = (3, (7,))
    if kind.extra:
        tags[338] = (3, kind.extra)
    return tags


def blocks_of(array: npt.NDArray[Any], kind: Kind) -> list[bytes]:
    """Encoded strips or tiles."""
    height, width, channels = array.shape
    planes = [array] if kind.planar == 1 else [array[:, :, c : c + 1] for c in range(channels)]
    side = kind.tile
    blocks = []
    for plane in planes:
        for top in range(0, height, side or 7):
            for left in range(0, width, side or width):
                block = plane[top : top + (side or 7), left : left + (side or width)]
                if side:
                    pad = [(0, side - block.shape[0]), (0, side - block.shape[1]), (0, 0)]
                    block = np.pad(block, pad)
                blocks.append(_encode(block, kind))
    return blocks


def _encode(block: npt.NDArray[Any], kind: Kind) -> bytes:
    """Bytes of a strip or tile."""
    rows, columns, channels = block.shape
    block = block.astype(kind.dtype)
    if kind.predictor == 2:
        with np.errstate(over="ignore"):
            block = np.concatenate([block[:, :1], np.diff(block, axis=1)], axis=1)
    if kind.predictor == 3:
        # The bytes of a row, the most significant ones first, and their differences.
        planes = block.astype(kind.dtype.newbyteorder(">")).view(np.uint8)
        planes = planes.reshape(rows, columns * channels, -1).transpose(0, 2, 1)
        row = planes.reshape(rows, -1)
        row = np.concatenate([row[:, :channels], row[:, channels:] - row[:, :-channels]], axis=1)
        raw = row.tobytes()
    elif kind.bits == 12 or kind.bits < 8:
        bits = (block[..., None] >> np.arange(kind.bits)[::-1]) & 1
        raw = np.packbits(bits.reshape(rows, -1).astype(np.uint8), axis=1).tobytes()
    else:
        raw = block.astype(kind.dtype.newbyteorder(kind.order)).tobytes()
    return pack(raw, kind)


def pack(raw: bytes, kind: Kind) -> bytes:
    """Compressed bytes of a strip or tile."""
    return zlib.compress(raw) if kind.compression == 8 else raw
