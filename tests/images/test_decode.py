"""Encoded bytes to RGB: every mode by hand-computed pixels, every fault as an ImageFault."""

from __future__ import annotations

import functools
import io
import math
import random
import struct
import subprocess
import sys
import time
import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_image, run_python, slow_except
from csv_rows import csv_rows
from encoded_images import encode, make_png, png_chunk
from fuzzing import outcome
from image_faults import image_fault
from PIL import Image, ImageFile, ImageOps

from featx.config import DataConfig
from featx.errors import ConfigError
from featx.images import FORMATS, PILLOW, ImagePolicy, decode_pillow
from featx.images.decode import decode_array
from featx.images.decode_settings import SIMPLEJPEG
from featx.images.rgb_conversion import to_rgb
from featx.types import ImageFault, Status

BACKGROUND = (10, 20, 30)
POLICY = ImagePolicy("apply", BACKGROUND, 89_478_485)
IGNORE_EXIF = ImagePolicy("ignore", BACKGROUND, 89_478_485)
ORIENTATION = 0x0112


def pixels(data: bytes, policy: ImagePolicy = POLICY, at_least: int | None = None) -> np.ndarray:
    image = decode_pillow(data, policy, at_least)
    assert image.mode == "RGB"
    return np.asarray(image)


def fault_of(data: bytes, policy: ImagePolicy = POLICY) -> ImageFault:
    with pytest.raises(ImageFault) as caught:
        decode_pillow(data, policy)
    return caught.value


def attempt(data: bytes, jpeg: str = PILLOW) -> np.ndarray | ImageFault:
    return outcome(data, replace(POLICY, jpeg=jpeg), None)


def mixed(value: int, alpha: int, under: int) -> int:
    return round((value * alpha + under * (255 - alpha)) / 255)


def over_background(rgb: tuple[int, int, int], alpha: int) -> list[int]:
    return [mixed(value, alpha, under) for value, under in zip(rgb, BACKGROUND, strict=True)]


def one_row(mode: str, values: list[Any]) -> Image.Image:
    image = Image.new(mode, (len(values), 1))
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)
    return image


# Every mode by hand-computed pixels


OPAQUE_MODES = [
    ("1", [0, 255], [[0] * 3, [255] * 3]),
    ("L", [0, 7, 255], [[0] * 3, [7] * 3, [255] * 3]),
    ("RGB", [(1, 2, 3), (255, 0, 9)], [[1, 2, 3], [255, 0, 9]]),
    (
        "CMYK",
        [(0, 0, 0, 0), (255, 0, 0, 0), (0, 255, 255, 0), (0, 0, 0, 255), (0, 0, 0, 100)],
        [[255] * 3, [0, 255, 255], [255, 0, 0], [0] * 3, [155] * 3],
    ),
    ("YCbCr", [(128, 128, 128), (0, 128, 128), (76, 85, 255)], [[128] * 3, [0] * 3, [254, 0, 0]]),
    ("HSV", [(0, 0, 255), (85, 255, 255)], [[255] * 3, [0, 255, 0]]),
    ("I;16", [0, 257, 51_400, 65_535], [[0] * 3, [1] * 3, [200] * 3, [255] * 3]),
    ("I;16B", [0, 257, 51_400, 65_535], [[0] * 3, [1] * 3, [200] * 3, [255] * 3]),
    ("I;16L", [0, 257, 51_400, 65_535], [[0] * 3, [1] * 3, [200] * 3, [255] * 3]),
]


@pytest.mark.parametrize(("mode", "values", "expected"), OPAQUE_MODES)
def test_an_opaque_mode(mode: str, values: list[Any], expected: list[list[int]]) -> None:
    rgb = to_rgb(one_row(mode, values), BACKGROUND)
    assert rgb.mode == "RGB"
    assert np.asarray(rgb)[0].tolist() == expected


def test_lab_becomes_rgb_within_rounding() -> None:
    rgb = to_rgb(one_row("LAB", [(0, 128, 128), (255, 128, 128)]), BACKGROUND)
    np.testing.assert_allclose(np.asarray(rgb, int)[0], [[0] * 3, [255] * 3], atol=1)


TRANSPARENT_MODES = [
    ("LA", [(100, 255), (100, 0), (200, 128)], [(100, 255), (0, 0), (200, 128)]),
    ("La", [(100, 255), (0, 0), (100, 128)], [(100, 255), (0, 0), (199, 128)]),
]


