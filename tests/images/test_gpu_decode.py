"""Images decoded on the device: crops and failures of the CPU, whatever else is in the batch.

torchvision decodes with libjpeg where the device is the CPU, so all but nvJPEG itself is tried
here; the tests with CUDA are marked.
"""

from __future__ import annotations

import io
import json
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_image
from made_store import dataset_digests
from PIL import Image, ImageOps

import featx
from featx.errors import ConfigError, RunError
from featx.images import DecodeSettings, ImagePolicy, Loader, Preprocess, check_device, gpu_decode
from featx.images import gpu_decode_share as sharing
from featx.images.decode import MAX_GPU_PIXELS, EncodedJpeg, decode_array, prepare_jpeg
from featx.images.decode_settings import SHARES
from featx.images.gpu_decode import DeviceDecoder
from featx.images.gpu_decode_share import balanced_share, decode_share
from featx.images.image_policy import SIMPLEJPEG
from featx.images.orientation import turn_tensor
from featx.types import Batch, Failure, Listing, Part, Status

pytestmark = pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding capabilities of TorchVision:DeprecationWarning"
)

CPU = torch.device("cpu")
POLICY = ImagePolicy("apply", (255, 255, 255), 10**7, SIMPLEJPEG)
SIDE = 64
PREPROCESS = Preprocess(
    lambda image: torch.zeros(3, SIDE, SIDE), (SIDE, SIDE), 72, "bicubic", (0, 0, 0), (1, 1, 1)
)
ORIENTATION = 0x0112


def jpeg(image: Image.Image, orientation: int = 1, **options: Any) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    image.save(file, "JPEG", **{"quality": 90, "exif": exif, **options})
    return file.getvalue()


def encoded_image(seed: int, orientation: int = 1, **options: Any) -> bytes:
    return jpeg(make_image(120 + 3 * seed, 140 - 2 * seed, seed), orientation, **options)


def encoded(data: bytes) -> EncodedJpeg:
    found = prepare_jpeg(data, POLICY, 72)
    assert found is not None
    return found


def on_cpu(data: bytes) -> torch.Tensor:
    return PREPROCESS.crop_uint8(decode_array(data, POLICY, 72))


def crops(*images: bytes) -> list[torch.Tensor | None]:
    return DeviceDecoder(PREPROCESS, CPU).crops([encoded(data) for data in images])


def near(crop: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return crop is not None and int((crop.int() - expected.int()).abs().max()) <= 2


class EncodedImages:
    """Encoded images by their number."""

    def __init__(self, images: list[bytes]) -> None:
        self.images = images

    def listing(self) -> Listing:
        keys = np.array([b"%06d" % i for i in range(len(self.images))], dtype=np.bytes_)
        return Listing(keys, np.full(len(keys), -1, dtype=np.int64))

    def read(self, key: bytes) -> bytes:
        return self.images[int(key)]


def loaded(images: list[bytes], share: int | None, batch_size: int = 4) -> list[Batch]:
    source = EncodedImages(images)
    decoding = DecodeSettings(PREPROCESS, POLICY, device_share=share)
    with Loader(source, source.listing(), decoding, batch_size, CPU) as loader:
        return [batch for _, batch in loader.batches([Part(0, 0, len(images))])]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_pillow_turns_them(orientation: int) -> None:
    image = Image.open(io.BytesIO(encoded_image(3, orientation)))
    expected = np.array(ImageOps.exif_transpose(image))
    stored = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    assert np.array_equal(turn_tensor(stored, orientation)[0].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"subsampling": 0},
        {"subsampling": 1},
        {"progressive": True},
        {"quality": 20},
        *({"orientation": turn} for turn in range(2, 9)),
    ],
)
def test_a_device_gives_the_crops_of_the_cpu(options: dict[str, Any]) -> None:
    data = encoded_image(5, **options)
    assert near(crops(data)[0], on_cpu(data))


