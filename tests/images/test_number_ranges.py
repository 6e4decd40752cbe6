"""Formats besides TIFF: numbers of every depth are right to 1 of 255, or refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from image_faults import image_fault

from featx.images import ImagePolicy
from featx.images.decode import decode_array
from featx.types import ImageFault, Status

imagecodecs = pytest.importorskip("imagecodecs")

POLICY = ImagePolicy("apply", (255, 255, 255), 10**6)
Y, X = np.mgrid[:40, :64]
SHARES = np.stack([X / 63, Y / 39, (X + Y) / 102], axis=-1)
"""(H, W, 3) in [0, 1], different in every channel."""


def numbers_of(bits: int) -> npt.NDArray[Any]:
    return np.rint(SHARES * (2**bits - 1)).astype(np.uint8 if bits == 8 else np.uint16)


def assert_right(data: bytes, shares: npt.NDArray[Any], policy: ImagePolicy = POLICY) -> None:
    found = decode_array(data, policy, None).astype(float)
    assert np.abs(found - np.broadcast_to(shares * 255, found.shape)).max() <= 1


@pytest.mark.parametrize("bits", [8, 10, 12])
def test_avif(bits: int) -> None:
    data = imagecodecs.avif_encode(numbers_of(bits), level=100, bitspersample=bits)
    assert_right(data, SHARES)


@pytest.mark.parametrize("largest", [1, 15, 100, 255, 256, 1023, 4095, 65535])
@pytest.mark.parametrize("channels", [1, 3])
def test_pgm_and_ppm(largest: int, channels: int) -> None:
    numbers = np.rint(SHARES[..., :channels] * largest).astype(">u2" if largest > 255 else "u1")
    raw = f"P{5 if channels == 1 else 6}\n64 40\n{largest}\n".encode() + numbers.tobytes()
    text = " ".join(map(str, numbers.ravel().tolist()))
    plain = f"P{2 if channels == 1 else 3}\n64 40\n{largest}\n{text}\n".encode()
    for data in (raw, plain):
        assert_right(data, numbers / largest)


@pytest.mark.parametrize("order", ["<", ">"])
def test_pfm(order: str) -> None:
    head = f"Pf\n64 40\n{-1 if order == '<' else 1}\n".encode()
    data = head + SHARES[::-1, :, 0].astype(f"{order}f4").tobytes()
    with pytest.raises(ImageFault, match=r"white is not stated: data\.white=1"):
        decode_array(data, POLICY, None)
    assert_right(data, SHARES[..., :1], replace(POLICY, white=1.0))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("codec", "name"), [("jpeg2k", "JPEG 2000"), ("jpegxl", "JPEG XL"), ("exr", "OpenEXR")]
)
def test_formats_that_are_not_read(codec: str, name: str, bits: int) -> None:
    if codec == "exr":
        data = b"v/1\x01\x02" + bytes(99)
    else:
        data = getattr(imagecodecs, f"{codec}_encode")(numbers_of(bits))
    with image_fault(Status.UNSUPPORTED, f"{name} is not read; "):
        decode_array(data, POLICY, None)