@pytest.mark.parametrize(("mode", "values", "grey_and_alpha"), TRANSPARENT_MODES)
def test_grey_with_alpha_lies_over_the_background(
    mode: str, values: list[Any], grey_and_alpha: list[tuple[int, int]]
) -> None:
    rgb = np.asarray(to_rgb(one_row(mode, values), BACKGROUND))[0]
    expected = [over_background((grey,) * 3, alpha) for grey, alpha in grey_and_alpha]
    np.testing.assert_allclose(rgb, expected, atol=1)


@pytest.mark.parametrize("mode", ["RGBA", "RGBa"])
def test_colour_with_alpha_lies_over_the_background(mode: str) -> None:
    straight = [(200, 100, 50, 255), (1, 2, 3, 0), (200, 100, 50, 128)]
    values = straight
    if mode == "RGBa":
        values = [tuple(round(v * c[3] / 255) for v in c[:3]) + c[3:] for c in straight]
    found = np.asarray(to_rgb(one_row(mode, values), BACKGROUND))[0]
    expected = [over_background((r, g, b), a) for r, g, b, a in straight]
    np.testing.assert_allclose(found, expected, atol=2)


def palette_image(*indices: int) -> Image.Image:
    image = one_row("P", list(indices))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 8, 7])
    return image


def test_a_palette_without_transparency() -> None:
    rgb = np.asarray(to_rgb(palette_image(2, 0, 3), BACKGROUND))[0]
    assert rgb.tolist() == [[0, 0, 255], [255, 0, 0], [9, 8, 7]]


def test_a_palette_with_one_transparent_entry() -> None:
    data = encode(palette_image(0, 1, 2), "PNG", transparency=1)
    assert pixels(data)[0].tolist() == [[255, 0, 0], list(BACKGROUND), [0, 0, 255]]


def test_a_palette_with_an_alpha_for_each_entry() -> None:
    data = encode(palette_image(0, 1, 2, 3), "PNG", transparency=bytes([255, 0, 128]))
    expected = [[255, 0, 0], list(BACKGROUND), over_background((0, 0, 255), 128), [9, 8, 7]]
    np.testing.assert_allclose(pixels(data)[0], expected, atol=1)


def test_a_palette_that_holds_alpha_itself() -> None:
    image = one_row("P", [0, 1])
    image.putpalette([200, 100, 50, 255, 1, 2, 3, 0], "RGBA")
    assert np.asarray(to_rgb(image, BACKGROUND))[0].tolist() == [[200, 100, 50], list(BACKGROUND)]


