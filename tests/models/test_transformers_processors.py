"""Image processors of transformers as preprocessing, against the processors themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_image, slow_except
from transformers_zoo import quiet, tf

from featx.errors import ModelError, WeightsError
from featx.models.transformers.processors import ProcessorChoice, processor_choice

SIZES = ((501, 225), (225, 301), (640, 427))
"""(width, height) of the images; after resizing, the margins of a crop are odd."""

PROVEN = {
    "BEiT": ("BeitImageProcessor", {}),
    "CLIP": ("CLIPImageProcessor", {}),
    "ConvNeXt 224": ("ConvNextImageProcessor", {"size": {"shortest_edge": 224}}),
    "ConvNeXt 384": ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
    "DINOv2": ("BitImageProcessor", {"size": {"shortest_edge": 256}}),
    "DINOv3": ("DINOv3ViTImageProcessor", {}),
    "DeiT": ("DeiTImageProcessor", {}),
    "LeViT": ("LevitImageProcessor", {}),
    "MobileNet": ("MobileNetV2ImageProcessor", {}),
    "MobileViT": ("MobileViTImageProcessor", {"size": {"shortest_edge": 288}}),
    "PVT": ("PvtImageProcessor", {}),
    "SegFormer": ("SegformerImageProcessor", {"size": {"height": 128, "width": 160}}),
    "SigLIP": ("SiglipImageProcessor", {}),
    "ViT": ("ViTImageProcessor", {}),
    "ViT, scaled to [-1, 1]": (
        "ViTImageProcessor",
        {"rescale_factor": 1 / 127.5, "image_mean": [1, 1, 1], "image_std": [1, 1, 1]},
    ),
}
"""What is saved -> class and options."""


def save(folder: Path, kind: str, **options: Any) -> Path:
    getattr(tf, kind)(**options).save_pretrained(folder)
    return folder


def opened(folder: Path, size: tuple[int, int] | None = None) -> ProcessorChoice:
    with quiet():
        return processor_choice(folder, size)


def processed(folder: Path, image: Any) -> torch.Tensor:
    """What the processor of the library makes of an image."""
    with quiet():
        processor = tf.AutoImageProcessor.from_pretrained(folder, backend="pil")
        return torch.as_tensor(processor(image, return_tensors="pt")["pixel_values"][0])


FAST = ("CLIP", "DINOv3", "MobileViT")


@pytest.mark.parametrize("name", slow_except(PROVEN, *FAST))
def test_a_proven_processor_is_followed_by_both_paths(name: str, tmp_path: Path) -> None:
    kind, options = PROVEN[name]
    choice = opened(save(tmp_path, kind, **options))
    preprocess = choice.preprocess
    assert choice.is_proven
    assert preprocess.has_fast_path
    assert choice.name == f"{kind}, {'torchvision' if kind.startswith('DINOv3') else 'pil'}"
    levels = 255 * torch.tensor(preprocess.std).view(3, 1, 1)
    for number, size in enumerate(SIZES):
        image = make_image(*size, seed=number)
        expected = processed(tmp_path, image)
        assert torch.equal(preprocess.reference(image), expected)
        fast = preprocess.normalise(preprocess.crop_uint8(np.array(image))[None])[0]
        assert fast.shape == expected.shape
        assert ((fast - expected) * levels).abs().max() <= 2.01
        shown = preprocess.as_uint8(expected).float()
        assert (shown - preprocess.crop_uint8(np.array(image)).float()).abs().max() <= 2


def test_the_offset_of_the_crop_is_cut(tmp_path: Path) -> None:
    """If it is rounded, as torchvision does, pixels at edges are those of their neighbours."""
    preprocess = opened(save(tmp_path, "CLIPImageProcessor")).preprocess
    image = make_image(299, 224, seed=1)  # a margin of 75 pixels
    expected = processed(tmp_path, image)
    rounded = replace(preprocess, offset="round").crop_uint8(np.array(image))
    cut = preprocess.crop_uint8(np.array(image))
    wanted = preprocess.as_uint8(expected).float()
    assert (cut.float() - wanted).abs().max() <= 2
    assert (rounded.float() - wanted).abs().max() > 20


@pytest.mark.parametrize("wrong", [{"offset": "round"}, {"interpolation": "bilinear"}])
def test_a_wrong_statement_is_not_proven(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from featx.models.transformers import processors

    right = processors.pillow_preprocess
    monkeypatch.setattr(
        processors, "pillow_preprocess", lambda **values: right(**{**values, **wrong})
    )
    assert not opened(save(tmp_path, "CLIPImageProcessor")).is_proven


def test_sizes_are_those_of_the_processors(tmp_path: Path) -> None:
    found = {}
    for name in ("ConvNeXt 224", "ConvNeXt 384", "DeiT", "LeViT", "MobileViT"):
        kind, options = PROVEN[name]
        made = opened(save(tmp_path / name, kind, **options)).preprocess
        found[name] = (made.resize, made.crop, made.channels)
    assert found == {
        "ConvNeXt 224": (256, (224, 224), "rgb"),
        "ConvNeXt 384": ((384, 384), (384, 384), "rgb"),
        "DeiT": ((256, 256), (224, 224), "rgb"),
        "LeViT": (256, (224, 224), "rgb"),
        "MobileViT": (288, (256, 256), "bgr"),
    }
    preprocess = opened(tmp_path / "MobileViT").preprocess
    assert (preprocess.mean, preprocess.std) == ((0, 0, 0), (1, 1, 1))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("EfficientNetImageProcessor", {"size": {"height": 64, "width": 64}}),
        ("PoolFormerImageProcessor", {}),
        ("DINOv3ViTImageProcessor", {"resample": 0}),  # nearest
        ("ViTImageProcessor", {"resample": 4}),  # box
        ("ViTImageProcessor", {"do_normalize": True, "do_resize": True, "resample": 5}),  # hamming
    ],
)
def test_what_cannot_be_stated_is_left_to_the_processor(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    choice = opened(save(tmp_path, kind, **options))
    assert not choice.is_proven
    assert not choice.preprocess.has_fast_path
    for size in SIZES:
        image = make_image(*size)
        assert torch.equal(choice.preprocess.reference(image), processed(tmp_path, image))


@pytest.mark.parametrize(
    ("kind", "size", "resize"),
    [
        ("ViTImageProcessor", (64, 96), (64, 96)),
        ("DeiTImageProcessor", (112, 112), (128, 128)),
        ("BitImageProcessor", (448, 448), 448),
        ("ConvNextImageProcessor", (112, 112), 128),
        ("DINOv3ViTImageProcessor", (512, 512), (512, 512)),
    ],
)
def test_another_input_size_keeps_the_share_of_the_image(
    kind: str, size: tuple[int, int], resize: Any, tmp_path: Path
) -> None:
    choice = opened(save(tmp_path, kind), size)
    assert choice.is_proven
    assert (choice.preprocess.crop, choice.preprocess.resize) == (size, resize)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ConvNextImageProcessor", {}),
        ("BlipImageProcessor", {"size": None, "do_resize": False}),
        ("BridgeTowerImageProcessor", {"size": {"shortest_edge": 40}}),
        # This class resizes, and ignores the crop.
        ("SegformerImageProcessor", {"do_center_crop": True, "crop_size": 32}),
    ],
)
def test_a_size_that_a_processor_cannot_make_is_refused(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, kind, **options)
    with pytest.raises(ModelError, match=r"takes no such size"):
        opened(tmp_path, (64, 96))


def test_options_that_make_no_sense_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, "DeiTImageProcessor", rescale_factor=0)
    with pytest.raises(WeightsError, match=r"has options that featx cannot read: float division"):
        opened(tmp_path)


def test_a_processor_of_images_of_any_size_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "CLIPImageProcessor", do_center_crop=False)
    with pytest.raises(ModelError, match=r"makes tensors .* of images of 225x301, 100x37 pixels"):
        opened(tmp_path)


def test_a_nested_processor_is_read_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    save(tmp_path, "ViTImageProcessor")
    plain = tmp_path / "preprocessor_config.json"
    options = json.loads(plain.read_text())
    plain.unlink()
    nested = tmp_path / "processor_config.json"
    nested.write_text(json.dumps({"processor_class": "P", "image_processor": options}))
    assert opened(tmp_path).preprocess.resize == (224, 224)
    nested.write_text(json.dumps({"image_processor": {"image_processor_type": "NoSuch"}}))
    with pytest.raises(WeightsError, match=r"the image processor of .* cannot be opened"):
        opened(tmp_path)
    nested.unlink()
    with pytest.raises(WeightsError, match=r"its preprocessing is unknown"):
        opened(tmp_path)
