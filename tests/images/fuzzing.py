"""Mutants of images of every format, and a process that decodes them: fuzzing.py COUNT SEED LAST.

The process draws COUNT mutants with hypothesis and decodes each whole. It fails where one raises
anything but an ImageFault, takes over 10 s, gives pixels of a wrong shape, or where the memory
grows by more than 1 GB. Before each, the mutant is written to the file LAST: after a crash it is
the culprit.
"""

from __future__ import annotations

import functools
import io
import json
import random
import resource
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from PIL import Image

from featx.images import PILLOW, ImagePolicy
from featx.images.decode import decode_array
from featx.images.decode_settings import SIMPLEJPEG
from featx.types import ImageFault, Status

POLICY = ImagePolicy("apply", (10, 20, 30), 89_478_485)
MAX_S = 10.0
"""Of the processor, as other programs may be at work beside the tests."""

MAX_BYTES = 1 << 30

_TELLING = (b"\0", b"\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\1")
"""Numbers that lengths and sizes are wrong with."""


def _image(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    rng = np.random.default_rng(len(mode))
    width, height = size
    pixels = rng.integers(0, 256, (height // 2, width // 2, 3), np.uint8).repeat(2, 0).repeat(2, 1)
    image = Image.fromarray(pixels)
    if "A" in mode:
        image.putalpha(Image.radial_gradient("L").resize(size))
    return image.convert(mode)


@functools.cache
def corpus() -> dict[str, bytes]:
    """A sound image of every kind."""
    import pillow_heif

    def encode(kind: str, mode: str = "RGB", frames: int = 1, **options: Any) -> bytes:
        file = io.BytesIO()
        if frames > 1:
            options |= {"save_all": True, "append_images": [_image("L")] * (frames - 1)}
        _image(mode).save(file, kind, **options)
        return file.getvalue()

    exif = Image.Exif()
    exif[0x0112] = 6
    grey = np.arange(40 * 30, dtype=np.uint16).reshape(30, 40) * 50
    deep = io.BytesIO()
    Image.fromarray(grey).save(deep, "PNG")
    heic = io.BytesIO()
    pillow_heif.from_pillow(_image()).save(heic, quality=60)
    files = {
        "jpeg": encode("JPEG"),
        "jpeg progressive": encode("JPEG", progressive=True, exif=exif.tobytes()),
        "jpeg grey": encode("JPEG", "L"),
        "jpeg cmyk": encode("JPEG", "CMYK"),
        "jpeg restarts": encode("JPEG", restart_marker_rows=1, subsampling="4:4:4"),
        "mpo": encode("MPO", frames=3),
        "png": encode("PNG", exif=exif.tobytes()),
        "png palette": encode("PNG", "P", transparency=3),
        "png alpha": encode("PNG", "RGBA"),
        "png grey alpha": encode("PNG", "LA"),
        "png 16": deep.getvalue(),
        "png 1": encode("PNG", "1"),
        "apng": encode("PNG", frames=3),
        "webp": encode("WEBP", exif=exif.tobytes()),
        "webp lossless": encode("WEBP", "RGBA", lossless=True),
        "webp animated": encode("WEBP", frames=3),
        "gif": encode("GIF", "P", transparency=1),
        "gif animated": encode("GIF", frames=3),
        "bmp": encode("BMP"),
        "bmp palette": encode("BMP", "P"),
        "dib": encode("DIB"),
        "tiff": encode("TIFF", exif=exif),
        "tiff pages": encode("TIFF", frames=3),
        "ppm": encode("PPM"),
        "pbm": encode("PPM", "1"),
        "ppm in letters": b"P3 3 2 255\n" + b" 255 0 12 9 8 7" * 3,
        "avif": encode("AVIF", speed=9, exif=exif.tobytes()),
        "avif alpha": encode("AVIF", "RGBA", speed=9),
        "avif animated": encode("AVIF", speed=9, frames=3),
        "heic": heic.getvalue(),
    }
    for kind in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "zstd", "lzma"):
        files[f"tiff {kind}"] = encode("TIFF", compression=kind)
    for kind in ("group3", "group4"):
        files[f"tiff {kind}"] = encode("TIFF", "1", compression=kind)
    return files


def mutant(name: str, number: int) -> bytes:
    """Some changes to a file of the corpus; the same arguments give the same bytes."""
    rng = random.Random(f"{name} {number}")
    files = corpus()
    data = bytearray(files[name])
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        # Most of what a file can lie about stands near its beginning.
        reach = rng.choice((32, 200, max(1, len(data))))
        at = rng.randrange(min(reach, max(1, len(data))))
        how = rng.randrange(7)
        if how == 0:
            del data[at:]
        elif how == 1 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 7, 300)))
        elif how == 3:
            del data[at : at + rng.choice((1, 2, 4, 60))]
        elif how == 4:
            value = rng.choice(_TELLING)
            data[at : at + len(value)] = value
        elif how == 5:
            other = files[rng.choice(list(files))]
            data[at:] = other[rng.randrange(len(other)) :]
        else:
            stop = at + rng.choice((4, 40, 400))
            data[at:at] = data[at:stop]
    return bytes(data)


def check(data: bytes, policy: ImagePolicy, at_least: int | None) -> Status:
    """Decode one mutant; raises where that is not an image or a fault, in good time."""
    started_at = time.process_time()
    found = outcome(data, policy, at_least)
    assert time.process_time() - started_at < MAX_S, "too slow"
    if isinstance(found, ImageFault):
        assert found.status not in (Status.OK, Status.ABSENT), found.status
        assert str(found), "a fault without a message"
        return found.status
    assert found.dtype == np.uint8, found.dtype
    assert found.ndim == 3, found.shape
    assert found.shape[2] == 3, found.shape
    assert 0 < found.size <= 3 * policy.max_pixels, found.shape
    return Status.OK


def outcome(data: bytes, policy: ImagePolicy, at_least: int | None) -> np.ndarray | ImageFault:
    """The pixels, or the fault; anything else is raised."""
    try:
        return decode_array(data, policy, at_least)
    except ImageFault as fault:
        return fault


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main(count: int, number: int, last: Path) -> None:
    """Decode `count` mutants and print what became of them."""
    warnings.simplefilter("ignore")  # of Pillow's, on odd metadata
    before = peak_bytes()
    statuses: Counter[str] = Counter()
    slowest = 0.0

    @seed(number)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        st.sampled_from(sorted(corpus())),
        st.integers(0, 1 << 60),
        st.sampled_from((PILLOW, SIMPLEJPEG)),
        st.sampled_from((None, 4)),
    )
    def decode_mutants(name: str, variant: int, jpeg: str, at_least: int | None) -> None:
        nonlocal slowest
        data = mutant(name, variant)
        last.write_bytes(data)
        started_at = time.process_time()
        statuses[check(data, replace(POLICY, jpeg=jpeg), at_least).label] += 1
        slowest = max(slowest, time.process_time() - started_at)
        grown = peak_bytes() - before
        assert grown < MAX_BYTES, f"{grown >> 20} MiB"

    decode_mutants()
    grown = (peak_bytes() - before) >> 20
    found = {"statuses": statuses, "slowest_s": round(slowest, 3), "grown_mib": grown}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