def test_a_palette_with_an_alpha_band() -> None:
    image = one_row("RGBA", [(9, 8, 7, 255), (1, 2, 3, 0)]).convert("PA")
    expected = [[9, 8, 7], list(BACKGROUND)]
    assert np.asarray(to_rgb(image, BACKGROUND))[0].tolist() == expected
    assert pixels(encode(image, "TIFF"))[0].tolist() == expected


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_rgba_files_lie_over_the_background(kind: str) -> None:
    image = Image.new("RGBA", (8, 8), (200, 100, 50, 128))
    image.paste((1, 2, 3, 0), (0, 0, 4, 8))
    found = pixels(encode(image, kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert found[0, 0].tolist() == list(BACKGROUND)
    np.testing.assert_allclose(found[0, 7], over_background((200, 100, 50), 128), atol=1)


def test_a_transparent_gif_lies_over_the_background() -> None:
    image = palette_image(0, 1)
    found = pixels(encode(image, "GIF", transparency=1))
    assert found[0].tolist() == [[255, 0, 0], list(BACKGROUND)]


# 16 bits


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    """convert('RGB') would make all but the first two white."""
    values = [0, 128, 129, 257, 300, 32_767, 32_768, 65_535]
    data = make_png(8, 1, 16, 0, [struct.pack(">8H", *values)])
    assert Image.open(io.BytesIO(data)).mode == "I;16"
    assert pixels(data)[0, :, 0].tolist() == [0, 0, 1, 1, 1, 127, 128, 255]


@pytest.mark.parametrize(
    ("colour_type", "values", "expected"),
    [
        (0, (100, 2570), [[0] * 3, [10] * 3]),  # nothing is stretched
        (2, (0, 0x8080, 0xFFFF, 0x0101, 0x7F7F, 0xC8C8), [[0, 128, 255], [1, 127, 200]]),
        (4, (0xC8C8, 0xFFFF, 0xC8C8, 0), [[200] * 3, list(BACKGROUND)]),
        (6, (257, 514, 771, 0xFFFF, 0xFFFF, 0, 0, 0), [[1, 2, 3], list(BACKGROUND)]),
    ],
)
def test_16_bits_of_every_colour_type(
    colour_type: int, values: tuple[int, ...], expected: list[list[int]]
) -> None:
    row = struct.pack(f">{len(values)}H", *values)
    assert pixels(make_png(2, 1, 16, colour_type, [row]))[0].tolist() == expected


@pytest.mark.parametrize(
    ("mode", "values", "white", "expected"),
    [
        ("I", [0, 257, 51_400, 65_535], 65_535, [0, 1, 200, 255]),
        ("I", [0, 7, 255], 255, [0, 7, 255]),
        ("F", [0.0, 0.2, 1.0], 1, [0, 51, 255]),
        ("F", [0.0, 0.2, 1.003], 1, [0, 51, 255]),
        ("F", [0.0, 0.2, 1.0], 255, [0, 0, 1]),
        ("F", [0.0, 1.6, 255.0], 255, [0, 2, 255]),
        ("F", [-0.05, 1.05], 1, [0, 255]),
    ],
)
def test_white_of_numbers_is_that_of_the_data_set(
    mode: str, values: list[float], white: float, expected: list[int]
) -> None:
    """No number of an image decides: 1.0 is white or nearly black by data.white only."""
    image = one_row(mode, values)
    for data in (encode(image, "TIFF"), encode(image, "TIFF", compression="tiff_lzw")):
        assert "data.white" in str(fault_of(data))
        found = pixels(data, replace(POLICY, white=white))
        assert found[0].tolist() == [[value] * 3 for value in expected]
    found = np.asarray(to_rgb(image, BACKGROUND, white))
    assert found[0].tolist() == [[value] * 3 for value in expected]
    with pytest.raises(ImageFault, match="white is not stated"):
        to_rgb(image, BACKGROUND)


@pytest.mark.parametrize(
    ("mode", "values", "white"),
    [
        *[("I", [0, 70_000], 255), ("I", [-100, 5], 255)],
        *[("F", [0.5, bad], 1) for bad in (-0.5, 255.0, math.nan, math.inf, -math.inf)],
    ],
)
def test_numbers_far_outside_of_black_and_white_are_refused(
    mode: str, values: list[float], white: float
) -> None:
    fault = fault_of(encode(one_row(mode, values), "TIFF"), replace(POLICY, white=white))
    assert fault.status == Status.UNSUPPORTED
    assert "pixels from" in str(fault)


@pytest.mark.parametrize(
    ("mode", "values"),
    [
        ("1", [0, 255]),
        ("CMYK", [(0, 0, 0, 100), (255, 0, 0, 0), (0, 255, 255, 0)]),
        ("I;16", [0, 257, 51_400, 65_535]),
        ("LA", [(100, 255), (100, 0), (200, 128)]),
        ("RGBA", [(200, 100, 50, 255), (1, 2, 3, 0), (9, 100, 50, 128)]),
    ],
)
def test_a_large_image_is_converted_as_a_small_one(mode: str, values: list[Any]) -> None:
    """Strip by strip: each repetition of the pixels has the same colours."""
    row = one_row(mode, values)
    large = row.resize((len(values), (6 << 20) // len(values)), Image.Resampling.NEAREST)
    found = np.asarray(to_rgb(large, BACKGROUND))
    assert (found == np.asarray(to_rgb(row, BACKGROUND))).all()


# A PNG's transparent colour, in the bits of the file


TRANSPARENT_COLOURS = [
    # bits, colour type, row, transparent colour, which of the pixels it is
    (1, 0, b"\x40", (1,), [False, True]),
    (1, 0, b"\x40", (0,), [True, False]),
    (2, 0, b"\x1b", (1,), [False, True, False, False]),
    (4, 0, b"\x5a\xf0", (5,), [True, False, False, False]),
    (4, 0, b"\x5a\xf0", (15,), [False, False, True, False]),
    (8, 0, b"\x05\x50", (5,), [True, False]),
    (16, 0, struct.pack(">2H", 1000, 1001), (1000,), [True, False]),
    (8, 2, bytes([1, 2, 3, 1, 2, 4]), (1, 2, 3), [True, False]),
    (16, 2, struct.pack(">6H", 0x1234, 0, 9, 0x1334, 0, 9), (0x1234, 0, 9), [True, False]),
]


@pytest.mark.parametrize(("bits", "colour_type", "row", "colour", "clear"), TRANSPARENT_COLOURS)
def test_the_transparent_colour_of_a_png(
    bits: int, colour_type: int, row: bytes, colour: tuple[int, ...], clear: list[bool]
) -> None:
    transparency = png_chunk(b"tRNS", struct.pack(f">{len(colour)}H", *colour))
    found = pixels(make_png(len(clear), 1, bits, colour_type, [row], transparency))[0]
    assert [value == list(BACKGROUND) for value in found.tolist()] == clear
    plain = pixels(make_png(len(clear), 1, bits, colour_type, [row]))[0]
    assert np.array_equal(found[~np.array(clear)], plain[~np.array(clear)])


def test_the_background_is_the_configs() -> None:
    data = make_png(1, 1, 8, 6, [bytes([9, 9, 9, 0])])
    for colour, expected in (("white", [255] * 3), ("#0a141e", [10, 20, 30]), ("black", [0] * 3)):
        policy = ImagePolicy.from_config(DataConfig(background=colour))
        assert pixels(data, policy)[0, 0].tolist() == expected


def test_a_background_that_is_no_colour_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.background=whit: expected a colour name"):
        ImagePolicy.from_config(DataConfig(background="whit"))


# Orientation


def turned(upright: np.ndarray, orientation: int) -> np.ndarray:
    """What an image stored with an EXIF orientation looks like upright (H, W, 3)."""
    return {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, -1),
        7: np.rot90(upright.transpose(1, 0, 2), 2),
        8: np.rot90(upright, 1),
    }[orientation]


def stored_with(kind: str, image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    if kind.startswith("TIFF"):
        compression = kind.partition("-")[2] or None
        return encode(image, "TIFF", tiffinfo={ORIENTATION: orientation}, compression=compression)
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(kind, {})
    return encode(image, kind, exif=exif.tobytes(), **options)


KINDS_WITH_EXIF = ["PNG", "WEBP", "TIFF", "TIFF-tiff_lzw", "JPEG"]


@pytest.mark.parametrize("kind", KINDS_WITH_EXIF)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_or_ignored(kind: str, orientation: int) -> None:
    """Pillow turns TIFFs by itself, once; ignoring must turn them back."""
    image = make_image(24, 16, seed=orientation)
    data = stored_with(kind, image, orientation)
    as_stored = np.asarray(image)
    if kind == "JPEG":
        as_stored = np.asarray(Image.open(io.BytesIO(data)))
    assert np.array_equal(pixels(data, IGNORE_EXIF), as_stored)
    assert np.array_equal(pixels(data), turned(as_stored, orientation))
    reference = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(pixels(data), np.asarray(reference))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG"])
@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_orientation_out_of_range_is_none(kind: str, orientation: int) -> None:
    data = stored_with(kind, make_image(24, 16), orientation)
    assert np.array_equal(pixels(data), pixels(data, IGNORE_EXIF))
    assert pixels(data).shape == (16, 24, 3)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of damaged EXIF
def test_a_damaged_exif_block_does_not_cost_the_image() -> None:
    """Every prefix and a thousand corruptions: the same pixels, at most turned."""
    image = make_image(24, 16)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    exif[0x010F] = "maker"
    block = exif.tobytes()
    upright = pixels(encode(image, "JPEG", exif=block))
    rng = random.Random(0)
    blocks = [block[:n] for n in range(6, len(block))]
    for _ in range(1000):
        changed = bytearray(block)
        for _ in range(rng.choice([1, 2, 8])):
            changed[rng.randrange(6, len(block))] = rng.randrange(256)
        blocks.append(bytes(changed))
    blocks += [b"Exif\0\0" + rng.randbytes(40) for _ in range(50)]
    ways = [turned(np.rot90(upright, 1), way).tobytes() for way in range(1, 9)]
    for damaged in blocks:
        assert pixels(encode(image, "JPEG", exif=damaged)).tobytes() in ways


def test_the_exif_examples_show_one_image(shared_data: Path) -> None:
    folder = shared_data / "odd-images" / "exif-orientation"
    for name in ("Landscape", "Portrait"):
        shown = [
            np.asarray(
                decode_pillow((folder / f"{name}_{i}.jpg").read_bytes(), POLICY).resize((60, 60))
            )
            for i in range(9)
        ]
        for i, image in enumerate(shown):
            difference = np.abs(image.astype(int) - shown[1]).mean()
            # The examples are numbered in the image; 0 is an invalid value and so not turned.
            assert difference < 6, (name, i)


# More than one frame


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GIF", {}),
        ("WEBP", {"lossless": True}),
        ("PNG", {}),
        ("PNG", {"default_image": True}),  # a still image and an animation
        ("TIFF", {}),
        ("MPO", {}),
    ],
)
def test_the_first_frame_of_several(kind: str, options: dict[str, bool]) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "lime", "blue")]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    expected = np.full((10, 20, 3), (255, 0, 0))
    said = pytest.warns(UserWarning, match="of 3 pages, of which the first")
    with said if kind == "TIFF" else nullcontext():
        np.testing.assert_allclose(pixels(data), expected, atol=2)


