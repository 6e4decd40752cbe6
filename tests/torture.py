"""Sound images with bad ones of every kind between them: `torture.py FOLDER GOOD BAD`.

FOLDER/torture is that folder. FOLDER/twin has the same names, with a sound image in place of
every bad one, so a run over it fills the same batches.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from encoded_images import encode
from PIL import Image

from featx.types import Status


def make_image(seed: int) -> Image.Image:
    """Squares of strong colours: no two seeds give features that resemble each other."""
    rng = np.random.default_rng(seed)
    squares = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    width, height = rng.integers(6, 30, 2)
    return Image.fromarray(squares.repeat(height, 0).repeat(width, 1))


def _deep(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


def _with_alpha(image: Image.Image) -> Image.Image:
    image.putalpha(Image.radial_gradient("L").resize(image.size))
    return image


GOOD: dict[str, tuple[str, Callable[[Image.Image], bytes]]] = {
    "jpeg": ("jpg", lambda image: encode(image, "JPEG")),
    "jpeg progressive": ("JPG", lambda image: encode(image, "JPEG", progressive=True)),
    "jpeg grey": ("jpeg", lambda image: encode(image.convert("L"), "JPEG")),
    "jpeg cmyk": ("jpg", lambda image: encode(image.convert("CMYK"), "JPEG")),
    "jpeg turned": ("jpg", lambda image: encode(image, "JPEG", exif=_turned())),
    "png": ("png", lambda image: encode(image, "PNG")),
    "png palette": ("png", lambda image: encode(image.convert("P"), "PNG")),
    "png alpha": ("png", lambda image: encode(_with_alpha(image), "PNG")),
    "png 16": ("png", lambda image: encode(_deep(image), "PNG")),
    "png 1": ("png", lambda image: encode(image.convert("1"), "PNG")),
    "webp": ("webp", lambda image: encode(image, "WEBP")),
    "webp alpha": ("webp", lambda image: encode(_with_alpha(image), "WEBP", lossless=True)),
    "gif": ("gif", lambda image: encode(image, "GIF")),
    "gif animated": (
        "gif",
        lambda image: encode(image, "GIF", save_all=True, append_images=[image.rotate(180)]),
    ),
    "bmp": ("bmp", lambda image: encode(image, "BMP")),
    "tiff": ("tif", lambda image: encode(image, "TIFF")),
    "tiff lzw": ("tiff", lambda image: encode(image, "TIFF", compression="tiff_lzw")),
    "tiff cmyk": ("tif", lambda image: encode(image.convert("CMYK"), "TIFF")),
    "ppm": ("ppm", lambda image: encode(image, "PPM")),
    "avif": ("avif", lambda image: encode(image, "AVIF", speed=9)),
    "png under another name": ("jpg", lambda image: encode(image, "PNG")),
}
"""Kind -> ending of the name, and how an image becomes such a file."""


def _turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif.tobytes()


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    """One bit of a PNG's pixels: what its checksum is for."""
    at = data.index(b"IDAT") + 12
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is very large."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(bytes(1000))
    chunks = [
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in (header, pixels)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _floats(low: float, high: float) -> bytes:
    return encode(Image.fromarray(np.array([[low, high]], np.float32)), "TIFF")


BAD: dict[str, tuple[str, Status, Callable[[Image.Image], bytes]]] = {
    "empty": ("jpg", Status.EMPTY, lambda image: b""),
    "one byte": ("jpg", Status.UNSUPPORTED, lambda image: b"\xff"),
    "text": ("png", Status.UNSUPPORTED, lambda image: b"no image\n" * 30),
    "page of an error": ("jpg", Status.UNSUPPORTED, lambda image: b"<!DOCTYPE html><html>404"),
    "zeros": ("jpg", Status.UNSUPPORTED, lambda image: bytes(5000)),
    "archive": ("png", Status.UNSUPPORTED, lambda image: b"PK\x03\x04" + bytes(400)),
    "eps": ("jpg", Status.UNSUPPORTED, lambda image: encode(image, "EPS")),
    "pcx": ("png", Status.UNSUPPORTED, lambda image: encode(image, "PCX")),
    "tga": ("bmp", Status.UNSUPPORTED, lambda image: encode(image, "TGA")),
    "jpeg 2000": ("jpg", Status.UNSUPPORTED, lambda image: encode(image, "JPEG2000")),
    "floats without a white": ("tif", Status.UNSUPPORTED, lambda image: _floats(-3, 900)),
    "not a number": ("tif", Status.UNSUPPORTED, lambda image: _floats(0, float("nan"))),
    "start of a jpeg": ("jpg", Status.DECODE_ERROR, lambda image: encode(image, "JPEG")[:20]),
    "start of a png": ("png", Status.TRUNCATED, lambda image: encode(image, "PNG")[:20]),
    "flipped png": ("png", Status.DECODE_ERROR, lambda image: _flipped(encode(image, "PNG"))),
    "cut webp": ("webp", Status.DECODE_ERROR, lambda image: _cut(encode(image, "WEBP"))),
    "cut jpeg": ("jpg", Status.TRUNCATED, lambda image: _cut(encode(image, "JPEG"))),
    "cut png": ("png", Status.TRUNCATED, lambda image: _cut(encode(image, "PNG"))),
    "cut bmp": ("bmp", Status.TRUNCATED, lambda image: _cut(encode(image, "BMP"))),
    "cut ppm": ("ppm", Status.TRUNCATED, lambda image: _cut(encode(image, "PPM"))),
    "cut gif": ("gif", Status.TRUNCATED, lambda image: _cut(encode(image, "GIF"))),
    "cut avif": ("avif", Status.TRUNCATED, lambda image: encode(image, "AVIF", speed=9)[:-9]),
    "large png": ("png", Status.TOO_LARGE, lambda image: _claims(60_000, 60_000)),
    "large ppm": ("ppm", Status.TOO_LARGE, lambda image: b"P6 99999 99999 255\n"),
    "narrow": ("png", Status.TOO_LARGE, lambda image: encode(Image.new("L", (1, 99_999)), "PNG")),
}
"""Kind -> ending of the name, what becomes of such a row, and how an image becomes such a file."""


def make(
    root: Path, num_good: int, num_bad: int, extra: dict[str, tuple[Status, bytes]] | None = None
) -> dict[str, Status]:
    """Write root/torture and root/twin.

    Args:
        root: a folder.
        num_good, num_bad: files of each sort; the kinds take turns.
        extra: name -> status and content of further bad ones.

    Returns:
        key of each bad row -> its status.
    """
    rng = np.random.default_rng(num_good)
    is_bad = rng.permutation(np.repeat([False, True], [num_good, num_bad]))
    expected = {}

    def write(name: str, content: bytes, sound: bytes) -> None:
        for folder, data in (("torture", content), ("twin", sound)):
            path = root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    numbers = {False: 0, True: 0}
    for row, bad in enumerate(is_bad.tolist()):
        number, numbers[bad] = numbers[bad], numbers[bad] + 1
        ending, sound = list(GOOD.values())[number % len(GOOD)]
        content = sound(make_image(row))
        name = f"{('cat', 'dog')[row % 2]}/{row:05d}.{ending}"
        if not bad:
            write(name, content, content)
            continue
        ending, status, spoil = list(BAD.values())[number % len(BAD)]
        name = f"{name.partition('.')[0]}.{ending}"
        expected[name] = status
        write(name, spoil(make_image(row)), content)
    for name, (status, content) in (extra or {}).items():
        expected[name] = status
        write(name, content, encode(make_image(len(expected)), "PNG"))
    # One that leads nowhere: it is listed, and missing when it is read.
    expected["dog/gone.jpg"] = Status.MISSING
    write("dog/gone.jpg", b"", encode(make_image(1), "PNG"))
    (root / "torture" / "dog" / "gone.jpg").unlink()
    (root / "torture" / "dog" / "gone.jpg").symlink_to("nowhere.jpg")
    return expected


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
