"""Pixels as bytes for the decoder: the same image, whatever the mode."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from featx.config import DataConfig
from featx.images import ImagePolicy, decode_pillow
from featx.images.rgb_conversion import to_rgb
from featx.sources.pixel_encoding import encode_array, encode_image, encode_pixels

WHITE = ImagePolicy.from_config(DataConfig(background="tomato"))


def pixels_of(data: bytes, policy: ImagePolicy = WHITE) -> np.ndarray:
    return np.asarray(decode_pillow(data, policy))


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3))))
def test_any_pixels_come_back(pixels: np.ndarray) -> None:
    np.testing.assert_array_equal(pixels_of(encode_pixels(pixels)), pixels)
    grey = np.repeat(pixels[..., :1], 3, axis=2)
    for one_channel in (pixels[..., 0], pixels[..., :1]):
        np.testing.assert_array_equal(pixels_of(encode_pixels(one_channel)), grey)


def test_arrays_of_other_layouts() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 8, 3), dtype=np.uint8)
    np.testing.assert_array_equal(pixels_of(encode_array(pixels.transpose(2, 0, 1))), pixels)
    np.testing.assert_array_equal(pixels_of(encode_array(pixels[:, ::-1])), pixels[:, ::-1])
    clear = np.dstack([pixels, np.zeros((7, 8), np.uint8)])
    assert (pixels_of(encode_array(clear)) == (255, 99, 71)).all()
    for wrong in (pixels[0, 0], pixels[:0], pixels[:, :, 0] * 1j, np.array([["a"]])):
        with pytest.raises(ValueError, match=r"pixels are|expected numbers"):
            encode_array(wrong)


@pytest.mark.parametrize("shape", [(3, 8, 3), (3, 8, 1), (1, 8, 3), (3, 8, 4), (1, 8, 4)])
def test_an_array_whose_channels_may_come_first_or_last_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="may come first or last; give a Pillow image"):
        encode_array(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("dtype", ["uint8", ">u2", "int16", "float32", "float64"])
def test_other_numbers_and_channels_become_a_file_of_numpy(dtype: str) -> None:
    values = np.random.default_rng(0).uniform(0, 200, (7, 8, 5)).astype(dtype)
    for array in (values, values.transpose(2, 0, 1), values[::2, ::-1]):
        found = np.load(io.BytesIO(encode_array(array)), allow_pickle=False)
        np.testing.assert_array_equal(found, array)
    assert encode_array(values) == encode_array(values.copy(order="F"))
    assert encode_array(values) == encode_array(values.astype(values.dtype.newbyteorder("<")))


def rgba_image() -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (12, 10, 4), dtype=np.uint8), "RGBA")


MODES = {
    "1": rgba_image().convert("1"),
    "L": rgba_image().convert("L"),
    "LA": rgba_image().convert("LA"),
    "P": rgba_image().convert("RGB").quantize(16),
    "PA": rgba_image().convert("RGB").quantize(16).convert("PA"),
    "RGB": rgba_image().convert("RGB"),
    "RGBA": rgba_image(),
    "RGBa": rgba_image().convert("RGBa"),
    "CMYK": rgba_image().convert("RGB").convert("CMYK"),
    "YCbCr": rgba_image().convert("RGB").convert("YCbCr"),
    "HSV": rgba_image().convert("RGB").convert("HSV"),
    "I;16": Image.fromarray(np.arange(120, dtype=np.uint16).reshape(12, 10) * 546),
    "I;16B": Image.frombytes("I;16B", (10, 12), (np.arange(120) * 546).astype(">u2").tobytes()),
    "I": Image.fromarray(np.arange(120, dtype=np.int32).reshape(12, 10) * 546),
    "F": Image.fromarray(np.linspace(0, 1, 120, dtype=np.float32).reshape(12, 10)),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_pillow_is_what_the_decoder_would_have_made_of_it(mode: str) -> None:
    image = MODES[mode]
    assert image.mode == mode
    # Of whole numbers and floats in Pillow images nobody knows which is white.
    policy = replace(WHITE, white={"I": 65535.0, "F": 1.0}.get(mode))
    expected = np.asarray(to_rgb(image, WHITE.background, policy.white))
    np.testing.assert_array_equal(pixels_of(encode_image(image), policy), expected)


def test_a_transparent_colour_travels_along() -> None:
    image = Image.new("RGB", (4, 4), "lime")
    image.info["transparency"] = (0, 255, 0)
    assert (pixels_of(encode_image(image)) == (255, 99, 71)).all()
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 0, 255, 0, 0, 0, 255])
    palette.info["transparency"] = 1
    assert (pixels_of(encode_image(palette)) == (255, 99, 71)).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "F", "CMYK"])
def test_the_orientation_travels_along(mode: str) -> None:
    image = MODES[mode].copy()
    policy = replace(WHITE, white=1.0 if mode == "F" else None)
    upright = pixels_of(encode_image(image), policy)
    image.getexif()[0x0112] = 6
    turned = pixels_of(encode_image(image), policy)
    np.testing.assert_array_equal(turned, np.rot90(upright, -1))
    ignored = replace(policy, exif="ignore")
    np.testing.assert_array_equal(pixels_of(encode_image(image), ignored), upright)
