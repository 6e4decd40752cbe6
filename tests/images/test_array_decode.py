"""Images that keep their numbers, against numpy and against each other."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from encoded_images import encode, make_png
from PIL import Image, ImageOps
from tiff_writer import Kind, write_tiff
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from featx.images import ImagePolicy, PixelFormatError, PixelScale, Preprocess
from featx.images.decode import decode_array
from featx.images.rgb_conversion import turn_array
from featx.types import ImageFault, Status

RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 65536, (13, 9), dtype=np.uint16)
ORIENTATION = 0x0112
BANDS = Kind(1, 16, photometric=1, extra=(0,))


def decoded(data: bytes, channels: int, exif: str = "apply", max_pixels: int = 10**6) -> Any:
    policy = ImagePolicy(exif, (255, 255, 255), max_pixels, channels=channels)
    return decode_array(data, policy, None)


def fault(data: bytes, channels: int, **policy: Any) -> ImageFault:
    with pytest.raises(ImageFault) as caught:
        decoded(data, channels, **policy)
    return caught.value


def npy(array: npt.NDArray[Any], **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["?", "u1", "<u2", ">u2", "i2", "<u4", "f2", "f4", ">f4", "f8"])
def test_files_of_numpy(dtype: str) -> None:
    array = RNG.uniform(0, 200, (7, 8, 5)).astype(dtype)
    for stored in (array, array.transpose(2, 0, 1), np.asfortranarray(array)):
        np.testing.assert_array_equal(decoded(npy(stored), 5), array)
    np.testing.assert_array_equal(decoded(npy(array[:, :, 0]), 1), array[:, :, :1])


def test_what_is_no_image_of_these_channels() -> None:
    for array, channels, message in (
        (np.zeros((7, 8, 5)), 3, r"shape \(7, 8, 5\); expected \(H, W, 3\) or \(3, H, W\)"),
        (np.zeros((3, 8, 3)), 3, "may come first or last"),
        (np.zeros((7, 8)), 3, "1 channel; expected 3"),
        (np.zeros((7, 0, 3)), 3, "has the shape"),
        (np.zeros((2, 7, 8, 3)), 3, "has the shape"),
        (np.zeros((7, 8), np.complex64), 1, "no array of plain numbers"),
        (np.zeros((7, 8), np.int64), 1, "int64; expected"),
        (np.array([[None]]), 1, "no array of plain numbers"),
    ):
        found = fault(npy(array, allow_pickle=True), channels)
        assert found.status == Status.UNSUPPORTED
        with pytest.raises(ImageFault, match=message):
            raise found
    assert fault(npy(np.zeros((7, 8, 5))), 3).error == PixelFormatError.__name__
    assert fault(npy(np.zeros((7, 8))), 1, max_pixels=55).status == Status.TOO_LARGE


def test_damaged_files_of_numpy() -> None:
    data = npy(DEEP)
    for cut in (7, 9, 40, 127, len(data) - 1):
        assert fault(data[:cut], 1).status == Status.TRUNCATED
    assert fault(data + b"\0", 1).status == Status.DECODE_ERROR
    claimed = data.replace(b"(13, 9), }     ", b"(130000, 9), } ")
    assert fault(claimed, 1, max_pixels=10**12).status == Status.TRUNCATED
    assert fault(data.replace(b"'<u2'", b"__i__"), 1).status == Status.UNSUPPORTED
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 0x55
        with contextlib.suppress(ImageFault):
            assert decoded(bytes(broken), 1).shape == (13, 9, 1)


def test_grey_of_16_bits_keeps_them() -> None:
    image = Image.fromarray(DEEP)
    pgm = b"P5\n9 13\n65535\n" + DEEP.astype(">u2").tobytes()
    options = {"PNG": {}, "TIFF": {}}
    files = [encode(image, kind, **more) for kind, more in options.items()]
    files += [encode(image, "TIFF", compression="tiff_lzw"), pgm]
    for data in files:
        found = decoded(data, 1)
        assert found.dtype.newbyteorder("<") == np.uint16
        np.testing.assert_array_equal(found[:, :, 0], DEEP)
        assert fault(data, 3).error == PixelFormatError.__name__


@pytest.mark.parametrize("compression", [None, "tiff_adobe_deflate"])
def test_grey_of_floats_keeps_them(compression: str | None) -> None:
    floats = RNG.standard_normal((13, 9)).astype(np.float32) * 1e4
    data = encode(Image.fromarray(floats), "TIFF", compression=compression)
    np.testing.assert_array_equal(decoded(data, 1)[:, :, 0], floats)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_of_16_bits_in_any_channels(channels: int) -> None:
    if channels > 1:
        pytest.importorskip("imagecodecs", reason="imagecodecs is not installed")
    pixels = RNG.integers(0, 65536, (13, 9, channels), dtype=np.uint16)
    rows = [row.tobytes() for row in pixels.astype(">u2")]
    data = make_png(9, 13, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], rows)
    np.testing.assert_array_equal(decoded(data, channels), pixels)
    assert fault(data[:-60], channels).status == Status.TRUNCATED
    short = fault(make_png(9, 14, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], rows), channels)
    assert short.status in (Status.TRUNCATED, Status.DECODE_ERROR)
    broken = bytearray(data)
    broken[len(data) // 2] ^= 1
    assert fault(bytes(broken), channels).status == Status.DECODE_ERROR


def test_images_of_8_bits() -> None:
    rgba = RNG.integers(0, 256, (13, 9, 4), dtype=np.uint8)
    np.testing.assert_array_equal(decoded(encode(Image.fromarray(rgba, "RGBA"), "PNG"), 4), rgba)
    rgb = Image.fromarray(rgba[:, :, :3])
    for kind in ("PNG", "BMP", "PPM", "TIFF"):
        np.testing.assert_array_equal(decoded(encode(rgb, kind), 3), rgba[:, :, :3])
    jpeg = encode(rgb, "JPEG")
    np.testing.assert_array_equal(decoded(jpeg, 3), np.asarray(Image.open(io.BytesIO(jpeg))))
    np.testing.assert_array_equal(
        decoded(encode(rgb.convert("L"), "PNG"), 1)[..., 0], rgb.convert("L")
    )


def test_decoders_that_would_change_numbers_are_not_used() -> None:
    rgb = Image.fromarray(RNG.integers(0, 256, (13, 9, 3), dtype=np.uint8))
    wide = b"P6\n9 13\n65535\n" + bytes(13 * 9 * 6)
    clear = encode(rgb, "PNG", transparency=(1, 2, 3))
    for data in (
        encode(rgb.quantize(16), "PNG"),
        encode(rgb, "GIF"),
        encode(rgb.convert("CMYK"), "TIFF"),
        encode(rgb, "AVIF"),
        wide,
        b"P5\n2 2\n100\n\0\1\2\3",
        clear,
    ):
        found = fault(data, 3)
        assert found.status == Status.UNSUPPORTED, str(found)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations_are_those_of_pillow(orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    grey = RNG.integers(0, 256, (13, 9), dtype=np.uint8)
    upright = np.asarray(
        ImageOps.exif_transpose(opened(encode(Image.fromarray(grey), "PNG", exif=exif)))
    )
    np.testing.assert_array_equal(turn_array(grey, orientation), upright)
    deep = Image.fromarray(DEEP)
    for data in (
        encode(deep, "PNG", exif=exif),
        encode(deep, "TIFF", tiffinfo={ORIENTATION: orientation}),
    ):
        np.testing.assert_array_equal(decoded(data, 1)[..., 0], turn_array(DEEP, orientation))
        np.testing.assert_array_equal(decoded(data, 1, exif="ignore")[..., 0], DEEP)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_what_rgb_cannot_read_names_the_option() -> None:
    policy = ImagePolicy("apply", (255, 255, 255), 10**6)
    for data, message in (
        (npy(np.zeros((5, 7, 8), np.float32)), r"array \(5, 7, 8\) of float32"),
        (write_tiff((np.zeros((7, 8, 5)), BANDS)), "TIFF of 5 channels of 16 bits"),
    ):
        with pytest.raises(ImageFault, match=message + ".*model.transform.scale") as caught:
            decode_array(data, policy, None)
        assert caught.value.error == PixelFormatError.__name__


def test_tiff_of_several_bands() -> None:
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    pixels = RNG.integers(0, 65536, (40, 33, 5), dtype=np.uint16)
    data = write_tiff((pixels, BANDS))
    np.testing.assert_array_equal(decoded(data, 5), pixels)
    outside = write_tiff((pixels, replace(BANDS, tags={273: (4, (1 << 20,) * 6)})))
    assert fault(outside, 5).status == Status.TRUNCATED
    planes = pixels.transpose(2, 0, 1)
    for array, options in (
        (pixels, {"planarconfig": "contig"}),
        (planes, {"planarconfig": "separate"}),
        (planes, {"planarconfig": "separate", "tile": (16, 16), "compression": "zlib"}),
        (pixels.astype(np.float32) / 7, {"planarconfig": "contig", "compression": "zlib"}),
        (pixels, {"planarconfig": "contig", "bigtiff": True, "byteorder": ">"}),
        (planes, {}),  # five pages
    ):
        file = io.BytesIO()
        with warnings.catch_warnings(action="ignore"):
            tifffile.imwrite(file, array, photometric="minisblack", **options)
        data = file.getvalue()
        expected = array if array.shape[-1] == 5 else array.transpose(1, 2, 0)
        np.testing.assert_array_equal(decoded(data, 5), expected)
        assert fault(data, 4).error == PixelFormatError.__name__
        assert fault(data, 5, max_pixels=1000).status == Status.TOO_LARGE


def test_what_needs_the_extra_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    found = fault(make_png(8, 7, 16, 2, [bytes(48)] * 7), 5)
    assert found.status == Status.UNSUPPORTED
    assert str(found).endswith('needs pip install "featx[channels]"')


def transform(scale: PixelScale, num: int, interpolation: str = "bilinear") -> Preprocess:
    mean, std = tuple(np.linspace(0.1, 0.6, num)), tuple(np.linspace(0.2, 0.9, num))
    return Preprocess(lambda image: None, (32, 40), 48, interpolation, mean, std, scale=scale)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(90, 70), (70, 90), (48, 60), (20, 300), (31, 31)])
def test_the_transform_is_that_of_torchvision(size: tuple[int, int], interpolation: str) -> None:
    image = RNG.integers(0, 65536, (*size, 5), dtype=np.uint16)
    found = transform(PixelScale(10000.0, 5), 5, interpolation).crop_array(image)
    x = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1) / 10000
    x = TF.resize(x, [48], InterpolationMode(interpolation), antialias=True)
    expected = TF.normalize(
        TF.center_crop(x, [32, 40]), list(np.linspace(0.1, 0.6, 5)), list(np.linspace(0.2, 0.9, 5))
    )
    assert torch.equal(found, expected)


def test_bands_and_the_divisor_of_a_dtype() -> None:
    image = RNG.integers(0, 65536, (50, 60, 4), dtype=np.uint16)
    found = transform(PixelScale(None, 4, (3, 0)), 2).crop_array(image)
    same = transform(PixelScale(65535.0, 2), 2).crop_array(image[:, :, [3, 0]])
    assert torch.equal(found, same)
    small = (image // 257).astype(np.uint8)
    found = transform(PixelScale(None, 4, (1,)), 1).crop_array(small)
    assert torch.equal(found, transform(PixelScale(255.0, 1), 1).crop_array(small[:, :, 1:2]))
    for dtype in (np.float32, np.int16, np.uint32):
        with pytest.raises(ImageFault, match="white is not known"):
            transform(PixelScale(None, 4), 4).crop_array(image.astype(dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_pixels_that_are_not_finite(bad: float) -> None:
    image = np.ones((50, 60, 2))
    image[3, 4, 1] = bad
    with pytest.raises(ImageFault, match="NaN or infinite"):
        transform(PixelScale(1.0, 2), 2).crop_array(image)
    unused = transform(PixelScale(1.0, 2, (0,)), 1).crop_array(image)
    assert torch.isfinite(unused).all(), "a band that the model does not get does not matter"


def test_the_scale_is_part_of_the_line_of_the_transform() -> None:
    lines = {
        transform(PixelScale(divisor, 4, bands), 2).describe()
        for divisor in (None, 255.0, 65535.0)
        for bands in ((0, 1), (1, 0))
    }
    assert len(lines) == 6