# Formats


@pytest.mark.parametrize("kind", slow_except([*FORMATS, "MPO"], "TIFF", "MPO"))
def test_every_allowed_format_decodes_first_thing_in_a_fresh_process(kind: str) -> None:
    """Pillow registers its plug-ins late; which came first must not matter, nor in which thread."""
    image = make_image(40, 30)
    options = {"save_all": True, "append_images": [image]} if kind == "MPO" else {}
    program = (
        "import sys; from concurrent.futures import ThreadPoolExecutor\n"
        "from featx.images import ImagePolicy\nfrom featx.images.decode import decode_pillow\n"
        "data = sys.stdin.buffer.read(); policy = ImagePolicy('apply', (0, 0, 0), 10**6)\n"
        "with ThreadPoolExecutor(8) as threads:\n"
        "    found = list(threads.map(lambda _: decode_pillow(data, policy).tobytes(), range(8)))\n"
        "assert len(set(found)) == 1\n"
        "sys.stdout.buffer.write(found[0])"
    )
    data = encode(image, kind, **options)
    done = subprocess.run(
        [sys.executable, "-c", program], input=data, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


@functools.cache
def refused_files() -> dict[str, bytes]:
    """Whole files of formats that Pillow knows and featx does not let in."""
    image = Image.new("RGB", (16, 16), "red")
    files = {}
    for kind in ("EPS", "PCX", "TGA", "ICO", "ICNS", "SGI", "JPEG2000", "DDS", "QOI"):
        files[kind] = encode(image, kind)
    header = struct.pack(">4sH6xHIIHH", b"8BPS", 1, 3, 16, 16, 8, 3)
    files["PSD"] = header + struct.pack(">III", 0, 0, 0) + b"\0\0" + bytes(3 * 256)
    cards = ["SIMPLE  =                    T", "BITPIX  =                    8"]
    cards += ["NAXIS   =                    2", "NAXIS1  =                   16"]
    cards += ["NAXIS2  =                   16", "END"]
    files["FITS"] = "".join(card.ljust(80) for card in cards).ljust(2880).encode() + bytes(2880)
    return files


@pytest.mark.parametrize(("kind", "data"), refused_files().items(), ids=refused_files())
def test_renamed_files_of_other_formats_never_reach_their_parsers(
    kind: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == kind  # Pillow on its own would take it
    reached = []
    for name in set(Image.OPEN) - set(FORMATS):
        _, accept = Image.OPEN[name]
        monkeypatch.setitem(Image.OPEN, name, (lambda *_, name=name: reached.append(name), accept))
    fault = fault_of(data)
    assert fault.status == Status.UNSUPPORTED
    assert reached == []


@pytest.mark.parametrize(
    "data",
    [
        b"just text, called photo.jpg\n",
        b"<!DOCTYPE html><html>404</html>",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7\n",
        b"RIFF\x24\0\0\0WAVEfmt ",
        b"PK\x03\x04",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        b"\0" * 4096,
    ],
)
def test_what_is_no_image_is_unsupported(data: bytes) -> None:
    fault = fault_of(data)
    assert fault.status == Status.UNSUPPORTED
    assert "not an image of a known format" in str(fault)


# Size


def huge_files() -> dict[str, bytes]:
    """A few bytes each that claim billions of pixels."""
    files = {}
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header)
    files["png"] = start + png_chunk(b"IDAT", zlib.compress(bytes(10**6))) + png_chunk(b"IEND", b"")
    side = struct.pack("<HH", 65_535, 65_535)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\x02\x02\x44\x01\0;"
    files["gif"] = b"GIF89a" + side + b"\x80\0\0" + bytes(6) + frame
    files["gif frame"] = b"GIF89a\x01\0\x01\0\x80\0\0" + bytes(6) + frame
    info = struct.pack("<IiiHHIIiiII", 40, 50_000, 50_000, 1, 24, 0, 0, 0, 0, 0, 0)
    files["bmp"] = b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info
    files["ppm"] = b"P6 99999 99999 255\n"
    tags = [(256, 4, 60_000), (257, 4, 60_000), (258, 3, 8), (259, 3, 1), (262, 3, 1)]
    tags += [(273, 4, 8), (277, 3, 1), (278, 4, 60_000), (279, 4, 8)]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    files["tiff"] = b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4)
    return files


