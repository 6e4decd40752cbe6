"""AVIF and HEIC: decoded where their decoders are there, bound to a store, refused in words."""

from __future__ import annotations

import importlib.metadata
import io
import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from conftest import make_image
from encoded_images import encode
from PIL import AvifImagePlugin, Image
from test_decode import BACKGROUND, ORIENTATION, POLICY, fault_of
from tiny_model import extract

from featx.errors import ConfigError, StoreMismatchError
from featx.images import ImagePolicy, decode_pillow
from featx.images.decode import decode_array
from featx.images.decode_settings import heif_version
from featx.sources import FolderSource
from featx.types import Status


def avif(image: Image.Image, **options: Any) -> bytes:
    return encode(image, "AVIF", **{"quality": 95, "subsampling": "4:4:4", "speed": 9, **options})


def heic(*images: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    heif = pillow_heif.from_pillow(images[0])
    for image in images[1:]:
        heif.add_from_pillow(image)
    heif.save(file, **{"quality": 95, "chroma": 444, **options})
    return file.getvalue()


def pixels(data: bytes, policy: ImagePolicy = POLICY) -> np.ndarray:
    return decode_array(data, policy, None).astype(int)


WRITERS = {"avif": avif, "heic": heic}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_an_image_comes_back_as_it_was_within_the_loss(kind: str, mode: str) -> None:
    image = make_image(64, 48).convert(mode)
    found = pixels(WRITERS[kind](image))
    assert found.shape == (48, 64, 3)
    assert np.abs(found - np.asarray(image.convert("RGB"), int)).mean() < 3


@pytest.mark.parametrize("kind", WRITERS)
def test_transparency_lies_over_the_background(kind: str) -> None:
    image = Image.new("RGBA", (64, 64), (200, 100, 50, 255))
    image.paste((200, 100, 50, 0), (0, 0, 32, 64))
    found = pixels(WRITERS[kind](image))
    np.testing.assert_allclose(found[32, 8], BACKGROUND, atol=3)
    np.testing.assert_allclose(found[32, 56], (200, 100, 50), atol=3)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_first_frame_of_several(kind: str) -> None:
    red, blue = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (64, 64), "blue")
    data = heic(red, blue) if kind == "heic" else avif(red, save_all=True, append_images=[blue])
    np.testing.assert_allclose(pixels(data)[32, 32], (255, 0, 0), atol=3)


def test_the_orientation_of_an_avif_is_applied_or_ignored() -> None:
    image = make_image(64, 32)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    data = avif(image, exif=exif.tobytes())
    stored = pixels(data, replace(POLICY, exif="ignore"))
    assert stored.shape == (32, 64, 3)
    assert np.array_equal(pixels(data), np.rot90(stored, -1))
    assert np.abs(stored - np.asarray(image, int)).mean() < 3


@pytest.mark.parametrize("exif", ["apply", "ignore"])
def test_a_heic_is_upright_by_its_own_transformation(exif: str) -> None:
    """Its format turns the image; the EXIF orientation beside it is a copy, not a second turn."""
    image = make_image(64, 32)
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    data = heic(image, exif=turned.tobytes())
    found = pixels(data, replace(POLICY, exif=exif))
    upright = np.rot90(np.asarray(image, int), -1)
    assert found.shape == upright.shape
    assert np.abs(found - upright).mean() < 3


@pytest.mark.parametrize("bits", [10, 12])
@pytest.mark.parametrize("chroma", [444, 422, 420])
@pytest.mark.parametrize("mode", ["RGB;16", "RGBA;16", "L;16", "LA;16"])
def test_a_deep_heic_is_right_to_1_of_255(
    monkeypatch: pytest.MonkeyPatch, mode: str, chroma: int, bits: int
) -> None:
    monkeypatch.setattr(pillow_heif.options, "SAVE_HDR_TO_12_BIT", bits == 12)
    channels = len(mode.partition(";")[0])
    # Blocks of one colour, so that chroma of half the size loses nothing.
    blocks = np.random.default_rng(0).integers(0, 65_536, (3, 4, channels))
    numbers = blocks.repeat(16, axis=0).repeat(16, axis=1).astype(np.uint16)
    file = io.BytesIO()
    pillow_heif.from_bytes(mode, (64, 48), numbers.tobytes()).save(file, quality=-1, chroma=chroma)
    assert pillow_heif.open_heif(file.getvalue()).info["bit_depth"] == bits
    expected = (numbers if channels > 2 else numbers[:, :, [0, 0, 0, *range(1, channels)]]) / 257
    if channels in (2, 4):
        opaque = expected[:, :, 3:] / 255
        expected = expected[:, :, :3] * opaque + np.array(BACKGROUND) * (1 - opaque)
    assert np.abs(pixels(file.getvalue()) - expected).max() < 1


@pytest.mark.parametrize("kind", WRITERS)
def test_a_truncated_file_is_never_an_image(kind: str) -> None:
    data = WRITERS[kind](make_image(64, 48))
    for cut in sorted({*range(1, len(data), 61), len(data) - 1}):
        fault = fault_of(data[:cut])
        assert cut < 16 or fault.status in (Status.TRUNCATED, Status.DECODE_ERROR), (cut, fault)
    assert fault_of(data[:-20]).status == Status.TRUNCATED


