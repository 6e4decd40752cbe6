"""Sizes of ordinary JPEGs: what Pillow reports, and nothing for whatever is unusual."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from encoded_images import encode
from PIL import Image

from featx.images import ImagePolicy, decode
from featx.images.decode import decode_array
from featx.images.image_policy import SIMPLEJPEG
from featx.images.jpeg_header import plain_jpeg_size
from featx.types import ImageFault

pytest.importorskip("simplejpeg")

POLICY = ImagePolicy("apply", (255, 255, 255), 1 << 24, jpeg=SIMPLEJPEG)
IMAGE = Image.fromarray(
    np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8), "RGB"
)
PLAIN = {
    "baseline": {},
    "progressive": {"progressive": True},
    "full colours": {"subsampling": 0},
    "with a colour profile": {"icc_profile": b"profile" * 20},
    "with a comment": {"comment": b"hello"},
    "with restarts": {"restart_marker_rows": 1},
    "with a resolution": {"dpi": (72, 72)},
}


def jpeg(image: Image.Image = IMAGE, kind: str = "JPEG", **options: object) -> bytes:
    return encode(image, kind, **options)


def upside_down() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 3
    return exif


UNUSUAL = {
    "turned": jpeg(exif=upside_down()),
    "several images": jpeg(kind="MPO", save_all=True, append_images=[IMAGE]),
    "grey": jpeg(IMAGE.convert("L")),
    "CMYK": jpeg(IMAGE.convert("CMYK")),
    "another format": jpeg(kind="PNG"),
    "cut in its header": jpeg()[:150],
    "nothing": b"",
    "only the start": b"\xff\xd8",
}


@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_the_size_of_a_plain_jpeg(options: dict[str, object]) -> None:
    assert plain_jpeg_size(jpeg(**options)) == (56, 40)


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
def test_whatever_is_unusual_is_left_to_pillow(data: bytes) -> None:
    assert plain_jpeg_size(data) is None


def decoded(
    data: bytes, monkeypatch: pytest.MonkeyPatch, by_pillow: bool
) -> npt.NDArray[np.uint8] | str:
    """Pixels, or the status of the failure; the header is read by Pillow if asked."""
    with monkeypatch.context() as patched:
        if by_pillow:
            patched.setattr(decode, "plain_jpeg_size", lambda data: None)
        try:
            return decode_array(data, POLICY, 16)
        except ImageFault as fault:
            return fault.status.name


def mutated(rng: random.Random) -> bytes:
    """A JPEG with a few wrong, missing or additional bytes in its header."""
    data = bytearray(rng.choice([*(jpeg(**options) for options in PLAIN.values()), *FILES]))
    end = data.find(b"\xff\xda") + 12
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(end)
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice((0, 255, 0xE1, 0xC0, 0xC4, 0xDA, 0xD9, 0xFE))
            case 2:
                del data[at : at + rng.randrange(1, 6)]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(1, 6))
    return bytes(data)


FILES = [data for data in UNUSUAL.values() if data.startswith(b"\xff\xd8") and len(data) > 200]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of damaged EXIF
@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_headers_give_the_same_image_or_failure_as_with_pillow(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rng, num_plain = random.Random(count), 0
    for _ in range(count):
        data = mutated(rng)
        num_plain += plain_jpeg_size(data) is not None
        ours = decoded(data, monkeypatch, by_pillow=False)
        assert np.array_equal(ours, decoded(data, monkeypatch, by_pillow=True)), data
    assert num_plain > count / 10, "the header of too few was in order"


def test_photographs_give_the_same_pixels(
    monkeypatch: pytest.MonkeyPatch, shared_data: Path
) -> None:
    files = sorted((shared_data / "caltech101-10").rglob("*.jpg"))[::20]
    assert files
    num_plain = 0
    for path in files:
        data = path.read_bytes()
        num_plain += plain_jpeg_size(data) is not None
        ours = decoded(data, monkeypatch, by_pillow=False)
        assert np.array_equal(ours, decoded(data, monkeypatch, by_pillow=True)), path
    assert num_plain > len(files) / 2
