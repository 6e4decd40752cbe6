"""Label maps against Pillow's nearest neighbour, exact fractions and the decoder of images."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_image
from encoded_images import encode, make_png
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import functional as TF

from featx.images import (
    ImagePolicy,
    LabelTransform,
    Preprocess,
    decode_pillow,
    image_sizes,
    read_label_map,
)
from featx.types import ImageFault, Status

POLICY = ImagePolicy("apply", (255, 255, 255), 1 << 24)
SIZES = [(64, 64), (33, 57), (201, 47), (32, 32), (31, 90), (500, 375), (1, 9), (97, 96)]


def described(**changes: Any) -> str:
    """The text that a store keeps of a transform."""
    values = {"resize": 35, "crop": (32, 32), "interpolation": "bicubic", "offset": "round"}
    mean = std = (0.5, 0.5, 0.5)
    made: dict[str, Any] = {**values, **changes}
    return Preprocess(lambda image: torch.zeros(3), mean=mean, std=std, **made).describe()


def colours(height: int, width: int) -> np.ndarray:
    """(H, W) class numbers, 12 of them, none like its neighbours."""
    return np.random.default_rng(height + width).integers(0, 12, (height, width), dtype=np.uint8)


@pytest.mark.parametrize(
    ("resize", "offset"),
    # Processors of transformers, which round down, never pad.
    [
        *((resize, "round") for resize in (35, 32, 41, 17, (37, 44))),
        *((resize, "floor") for resize in (35, 32, 41, (37, 44))),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_every_pixel_is_that_of_the_image_with_nearest(
    size: tuple[int, int], resize: int | tuple[int, int], offset: str
) -> None:
    labels = colours(*size)
    transform = LabelTransform.of_description(described(resize=resize, offset=offset))
    assert transform is not None
    found = transform.on_crop(read_label_map(encode(Image.fromarray(labels), "PNG"), 1 << 20), size)
    # The image has a colour for each class, and goes the way of the libraries, with nearest.
    palette = np.arange(36, dtype=np.uint8).reshape(12, 3) + 1
    image = Image.fromarray(palette[labels])
    if isinstance(resize, int):
        short = min(size)
        new = tuple(int(resize * side / short) for side in size)
    else:
        new = resize
    resized = image.resize(new[::-1], Image.Resampling.NEAREST)
    # A centre on the edge of two pixels is rounded up here, and either way by Pillow's floats.
    ties = [(2 * np.arange(n) + 1) * old % (2 * n) == 0 for n, old in zip(new, size, strict=True)]
    tied = Image.fromarray(ties[0][:, None] | ties[1])
    if offset == "round":
        pixels, tie = (np.array(TF.center_crop(each, [32, 32])) for each in (resized, tied))
    else:
        top, left = (side - 32 for side in new)
        pixels, tie = (
            np.array(each)[top // 2 :, left // 2 :][:32, :32] for each in (resized, tied)
        )
    outside = pixels.sum(2) == 0
    assert np.array_equal(found == -1, outside)
    compared = ~outside & ~tie
    assert np.array_equal(palette[found][compared], pixels[compared])


@given(st.tuples(st.integers(1, 400), st.integers(1, 400)), st.integers(8, 90), st.integers(8, 40))
@settings(max_examples=60)
def test_pixels_are_those_whose_interval_has_the_centre(
    size: tuple[int, int], resize: int, crop: int
) -> None:
    if resize * max(size) // min(size) > 3000:
        return
    transform = LabelTransform.of_description(described(resize=resize, crop=(crop, crop)))
    assert transform is not None
    places = np.arange(size[0] * size[1], dtype=np.int64).reshape(size)
    found = transform.on_crop(places, size)
    new = [max(1, resize * side // min(size)) for side in size]
    for y, x in ((0, 0), (crop // 2, crop // 3), (crop - 1, crop - 1), (1, crop - 2)):
        source = []
        for at, old, side in zip((y, x), size, new, strict=True):
            if side < crop:
                at -= (crop - side) // 2
            else:
                at += round((side - crop) / 2)
            inside = 0 <= at < side
            source.append(math.floor((at + Fraction(1, 2)) * old / side) if inside else None)
        expected = -1 if None in source else places[source[0], source[1]]
        assert found[y, x] == expected


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("exif", ["apply", "ignore"])
def test_sizes_are_those_of_the_decoded_image(kind: str, turn: int, exif: str) -> None:
    image, tags = make_image(61, 40, seed=turn), Image.Exif()
    tags[0x0112] = turn
    data = encode(image, kind, exif=tags)
    policy = ImagePolicy(exif, POLICY.background, POLICY.max_pixels)
    width, height = decode_pillow(data, policy).size
    assert image_sizes(data, policy, 32) == ((height, width), (height, width))


@pytest.mark.parametrize("size", [(1021, 515), (130, 257), (128, 128), (2049, 260)])
@pytest.mark.parametrize("turn", [1, 6])
def test_sizes_of_far_larger_jpegs_are_those_of_their_fraction(
    size: tuple[int, int], turn: int
) -> None:
    tags = Image.Exif()
    tags[0x0112] = turn
    data = encode(make_image(*size, seed=1), "JPEG", exif=tags)
    full, decoded = image_sizes(data, POLICY, 32)
    assert full == decode_pillow(data, POLICY).size[::-1]
    assert decoded == decode_pillow(data, POLICY, 32).size[::-1] != full
    with pytest.raises(ImageFault):
        image_sizes(data[:20], POLICY, 32)


def test_transforms_without_a_fast_path_are_none() -> None:
    assert LabelTransform.of_description(described(resize=None)) is None
    assert LabelTransform.of_description(described(interpolation="lanczos")) is None
    assert LabelTransform.of_description("") is None
    assert LabelTransform.of_description(described(resize=(40, 50), crop=(32, 48))) == (
        LabelTransform((40, 50), (32, 48), "round")
    )


def test_masks_are_palettes_or_grey_values_as_they_are() -> None:
    labels = colours(9, 12)
    palette = Image.new("P", (12, 9))
    palette.putpalette(list(range(48)))
    palette.putdata(labels.ravel().tolist())
    wide = labels.astype(np.uint16) * 1000
    for image, expected in (
        (palette, labels),
        (Image.fromarray(labels), labels),
        (Image.fromarray(wide), wide),
    ):
        found = read_label_map(encode(image, "PNG"), 1 << 20)
        assert np.array_equal(found, expected)


def test_other_masks_are_refused_with_the_reason() -> None:
    grey = Image.fromarray(colours(9, 12))
    tags = Image.Exif()
    tags[0x0112] = 6

    def reason(data: bytes, max_pixels: int = 1 << 20) -> tuple[Status, str]:
        with pytest.raises(ImageFault) as caught:
            read_label_map(data, max_pixels)
        return caught.value.status, str(caught.value)

    assert "mode RGB; expected a palette" in reason(encode(grey.convert("RGB"), "PNG"))[1]
    assert "mode 1; expected" in reason(encode(grey.convert("1"), "PNG"))[1]
    assert "EXIF orientation" in reason(encode(grey, "PNG", exif=tags))[1]
    assert reason(encode(grey, "PNG"), 100)[0] == Status.TOO_LARGE
    data = bytearray(encode(grey, "PNG"))
    data[data.index(b"IDAT") + 8] ^= 1
    assert reason(bytes(data))[0] == Status.DECODE_ERROR
    assert reason(make_png(2, 2, 8, 0, [b"\1\2"]))[0] == Status.TRUNCATED
    assert reason(b"no image")[0] == Status.DECODE_ERROR
    assert reason(encode(grey, "JPEG"))[0] == Status.DECODE_ERROR
    # Four bits a pixel: Pillow stretches 0..15 to 0..255.
    assert "less than 8 bits" in reason(make_png(8, 1, 4, 0, [b"\x01\x23\x45\x67"]))[1]