def test_a_crop_does_not_depend_on_what_is_decoded_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [encoded_image(seed % 5, orientation=1 + 5 * (seed % 2)) for seed in range(20)]
    alone = [crops(data)[0] for data in images]
    together = crops(*images)
    monkeypatch.setattr(gpu_decode, "MAX_PIXELS", 40_000)
    few = crops(*images)
    for one, two, three in zip(alone, together, few, strict=True):
        assert one is not None
        assert torch.equal(one, two) if two is not None else False
        assert torch.equal(one, three) if three is not None else False


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        encoded_image(1)[:2000],
        encoded_image(1).replace(b"\xff\xda", b"\xff\xd9", 1),
        jpeg(make_image(100, 100).convert("L")),
        jpeg(make_image(100, 100).convert("CMYK")),
        jpeg(make_image(7, 90)),
        jpeg(make_image(300, 290)),
    ],
    ids=["empty", "text", "truncated", "without pixels", "grey", "CMYK", "thin", "far larger"],
)
def test_what_a_device_may_misread_is_not_for_it(data: bytes) -> None:
    assert prepare_jpeg(data, POLICY, 72) is None


def test_large_images_are_not_for_a_device() -> None:
    width = MAX_GPU_PIXELS // 200 + 1
    assert prepare_jpeg(jpeg(Image.new("RGB", (width, 200))), POLICY, 72) is None
    assert prepare_jpeg(jpeg(Image.new("RGB", (width - 1, 200))), POLICY, 72) is not None


def test_pngs_are_not_for_a_device() -> None:
    file = io.BytesIO()
    make_image(100, 100).save(file, "PNG")
    assert prepare_jpeg(file.getvalue(), POLICY, 72) is None