def test_a_huge_image_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """Within 2 GB of address space, where decoding one would need ten."""
    for name, data in huge_files().items():
        (tmp_path / name).write_bytes(data)
    program = (
        "import pathlib, resource, sys, time; from featx.images import ImagePolicy\n"
        "from featx.images.decode import decode_pillow\n"
        "from featx.types import ImageFault\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "policy = ImagePolicy('apply', (0, 0, 0), 89478485)\n"
        "for path in pathlib.Path(sys.argv[1]).iterdir():\n"
        "    started_at = time.process_time()\n"
        "    try: decode_pillow(path.read_bytes(), policy)\n"
        "    except ImageFault as fault: status = fault.status.name\n"
        "    print(path.name, status, time.process_time() - started_at < 0.5, sep=',')"
    )
    done = run_python("-c", program, tmp_path)
    expected = {f"{name},TOO_LARGE,True" for name in huge_files()}
    assert set(done.stdout.splitlines()) == expected


def test_a_huge_webp_is_refused() -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    data = bytearray(encode(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
    at = data.index(b"VP8X") + 12
    data[at : at + 6] = struct.pack("<I", 16_382)[:3] * 2
    started_at = time.process_time()
    assert fault_of(bytes(data)).status == Status.TOO_LARGE
    assert time.process_time() - started_at < 0.5


def test_the_pixel_limit_is_exact() -> None:
    data = encode(make_image(30, 20), "PNG")
    assert pixels(data, ImagePolicy("apply", BACKGROUND, 600)).shape == (20, 30, 3)
    fault = fault_of(data, ImagePolicy("apply", BACKGROUND, 599))
    assert fault.status == Status.TOO_LARGE
    assert "30 x 20 pixels, over 599" in str(fault)


def test_pillows_own_limits_and_leniency_are_off_while_we_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever another library has set in this process; and theirs again afterwards."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = encode(make_image(30, 20), "JPEG")
    assert pixels(data).shape == (20, 30, 3)
    assert fault_of(data[: len(data) // 2]).status == Status.TRUNCATED
    assert Image.MAX_IMAGE_PIXELS == 10
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


# Damage


@functools.cache
def damaged_kinds() -> dict[str, bytes]:
    image = make_image(60, 50)
    grey, ink = image.convert("L"), image.convert("1")
    return {
        "jpeg": encode(image, "JPEG"),
        "jpeg-progressive": encode(image, "JPEG", progressive=True),
        "jpeg-cmyk": encode(image.convert("CMYK"), "JPEG"),
        "png": encode(grey, "PNG"),
        "webp": encode(image, "WEBP"),
        "webp-lossless": encode(grey, "WEBP", lossless=True),
        "gif": encode(grey, "GIF"),
        "bmp": encode(grey, "BMP"),
        "tiff": encode(grey, "TIFF"),
        "tiff-lzw": encode(grey, "TIFF", compression="tiff_lzw"),
        "tiff-zip": encode(grey, "TIFF", compression="tiff_adobe_deflate"),
        "tiff-fax": encode(ink, "TIFF", compression="group4"),
        "pgm": encode(grey, "PPM"),
        "pbm": encode(ink, "PPM"),
    }


@pytest.mark.parametrize("data", damaged_kinds().values(), ids=damaged_kinds())
def test_a_truncated_file_is_never_an_image(data: bytes) -> None:
    """Cut anywhere; only a checksum or end marker behind all pixels may be missing."""
    whole = pixels(data)
    statuses = set()
    for cut in sorted({*range(1, len(data), 17), *range(len(data) - 30, len(data))}):
        found = attempt(data[:cut])
        if isinstance(found, ImageFault):
            statuses.add(found.status)
            assert cut <= 40 or found.status in (Status.TRUNCATED, Status.DECODE_ERROR)
        else:
            assert np.array_equal(found, whole)
            assert len(data) - cut < 30
    assert statuses & {Status.TRUNCATED, Status.DECODE_ERROR}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "PPM"])
def test_half_a_file_is_called_truncated(kind: str) -> None:
    data = encode(make_image(60, 50), kind)
    assert fault_of(data[: len(data) // 2]).status == Status.TRUNCATED


def test_a_flipped_bit_in_a_png_never_changes_a_pixel() -> None:
    """Its checksums are there to be used, also on the pixels, where Pillow leaves them out."""
    image = make_image(24, 20)
    data = encode(image, "PNG")
    whole = pixels(data)
    rng = random.Random(0)
    num_faults = 0
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        try:
            assert np.array_equal(pixels(bytes(flipped)), whole), at
        except ImageFault:
            num_faults += 1
    assert num_faults > 0.97 * len(data)


@pytest.mark.parametrize("policy", [POLICY, IGNORE_EXIF])
def test_a_png_whose_writer_made_a_wrong_stream_is_no_image(policy: ImagePolicy) -> None:
    """Its checksums are right; Pillow raises once, and from then on has black lines."""
    stream = zlib.compress(bytes([0, 200]) * 9)
    for wrong in (stream[:-4] + b"wron", zlib.compress(bytes([9, 200]) * 9)):
        data = make_png(1, 9, 8, 0, []).replace(
            png_chunk(b"IDAT", zlib.compress(b"")), png_chunk(b"IDAT", wrong)
        )
        assert fault_of(data, policy).status == Status.DECODE_ERROR


@pytest.mark.parametrize(
    ("bits", "colour_type"), [(1, 0), (4, 0), (8, 0), (16, 0), (8, 2), (16, 2), (8, 4), (8, 6)]
)
def test_a_png_whose_stream_ends_before_its_last_row_is_no_image(
    bits: int, colour_type: int
) -> None:
    """Its checksums are right; Pillow leaves the other rows zero."""
    row_bytes = math.ceil(5 * bits * {0: 1, 2: 3, 4: 2, 6: 4}[colour_type] / 8)
    for byte in (b"\0", b"\xaa"):
        rows = [byte * row_bytes] * 9
        assert pixels(make_png(5, 9, bits, colour_type, rows)).shape == (9, 5, 3)
        short = make_png(5, 9, bits, colour_type, rows[:-1])
        assert fault_of(short).status == Status.TRUNCATED


@pytest.mark.parametrize("value", [0, 200])
def test_an_interlaced_png_that_ends_before_its_last_pass_is_no_image(value: int) -> None:
    # 2 x 3 pixels are in pass 1 (1 row of 1 pixel), 5 (1 of 1), 6 (2 of 1), and 7 (1 of 2).
    rows = [bytes([value] * count) for count in (1, 1, 1, 1, 2)]
    header, interlaced = (
        png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 3, 8, 0, 0, 0, is_interlaced))
        for is_interlaced in (0, 1)
    )
    whole, short = (
        make_png(2, 3, 8, 0, stored).replace(header, interlaced) for stored in (rows, rows[:-1])
    )
    assert pixels(whole)[..., 0].tolist() == [[value, value]] * 3
    assert fault_of(short).status == Status.TRUNCATED


def test_a_png_in_many_chunks() -> None:
    data = make_png(2, 2, 8, 0, [b"\1\2", b"\3\4"])
    at = data.index(b"IDAT") - 4
    packed = data[at + 8 : -16]
    pieces = b"".join(png_chunk(b"IDAT", bytes([byte])) for byte in packed)
    whole = data[:at] + pieces + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b"")
    assert pixels(whole)[..., 0].tolist() == [[1, 2], [3, 4]]
    last = whole.rindex(b"IDAT", 0, whole.rindex(b"IDAT"))
    broken = whole[: last + 5] + bytes([whole[last + 5] ^ 1]) + whole[last + 6 :]
    assert fault_of(broken).status == Status.DECODE_ERROR


# Scaled decoding of large JPEGs


def test_scaled_decoding_is_close_to_full_decoding() -> None:
    data = encode(make_image(900, 600), "JPEG", quality=92)
    full, scaled = decode_pillow(data, POLICY), decode_pillow(data, POLICY, at_least=128)
    assert scaled.size == (450, 300)
    small = [
        np.asarray(image.resize((192, 128), Image.Resampling.BILINEAR), float)
        for image in (full, scaled)
    ]
    difference = np.abs(small[0] - small[1])
    assert difference.mean() < 1
    assert difference.max() < 10


@pytest.mark.parametrize("width", [255, 400, 511, 512, 1023, 1024, 1025, 2049, 4200])
def test_scaled_decoding_leaves_twice_as_much_as_is_needed(width: int) -> None:
    data = encode(Image.new("RGB", (width, width + 100), "red"), "JPEG")
    scaled = decode_pillow(data, POLICY, at_least=128)
    assert min(scaled.size) >= min(width, 2 * 128)
    if width < 4 * 128:
        assert scaled.size == (width, width + 100)
    assert abs(scaled.width / scaled.height - width / (width + 100)) < 0.01


def test_scaled_decoding_respects_the_orientation() -> None:
    data = stored_with("JPEG", make_image(800, 400), 6)
    scaled = decode_pillow(data, POLICY, at_least=64)
    assert scaled.size == (200, 400)
    full = np.asarray(decode_pillow(data, POLICY).resize(scaled.size, Image.Resampling.BOX), int)
    assert np.abs(full - np.asarray(scaled)).mean() < 2


def test_scaled_decoding_does_not_hide_damage_or_size() -> None:
    data = encode(make_image(800, 600), "JPEG")
    for policy, cut, status in (
        (POLICY, len(data) // 2, Status.TRUNCATED),
        (ImagePolicy("apply", BACKGROUND, 479_999), len(data), Status.TOO_LARGE),
    ):
        with image_fault(status):
            decode_pillow(data[:cut], policy, at_least=32)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "BMP"])