@pytest.mark.parametrize("kind", WRITERS)
def test_the_pixel_limit_holds(kind: str) -> None:
    data = WRITERS[kind](make_image(64, 48))
    assert pixels(data, replace(POLICY, max_pixels=64 * 48)).shape == (48, 64, 3)
    fault = fault_of(data, replace(POLICY, max_pixels=64 * 48 - 1))
    assert fault.status == Status.TOO_LARGE


def test_a_heic_is_never_replaced_by_its_thumbnail() -> None:
    image = make_image(320, 240)
    data = heic(image, thumbnails=[120])
    assert pillow_heif.open_heif(data).info["thumbnails"]
    assert decode_array(data, POLICY, 32).shape == (240, 320, 3)


def test_the_container_may_have_a_brand_that_says_nothing() -> None:
    for write in (avif, heic):
        data = write(make_image(64, 48))
        other = data[:8] + b"mif1" + data[12:]
        assert np.array_equal(pixels(other), pixels(data))


def test_one_thread_an_avif_and_afterwards_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    load = AvifImagePlugin.AvifImageFile.load

    def recording(self: Any) -> Any:
        seen.append(AvifImagePlugin._get_default_max_threads())
        return load(self)

    monkeypatch.setattr(AvifImagePlugin, "DEFAULT_MAX_THREADS", 7)
    monkeypatch.setattr(AvifImagePlugin.AvifImageFile, "load", recording)
    decode_pillow(avif(make_image(32, 32)), POLICY)
    assert set(seen) == {1}
    assert AvifImagePlugin.DEFAULT_MAX_THREADS == 7


# Without the decoder


def without_heif(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_without_the_extra_the_failure_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = heic(make_image(32, 32))
    without_heif(monkeypatch)
    fault = fault_of(data)
    assert fault.status == Status.UNSUPPORTED
    assert 'pip install "featx[heif]"' in str(fault)


@pytest.mark.filterwarnings("ignore:image file could not be identified:UserWarning")  # Pillow's
def test_a_pillow_without_avif_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = avif(make_image(32, 32))
    monkeypatch.setattr(AvifImagePlugin, "SUPPORTED", False)
    fault = fault_of(data)
    assert fault.status == Status.UNSUPPORTED
    assert "AVIF needs a Pillow" in str(fault)


def test_a_folder_lists_them(tmp_path: Path) -> None:
    for name in ("a.AVIF", "b.heic", "c.HEIF", "d.hif", "e.avifs", "f.heics"):
        (tmp_path / name).touch()
    source = FolderSource(tmp_path)
    assert source.listing().keys.tolist() == [b"a.AVIF", b"b.heic", b"c.HEIF", b"d.hif", b"e.avifs"]


# What a store is bound to


KEYS = np.array([b"a.jpg", b"cat/b.HEIC"])


def test_a_new_store_with_such_a_name_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    version = pillow_heif.__version__
    assert heif_version(KEYS, None, new=True) == version
    assert heif_version(KEYS[::-1], None, new=True) == version
    assert heif_version(KEYS[:1], None, new=True) is None
    assert heif_version(KEYS, None, new=False) is None
    assert heif_version(KEYS, "0.1", new=False) == version
    without_heif(monkeypatch)
    assert heif_version(KEYS, None, new=True) is None
    with pytest.raises(ConfigError, match=r'pip install "featx\[heif\]"'):
        heif_version(KEYS, "0.1", new=False)


@pytest.mark.usefixtures("in_tmp_path")
def test_images_that_need_an_extra_are_counted_before_the_run(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    without_heif(monkeypatch)
    for name in ("y.HEIC", "z.heic"):
        (photos / name).write_bytes(b"HEIC by its name")
    extract(photos, pack=False, max_failures=5)
    said = capfd.readouterr().err
    counted = '2 images are HEIC, which needs pip install "featx[heif]"'
    assert 0 <= said.find(counted) < said.find("layer ")


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_a_store_resumes_with_its_version_or_says_so(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "z.heic").write_bytes(heic(make_image(64, 64)))
    assert extract(photos, pack=False).ok.all()
    manifest = json.loads(Path("store/featx.json").read_bytes())
    assert manifest["fingerprint"]["version.pillow_heif"] == pillow_heif.__version__
    assert manifest["resolved"]["heif"] == pillow_heif.__version__
    next(Path("store/parts").glob("part-*")).unlink()
    assert extract(photos, pack=False).ok.all()
    of_package = importlib.metadata.distribution
    other = types.SimpleNamespace(version="9.9")
    monkeypatch.setattr(
        "importlib.metadata.distribution",
        lambda name: other if name == "pillow_heif" else of_package(name),
    )
    with pytest.raises(StoreMismatchError, match=r"version\.pillow_heif: .* now '9\.9'"):
        extract(photos, pack=False)