def misread(data: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """A decoder that takes the colours of some images for others."""
    right = REAL_DECODE(data, device)
    return [x.flip(0) if len(encoded) % 2 else x for encoded, x in zip(data, right, strict=True)]


REAL_DECODE = gpu_decode.decode_jpegs


def astray(data: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """A decoder that goes astray in a corner of each image."""
    images = REAL_DECODE(data, device)
    for x in images:
        x[:, -24:, :24] = 255 - x[:, -24:, :24]
    return list(images)


def smaller(data: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [x[:, :-1] for x in REAL_DECODE(data, device)]


def test_an_image_that_a_device_misreads_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [encoded_image(seed) for seed in range(12)]
    odd = [len(data) % 2 == 1 for data in images]
    assert any(odd)
    assert not all(odd)
    monkeypatch.setattr(gpu_decode, "decode_jpegs", misread)
    assert [crop is None for crop in crops(*images)] == odd
    for wrong in (astray, smaller):
        monkeypatch.setattr(gpu_decode, "decode_jpegs", wrong)
        assert crops(*images) == [None] * len(images)


def test_a_jpeg_of_red_green_and_blue_as_they_are_is_decoded_right() -> None:
    """Its colours are not YCbCr, which its Adobe marker says; decoders have missed it."""
    data = jpeg(make_image(130, 120, 4), keep_rgb=True)
    crop = crops(data)[0]
    assert crop is None or near(crop, on_cpu(data))


def test_an_image_that_a_device_refuses_does_not_keep_others_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = [encoded_image(seed) for seed in range(9)]
    refused = {len(images[2]), len(images[7])}

    def choosy(data: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        if any(len(one) in refused for one in data):
            raise RuntimeError("Error while decoding JPEG images: nvjpegDecode failed: 2")
        return list(REAL_DECODE(data, device))

    monkeypatch.setattr(gpu_decode, "decode_jpegs", choosy)
    assert [crop is None for crop in crops(*images)] == [i in (2, 7) for i in range(9)]


def test_a_device_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: Exception) -> Any:
        def decode(*arguments: Any) -> Any:
            raise error

        return decode

    monkeypatch.setattr(gpu_decode, "decode_jpegs", failing(torch.OutOfMemoryError("full")))
    with pytest.raises(RunError, match="out of memory on cpu while decoding 1 images on it"):
        loaded([encoded_image(0)], SHARES)
    broken = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(gpu_decode, "decode_jpegs", failing(broken))
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        loaded([encoded_image(0)], SHARES)


@pytest.mark.parametrize("status", [2, 3, 4, 9])
def test_what_nvjpeg_says_of_an_image_sends_it_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    assert nvjpeg_says(monkeypatch, f"Failed to decode batch: {status}") == [None]


@pytest.mark.parametrize(
    "text",
    [
        "Failed to decode jpeg stream: 5",  # its memory
        "Failed to decode batch: 6",
        "Failed to create device buffer: 2",
        "API call failed at image.cpp, line 3",
        "cudaEventRecord failed: 2",
    ],
)
def test_what_nvjpeg_says_of_itself_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Else memory that is short for a moment would decide by whom an image is decoded."""
    with pytest.raises(RunError, match=r"cuda:0 cannot decode JPEGs: Error .* decode=fast"):
        nvjpeg_says(monkeypatch, text)


def nvjpeg_says(monkeypatch: pytest.MonkeyPatch, text: str) -> list[torch.Tensor | None]:
    """What becomes of an image of which nvJPEG says so."""

    def says(*arguments: Any) -> Any:
        raise RuntimeError(f"Error while decoding JPEG images: {text}")

    monkeypatch.setattr(gpu_decode, "decode_jpegs", says)
    decoder = DeviceDecoder(PREPROCESS, CPU)
    decoder.device = torch.device("cuda", 0)
    return decoder.crops([encoded(encoded_image(0))])


def odd_images() -> list[bytes]:
    """Good and bad ones in turn; of the bad each kind."""
    good = [encoded_image(seed, orientation=1 + seed % 8) for seed in range(24)]
    bad = [b"", b"no image", good[3][:1500], good[4][:500] + bytes(40) + good[4][540:]]
    png = io.BytesIO()
    make_image(100, 90).save(png, "PNG")
    return [*good[:5], *bad, png.getvalue(), *good[5:], jpeg(make_image(90, 99).convert("L"))]


def test_rows_and_failures_are_those_of_the_cpu() -> None:
    images = odd_images()
    here, there = loaded(images, None), loaded(images, SHARES)
    assert [batch.failures for batch in there] == [batch.failures for batch in here]
    assert sum(len(batch.failures) for batch in here) >= 3
    for one, other in zip(here, there, strict=True):
        assert (one.start, one.count) == (other.start, other.count)
        assert all(near(a, b) for a, b in zip(other.images, one.images, strict=True))


def test_rows_and_failures_are_those_of_the_cpu_where_nothing_is_understood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the CPU decodes all of them, to its own bits; none is read from its disk again."""
    images = odd_images()
    here = loaded(images, None)
    monkeypatch.setattr(gpu_decode, "decode_jpegs", smaller)
    read: list[bytes] = []

    def recording(self: EncodedImages, key: bytes) -> bytes:
        read.append(key)
        return self.images[int(key)]

    monkeypatch.setattr(EncodedImages, "read", recording)
    there = loaded(images, SHARES)
    assert len(read) == len(set(read)) == len(images)
    assert [batch.failures for batch in there] == [batch.failures for batch in here]
    assert all(torch.equal(a.images, b.images) for a, b in zip(there, here, strict=True))


def test_odd_images_of_the_shared_data_have_the_verdicts_of_the_cpu(shared_data: Path) -> None:
    files = sorted((shared_data / "odd-images").rglob("*.jp*g"))
    images = [file.read_bytes() for file in files]
    assert len(images) > 20
    here, there = loaded(images, None), loaded(images, SHARES)
    for one, other in zip(here, there, strict=True):
        assert one.failures == other.failures
        assert all(near(a, b) for a, b in zip(other.images, one.images, strict=True))


def test_single_rows_are_decoded_by_the_cpu_and_are_never_left_encoded() -> None:
    images = [encoded_image(seed) for seed in range(3)]
    source = EncodedImages([*images, b"no image"])
    decoding = DecodeSettings(PREPROCESS, POLICY, device_share=SHARES)
    with Loader(source, source.listing(), decoding, 4, CPU) as loader:
        results, each = list(loader.results(range(4))), list(loader.each(range(4)))
    assert isinstance(results.pop(), Failure)
    assert each.pop() is None
    for found in (results, each):
        assert all(
            isinstance(image, torch.Tensor) and torch.equal(image, on_cpu(data))
            for image, data in zip(found, images, strict=True)
        )


def test_a_loader_that_is_left_early_ends_at_once() -> None:
    source = EncodedImages([encoded_image(seed % 4) for seed in range(200)])
    decoding = DecodeSettings(PREPROCESS, POLICY, device_share=SHARES)
    started_at = time.monotonic()
    with Loader(source, source.listing(), decoding, 4, CPU) as loader:
        next(loader.batches([Part(0, 0, 200)]))
    assert time.monotonic() - started_at < 4
    assert not [t for t in threading.enumerate() if t.name.startswith("featx-on-device")]


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.slow), 5, 16])
def test_the_key_decides_who_decodes(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [encoded_image(seed % 4) for seed in range(128)]
    keys = EncodedImages(images).listing().keys
    decoding = DecodeSettings(PREPROCESS, POLICY, device_share=share)
    expected = sum(decoding.is_for_device(key) for key in keys)
    decoded: list[int] = []

    def counted(data: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        decoded.append(len(data))
        return list(REAL_DECODE(data, device))

    monkeypatch.setattr(gpu_decode, "decode_jpegs", counted)
    loaded(images, share, batch_size=16)
    assert sum(decoded) == expected
    assert abs(expected / 128 - share / SHARES) < 0.1


def test_both_are_done_together() -> None:
    # 16 CPUs that decode 12,000 a second and check 36,000, beside a device that decodes 8,000.
    share = balanced_share(1 / 12000, 1 / 36000, 1 / 8000) / SHARES
    there, here = share / 8000, share / 36000 + (1 - share) / 12000
    assert there == pytest.approx(here, rel=0.1)
    assert balanced_share(1.0, 0.3, 1e-9) == SHARES  # even all of them are done before the checks
    assert balanced_share(1e-6, 1e-7, 1.0) == 1
    assert balanced_share(1.0, 5.0, 0.1) == SHARES


def test_the_share_is_measured_on_images_of_the_data_set() -> None:
    source = EncodedImages(odd_images())
    decoding = DecodeSettings(PREPROCESS, POLICY)
    share, why = decode_share(source, source.listing(), decoding, CPU)
    assert 1 <= share <= SHARES
    assert f"{share} of 16 JPEGs on cpu" in why
    none = EncodedImages([b"no image"])
    assert decode_share(none, none.listing(), decoding, CPU)[0] == SHARES


def test_decoding_on_a_gpu_needs_one(tmp_path: Path) -> None:
    source = EncodedImages([])
    check_device("gpu", source, torch.device("cuda", 0))
    check_device("fast", source, CPU)
    with pytest.raises(ConfigError, match="decode=gpu: device=cpu"):
        featx.extract(data="sample", decode="gpu", device="cpu", out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_regions_are_cut_on_the_cpu(photo_folder: Path, tmp_path: Path) -> None:
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("path,x,y,width,height\n000.jpg,0,0,64,48\n")
    data = {"name": "folder", "root": str(photo_folder), "boxes": str(boxes)}
    with pytest.raises(ConfigError, match=r"data.boxes .* on the CPU\. Use decode=fast"):
        featx.extract(data=data, decode="gpu", out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_transform_of_the_library_alone_is_refused() -> None:
    preprocess = Preprocess(PREPROCESS.reference, (8, 8), None, "lanczos", (0, 0, 0), (1, 1, 1))
    source = EncodedImages([encoded_image(0)])
    config: Any = types.SimpleNamespace(decode="gpu", data=None)
    with pytest.raises(ConfigError, match=r"decode=gpu: only the library .* Use decode=fast"):
        DecodeSettings.of_run(config, preprocess, source.listing(), None)  # type: ignore[arg-type]


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Keys of a run that decodes on the device, which is the CPU here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sharing, "check_device", lambda decode, source, device: None)
    photos = tmp_path / "photos"
    photos.mkdir()
    for i, data in enumerate(odd_images()):
        (photos / f"{i:03d}.jpg").write_bytes(data)
    return {
        "model": {"name": "resnet18", "weights": None},
        "data": photos,
        "decode": "gpu",
        "device": "cpu",
        "precision": "fp32",
        "dtype": "float32",
        "batch_size": 4,
        "part_rows": 8,
        "max_failures": 10,
        "layers": ["layer2", "avgpool"],
    }


@pytest.mark.slow
def test_a_run_keeps_its_share(cpu_as_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume decides nothing anew, and gives the bits of a run that was never stopped."""
    monkeypatch.setattr(sharing, "balanced_share", lambda *seconds: 9)
    whole = featx.extract(**cpu_as_gpu, out="whole", pack=False)
    for part in sorted(Path("whole/parts").iterdir())[1:3]:
        part.unlink()
    monkeypatch.setattr(sharing, "balanced_share", lambda *seconds: 3)
    again = featx.extract(**cpu_as_gpu, out="whole")
    once = featx.extract(**{**cpu_as_gpu, "decode": "fast"}, out="fast")
    monkeypatch.setattr(sharing, "balanced_share", lambda *seconds: 9)
    anew = featx.extract(**cpu_as_gpu, out="anew")
    described = json.loads(Path("whole/featx.json").read_bytes())
    assert described["resolved"]["gpu_share"] == 9
    assert dataset_digests(Path("whole/features.h5")) == dataset_digests(Path("anew/features.h5"))
    assert np.array_equal(again.status, once.status)
    ok = again.status == Status.OK
    a, b = (store["avgpool"][:][ok].astype(np.float64) for store in (again, once))
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert cosines.min() > 0.999
    assert whole is not None
    assert anew is not None


@pytest.mark.gpu
def test_nvjpeg_gives_the_crops_of_the_cpu() -> None:
    images = odd_images()
    source = EncodedImages(images)
    decoding = DecodeSettings(PREPROCESS, POLICY, device_share=SHARES)
    with Loader(source, source.listing(), decoding, 8, torch.device("cuda", 0)) as loader:
        there = [batch for _, batch in loader.batches([Part(0, 0, len(images))])]
    here = loaded(images, None, batch_size=8)
    for one, other in zip(here, there, strict=True):
        assert other.images.is_cuda
        assert one.failures == other.failures
        assert (other.images.cpu().int() - one.images.int()).abs().float().mean() < 2


@pytest.mark.gpu
def test_a_run_on_cuda_decodes_there(photo_folder: Path, tmp_path: Path) -> None:
    keys = {"model": {"name": "resnet18", "weights": None}, "data": photo_folder, "seed": 3}
    keys |= {"layers": ["avgpool"], "precision": "fp32", "dtype": "float32", "device": "cuda"}
    fast, gpu, again = (
        featx.extract(**keys, decode=decode, out=tmp_path / name)["avgpool"][:].reshape(21, -1)
        for name, decode in (("fast", "fast"), ("gpu", "gpu"), ("again", "gpu"))
    )
    cosines = (fast * gpu).sum(1) / np.linalg.norm(fast, axis=1) / np.linalg.norm(gpu, axis=1)
    assert cosines.min() > 0.999
    assert again.shape == gpu.shape