def test_other_formats_are_decoded_at_full_size(kind: str) -> None:
    data = encode(Image.new("RGB", (640, 480), "red"), kind)
    assert decode_pillow(data, POLICY, at_least=16).size == (640, 480)


# The collection of odd images


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_odd_image_decodes_or_is_a_fault(shared_data: Path) -> None:
    folder = shared_data / "odd-images"
    rows = csv_rows(folder / "manifest.csv")
    assert len(rows) > 200
    for row in rows:
        data = (folder / row["file"]).read_bytes()
        corrupt = Path(row["file"]).name.startswith("x")
        if corrupt or row["pillow_13_0_0"] != "ok":
            assert fault_of(data).status in (Status.DECODE_ERROR, Status.UNSUPPORTED), row["file"]
        else:
            width, height = map(int, row["size"].split("x"))
            assert pixels(data, IGNORE_EXIF).shape == (height, width, 3), row["file"]


def png_suite(shared_data: Path, name: str) -> np.ndarray:
    path = shared_data / "odd-images" / "pngsuite" / f"{name}.png"
    return pixels(path.read_bytes()).astype(int)


@pytest.mark.parametrize("kind", ["0g01", "0g08", "0g16", "2c08", "2c16", "3p04", "4a16", "6a16"])
def test_interlaced_images_equal_plain_ones(shared_data: Path, kind: str) -> None:
    plain = png_suite(shared_data, f"basn{kind}")
    assert np.array_equal(png_suite(shared_data, f"basi{kind}"), plain)


