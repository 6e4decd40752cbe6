"""Images as the content of files."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable
from typing import Any

from PIL import Image


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The file that Pillow writes in this format, with these options of the format."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG, with its length and its checksum."""
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def make_png(
    width: int, height: int, bits: int, colour_type: int, rows: Iterable[bytes], *extra: bytes
) -> bytes:
    """A PNG written by hand, so that no writer of Pillow's has a say in its pixels."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    ends = png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + b"".join(extra) + ends
