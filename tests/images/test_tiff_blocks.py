"""Boxes of large TIFFs: their pixels are those of the image that is decoded as a whole."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_faults import image_fault

from featx.images import ImagePolicy, cut_view
from featx.images.decode import decode_image
from featx.images.tiff_blocks import TiffBlocks, tiff_blocks
from featx.types import Box, ImageFault, Status, View

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


def opened(data: bytes, policy: ImagePolicy = POLICY) -> TiffBlocks | np.ndarray[Any, Any] | None:
    return tiff_blocks(data, policy, 0)


def box_of(found: TiffBlocks | np.ndarray[Any, Any] | None, box: Box) -> np.ndarray[Any, Any]:
    assert found is not None
    return np.asarray(cut_view(found, View(box)))


def assert_all_boxes_agree(data: bytes, policy: ImagePolicy = POLICY) -> None:
    found = opened(data, policy)
    expected = np.asarray(decode_image(data, policy, None))
    rng = np.random.default_rng(1)
    for _ in range(20):
        x, y = int(rng.integers(WIDTH)), int(rng.integers(HEIGHT))
        box = Box(x, y, int(rng.integers(1, WIDTH - x + 1)), int(rng.integers(1, HEIGHT - y + 1)))
        cut = box_of(found, box)
        assert np.array_equal(cut, box_of(expected, box))
        assert cut.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=")


@pytest.mark.parametrize("name", [*TILED, *STRIPED])
def test_boxes_are_those_of_the_whole_image(name: str) -> None:
    data = encoded(pixels(), **{**TILED, **STRIPED}[name])
    assert isinstance(opened(data), TiffBlocks) == (name in TILED)
    assert_all_boxes_agree(data)


@pytest.mark.parametrize("layout", [{"tile": (64, 64)}, {"rowsperstrip": 8}])
@pytest.mark.parametrize("compression", [None, "zlib", "jpeg"])
def test_grey_becomes_rgb(layout: dict[str, Any], compression: str | None) -> None:
    data = encoded(pixels(1), compression=compression, **layout)
    if compression == "jpeg" and "tile" not in layout:
        assert opened(data) is None
    else:
        assert_all_boxes_agree(data)


def test_an_image_without_compression_is_not_copied() -> None:
    found = opened(encoded(pixels(), rowsperstrip=7))
    assert isinstance(found, np.ndarray)
    assert not found.flags.owndata
    assert not found.flags.writeable


@pytest.mark.parametrize(("channels", "dtype"), [(1, "uint16"), (5, "float32"), (3, "uint8")])
@pytest.mark.parametrize("layout", [{"tile": (64, 64)}, {"rowsperstrip": 8}])
@pytest.mark.parametrize("options", [{"compression": "zlib"}, {"byteorder": ">"}])
def test_numbers_as_they_are(
    channels: int, dtype: str, layout: dict[str, Any], options: dict[str, Any]
) -> None:
    policy = replace(POLICY, channels=channels)
    image = pixels(channels).astype(dtype) * 3
    file = io.BytesIO()
    if channels == 5:
        layout = {**layout, "photometric": "minisblack", "planarconfig": "contig"}
    tifffile.imwrite(file, image[:, :, 0] if channels == 1 else image, **layout, **options)
    assert_all_boxes_agree(file.getvalue(), policy)


def test_images_that_are_no_sum_of_their_tiles_are_decoded_as_a_whole() -> None:
    tiled = {"tile": (64, 64)}
    turned = encoded(pixels(), **tiled, extratags=[(274, "H", 1, 6, True)])
    floats = encoded(pixels(1, "float32") / 255, **tiled)
    alpha = encoded(pixels(4), **tiled)
    inverted = encoded(pixels(1), photometric="miniswhite", **tiled)
    xmp = encoded(
        pixels(), **tiled, extratags=[(700, "B", 30, b"<tiff:Orientation>6</tiff:...>", True)]
    )
    planes = io.BytesIO()
    tifffile.imwrite(
        planes, pixels().transpose(2, 0, 1), photometric="rgb", planarconfig="separate", **tiled
    )
    sound = encoded(pixels(), compression="zlib", **tiled)
    for data in (turned, floats, alpha, inverted, xmp, planes.getvalue(), sound[:100]):
        assert opened(data) is None
    assert isinstance(opened(sound), TiffBlocks)
    assert opened(sound, replace(POLICY, max_pixels=HEIGHT * WIDTH - 1)) is None
    assert tiff_blocks(sound, POLICY) is None
    several = io.BytesIO()
    tifffile.imwrite(
        several, pixels(1).transpose(2, 0, 1).repeat(5, 0), photometric="minisblack", **tiled
    )
    assert opened(several.getvalue(), replace(POLICY, channels=5)) is None


@pytest.mark.parametrize("compression", ["zlib", "jpeg"])
def test_a_cut_file_has_no_tiles(compression: str) -> None:
    data = encoded(pixels(), tile=(64, 64), compression=compression)
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        last = max(file.pages[0].dataoffsets)
    if last < len(data) - 3000:
        pytest.skip("the tags come after the tiles")
    with image_fault(Status.TRUNCATED):
        opened(data[: last + 3])


def test_a_tile_that_is_a_damaged_or_larger_jpeg_is_refused() -> None:
    data = encoded(pixels(), tile=(64, 64), compression="jpeg")
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        at, count = file.pages[0].dataoffsets[0], file.pages[0].databytecounts[0]
    cut = data[: at + count // 2] + bytes(count - count // 2 - 2) + b"\xff\xd9" + data[at + count :]
    frame = data.index(b"\xff\xc0", at) + 5
    larger = data[:frame] + (6400).to_bytes(2) + data[frame + 2 :]
    for damaged, words in ((cut, "orrupt|remature"), (larger, "another size")):
        assert len(damaged) == len(data)
        found = opened(damaged)
        with pytest.raises(ImageFault, match=words):
            box_of(found, Box(0, 0, 10, 10))
        assert np.array_equal(
            box_of(found, Box(70, 70, 20, 20)), box_of(opened(data), Box(70, 70, 20, 20))
        )


def test_a_damaged_tile_fails_its_boxes_only() -> None:
    data = encoded(pixels(), tile=(64, 64), compression="zlib")
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        at = file.pages[0].dataoffsets[0]
    damaged = data[:at] + bytes(50) + data[at + 50 :]
    found = opened(damaged)
    assert isinstance(found, TiffBlocks)
    for _ in range(2):
        with pytest.raises(ImageFault):
            found.cut(Box(60, 60, 10, 10))
    expected = np.asarray(decode_image(data, POLICY, None))
    box = Box(64, 10, 100, 100)
    assert np.array_equal(found.cut(box), box_of(expected, box))
    with pytest.raises(ImageFault, match=f"outside the image of {WIDTH} x {HEIGHT}") as raised:
        box_of(found, Box(WIDTH - 5, 0, 6, 5))
    assert raised.value.status == Status.TRANSFORM_ERROR


SOUND = encoded(pixels(), tile=(64, 64), compression="lzw")


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 400), value=st.integers(0, 255), tail=st.booleans())
def test_a_damaged_header_raises_no_other_error(at: int, value: int, tail: bool) -> None:
    """A wrong byte gives the pixels of the whole image, a fault, or the usual decoder."""
    place = len(SOUND) - 1 - at if tail else at
    data = SOUND[:place] + bytes([value]) + SOUND[place + 1 :]
    policy = replace(POLICY, max_pixels=1 << 22)
    try:
        found = opened(data, policy)
        expected = np.asarray(decode_image(data, policy, None))
        if found is None:
            return
        cut = box_of(found, Box(0, 0, expected.shape[1], expected.shape[0]))
    except (ImageFault, tifffile.TiffFileError, TypeError, ValueError, LookupError):
        return  # `decode_box_image` makes faults of all errors
    assert np.array_equal(cut, expected)