@functools.cache
def jpeg_files() -> dict[str, bytes]:
    """JPEGs of every common making, all of them sound."""
    rng = np.random.default_rng(5)
    smooth = rng.normal(size=(12, 16, 3)).cumsum(0).cumsum(1)
    smooth = (255 * (smooth - smooth.min()) / np.ptp(smooth)).astype(np.uint8)
    image = Image.fromarray(smooth).resize((331, 217), Image.Resampling.BICUBIC)
    files = {
        f"quality {quality}, {sampling}": encode(
            image, "JPEG", quality=quality, subsampling=sampling
        )
        for quality in (30, 90, 100)
        for sampling in ("4:4:4", "4:2:2", "4:2:0")
    }
    files["progressive"] = encode(image, "JPEG", progressive=True)
    files["optimised"] = encode(image, "JPEG", optimize=True)
    files["restart markers"] = encode(image, "JPEG", restart_marker_rows=1)
    files["RGB inside"] = encode(image, "JPEG", keep_rgb=True)
    files["grey"] = encode(image.convert("L"), "JPEG")
    files["CMYK"] = encode(image.convert("CMYK"), "JPEG")
    files["one pixel"] = encode(image.crop((0, 0, 1, 1)), "JPEG")
    return files


@pytest.mark.parametrize("name", jpeg_files())
@pytest.mark.parametrize("at_least", [None, 20, 50])
def test_both_decoders_give_the_same_pixels(name: str, at_least: int | None) -> None:
    data = jpeg_files()[name]
    expected = np.asarray(decode_pillow(data, POLICY, at_least))
    quick = replace(POLICY, jpeg=SIMPLEJPEG)
    assert np.array_equal(decode_array(data, quick, at_least), expected)
    assert np.array_equal(decode_array(data, POLICY, at_least), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_both_decoders_turn_an_image_upright(orientation: int) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))
    data = stored_with("JPEG", image, orientation)
    for exif in ("apply", "ignore"):
        policy = ImagePolicy(exif, POLICY.background, POLICY.max_pixels, SIMPLEJPEG)
        expected = np.asarray(decode_pillow(data, policy))
        assert np.array_equal(decode_array(data, policy, None), expected)


def test_a_jpeg_that_is_not_sound_is_what_pillow_says_it_is() -> None:
    """Flipped, cut and lengthened files: the same pixels or the same fault, whoever decodes."""
    rng = np.random.default_rng(3)
    outcomes = set()
    for data in jpeg_files().values():
        for _ in range(12):
            mutant = bytearray(data)
            how = int(rng.integers(3))
            if how == 0:
                mutant[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            elif how == 1:
                del mutant[int(rng.integers(2, len(data))) :]
            else:
                mutant += rng.bytes(9)
            outcomes.add(same_outcome(bytes(mutant)))
    assert outcomes == {True, False}, "only sound ones, or none: the test proves nothing"


def same_outcome(data: bytes) -> bool:
    """Whether both decoders give an image, after having made sure that they agree."""
    found, expected = attempt(data, SIMPLEJPEG), attempt(data)
    if isinstance(expected, ImageFault):
        assert isinstance(found, ImageFault)
        assert (found.status, str(found)) == (expected.status, str(expected))
        return False
    assert np.array_equal(found, expected)
    return True
