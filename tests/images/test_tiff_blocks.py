"""Boxes of large TIFFs: their pixels are those of the image that is decoded as a whole."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from featx.images import ImagePolicy, cut_out
from featx.images.decode import decode_image
from featx.images.tiff_blocks import TiffBlocks, tiff_blocks
from featx.types import Box, ImageFault, Status

tifffile = pytest.importorskip("tifffile")
pytest.importorskip("imagecodecs")

POLICY = ImagePolicy("apply", (10, 200, 30), 1 << 30)
HEIGHT, WIDTH = 301, 213

TILED: dict[str, dict[str, Any]] = {
    "raw": {"tile": (64, 48)},
    "deflate": {"tile": (48, 64), "compression": "zlib", "predictor": True},
    "lzw": {"tile": (32, 32), "compression": "lzw"},
    "packbits": {"tile": (64, 64), "compression": "packbits"},
    "jpeg": {"tile": (64, 64), "compression": "jpeg"},
    "jpeg of RGB": {"tile": (64, 64), "compression": "jpeg", "photometric": "rgb"},
    "big endian": {"tile": (64, 64), "compression": "zlib", "byteorder": ">"},
    "BigTIFF": {"tile": (64, 64), "compression": "zlib", "bigtiff": True},
}
STRIPED: dict[str, dict[str, Any]] = {
    "raw strips": {"rowsperstrip": 7},
    "strips": {"rowsperstrip": 16, "compression": "zlib"},
    "strips of one row": {"rowsperstrip": 1, "compression": "lzw", "predictor": True},
    "strips of JPEG": {"rowsperstrip": 16, "compression": "jpeg"},
}


def pixels(channels: int = 3, dtype: str = "uint8") -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(5)
    small = rng.integers(0, 256, (HEIGHT // 4 + 1, WIDTH // 4 + 1, channels))
    large = np.kron(small, np.ones((4, 4, 1), int))[:HEIGHT, :WIDTH]
    return (large + rng.integers(0, 9, large.shape)).clip(0, 255).astype(dtype)


def encoded(image: np.ndarray[Any, Any], **options: Any) -> bytes:
    file = io.BytesIO()
    options = {"photometric": "rgb" if image.shape[2] >= 3 else "minisblack", **options}
    if image.shape[2] > 3:
        options["extrasamples"] = ["unassalpha"]
    if image.shape[2] == 1:
        image = image[:, :, 0]
    if (
        options.get("compression") == "jpeg"
        and options["photometric"] == "rgb"
        and options.pop("ycbcr", True)
    ):
        options["photometric"] = "ycbcr"
    tifffile.imwrite(file, image, planarconfig="contig" if image.ndim == 3 else None, **options)
    return file.getvalue()


def blocks_of(data: bytes, policy: ImagePolicy = POLICY) -> TiffBlocks | None:
    return tiff_blocks(
        data, policy, lambda block: decode_image(block, policy, None), 0, (9000, 9000)
    )


def assert_all_boxes_agree(data: bytes, policy: ImagePolicy = POLICY) -> None:
    found = blocks_of(data, policy)
    assert found is not None
    expected = np.asarray(decode_image(data, policy, None))
    assert np.array_equal(found.whole(), expected)
    assert found.whole().dtype == expected.dtype
    rng = np.random.default_rng(1)
    for _ in range(20):
        x, y = int(rng.integers(WIDTH)), int(rng.integers(HEIGHT))
        box = Box(x, y, int(rng.integers(1, WIDTH - x + 1)), int(rng.integers(1, HEIGHT - y + 1)))
        assert np.array_equal(found.cut(box), cut_out(expected, box))


@pytest.mark.parametrize("name", [*TILED, *STRIPED])
def test_boxes_are_those_of_the_whole_image(name: str) -> None:
    assert_all_boxes_agree(encoded(pixels(), **{**TILED, **STRIPED}[name]))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "LA"])
@pytest.mark.parametrize("layout", [{"tile": (64, 64)}, {"rowsperstrip": 8}])
def test_other_modes(mode: str, layout: dict[str, Any]) -> None:
    image = Image.fromarray(pixels(4), "RGBA").convert("RGB" if mode == "P" else "RGBA")
    image = (
        image.convert("RGB").convert(mode) if mode in ("P", "CMYK", "L") else image.convert(mode)
    )
    file = io.BytesIO()
    if "rowsperstrip" in layout:
        image.save(file, "TIFF", compression="tiff_lzw", strip_size=WIDTH * 8)
    elif mode in ("P", "LA"):
        pytest.skip("tifffile writes no such tiles")
    else:
        kind = {"CMYK": "separated", "L": "minisblack", "RGBA": "rgb"}[mode]
        extra = {"extrasamples": ["unassalpha"]} if mode == "RGBA" else {}
        tifffile.imwrite(
            file, np.asarray(image), photometric=kind, compression="zlib", **layout, **extra
        )
    assert_all_boxes_agree(file.getvalue())


@pytest.mark.parametrize(("channels", "dtype"), [(1, "uint16"), (5, "float32"), (3, "uint8")])
@pytest.mark.parametrize("layout", [{"tile": (64, 64)}, {"rowsperstrip": 8}])
def test_numbers_as_they_are(channels: int, dtype: str, layout: dict[str, Any]) -> None:
    policy = replace(POLICY, channels=channels)
    image = pixels(channels).astype(dtype) * 3
    file = io.BytesIO()
    if channels == 5:
        layout = {**layout, "photometric": "minisblack", "planarconfig": "contig"}
    tifffile.imwrite(file, image[:, :, 0] if channels == 1 else image, compression="zlib", **layout)
    assert_all_boxes_agree(file.getvalue(), policy)


def with_tag(data: bytes, tag: int, value: int) -> bytes:
    file = io.BytesIO(data)
    with tifffile.TiffFile(file, mode="r+b") as tiff:
        tiff.pages[0].tags[tag].overwrite(value)
    return file.getvalue()


def test_images_that_are_no_sum_of_their_blocks_are_decoded_as_a_whole() -> None:
    tiled = {"tile": (64, 64)}
    turned = encoded(pixels(), **tiled, extratags=[(274, "H", 1, 6, True)])
    floats = encoded(pixels(1, "float32") / 255, **tiled)
    xmp = encoded(
        pixels(), **tiled, extratags=[(700, "B", 30, b"<tiff:Orientation>6</tiff:...>", True)]
    )
    planes = io.BytesIO()
    tifffile.imwrite(
        planes, pixels().transpose(2, 0, 1), photometric="rgb", planarconfig="separate", **tiled
    )
    one_strip = encoded(pixels(), rowsperstrip=HEIGHT, compression="zlib")
    sound = encoded(pixels(), compression="zlib", **tiled)
    for data in (turned, floats, xmp, planes.getvalue(), one_strip, sound[:-200], sound[:100]):
        assert blocks_of(data) is None
    assert blocks_of(sound) is not None
    assert blocks_of(sound, replace(POLICY, max_pixels=HEIGHT * WIDTH - 1)) is None
    assert tiff_blocks(sound, POLICY, lambda block: decode_image(block, POLICY, None)) is None
    several = io.BytesIO()
    tifffile.imwrite(
        several, pixels(1).transpose(2, 0, 1).repeat(5, 0), photometric="minisblack", **tiled
    )
    assert blocks_of(several.getvalue(), replace(POLICY, channels=5)) is None


def test_a_damaged_tile_fails_its_boxes_only() -> None:
    data = encoded(pixels(), tile=(64, 64), compression="zlib")
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        at = file.pages[0].dataoffsets[0]
    damaged = data[:at] + bytes(50) + data[at + 50 :]
    found = blocks_of(damaged)
    assert found is not None
    for _ in range(2):
        with pytest.raises(ImageFault):
            found.cut(Box(60, 60, 10, 10))
    expected = np.asarray(decode_image(data, POLICY, None))
    box = Box(64, 10, 100, 100)
    assert np.array_equal(found.cut(box), cut_out(expected, box))
    with pytest.raises(ImageFault, match=f"outside the image of {WIDTH} x {HEIGHT}") as raised:
        found.cut(Box(WIDTH - 5, 0, 6, 5))
    assert raised.value.status == Status.TRANSFORM_ERROR


SOUND = encoded(pixels(), tile=(64, 64), compression="lzw")


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 400), value=st.integers(0, 255), tail=st.booleans())
def test_a_damaged_header_raises_no_other_error(at: int, value: int, tail: bool) -> None:
    """A wrong byte gives the pixels of the whole image, a fault, or the usual decoder."""
    place = len(SOUND) - 1 - at if tail else at
    data = SOUND[:place] + bytes([value]) + SOUND[place + 1 :]
    found = blocks_of(data, replace(POLICY, max_pixels=1 << 22))
    if found is None:
        return
    try:
        expected = np.asarray(decode_image(data, replace(POLICY, max_pixels=1 << 22), None))
    except ImageFault:
        return
    try:
        whole = found.whole()
    except ImageFault:
        return
    assert np.array_equal(whole, expected)
