"""The fast path against the libraries' own transforms, which are the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from conftest import make_image, slow_except
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import models
from torchvision.transforms import functional as TF

from featx.errors import ModelError
from featx.images import Preprocess, centre_crop, check_reference
from featx.models.libraries import timm as timm_library
from featx.models.libraries import torchvision as torchvision_library

TORCHVISION = [
    models.ResNet50_Weights.IMAGENET1K_V1,  # bilinear, 256 -> 224
    models.ResNet50_Weights.IMAGENET1K_V2,  # bilinear, 232 -> 224
    models.Inception_V3_Weights.DEFAULT,  # bilinear, 342 -> 299
    models.EfficientNet_B0_Weights.DEFAULT,  # bicubic, 256 -> 224
    models.Swin_V2_T_Weights.DEFAULT,  # bicubic, 260 -> 256
    models.ViT_B_16_Weights.IMAGENET1K_SWAG_LINEAR_V1,  # bicubic, 224 -> 224
    models.segmentation.FCN_ResNet50_Weights.DEFAULT,  # bilinear, 520, no crop of its own
]
TIMM = [
    "tf_efficientnet_lite0",  # bicubic, 256 -> 224
    "resnet18.a1_in1k",  # bicubic, 0.95
    "vit_small_patch14_dinov2.lvd142m",  # bicubic, 518, no margin
    "vit_tiny_patch16_224",  # mean and std 0.5
    "mobilenetv3_large_100",
    "inception_v3.tv_in1k",
]
SQUASHED = [
    "coat_lite_medium_384.in1k",  # bicubic, 384 of 384
    "dm_nfnet_f1.dm_in1k",  # bicubic, 224 of 246
    "vit_5b_patch16_sapiens2.fb",  # not square
]
SIZES = [
    (320, 240),
    (257, 331),
    (500, 333),
    (224, 224),
    (50, 60),  # smaller than the crop
    (223, 225),
    (1, 1),
    (1, 9),
    (9, 1),
    (700, 30),
]


def timm_preprocess(name: str) -> Preprocess:
    """As for a built model, without building it."""
    if (cfg := timm.get_pretrained_cfg(name)) is None:
        pytest.skip(f"timm {timm.__version__} has no {name}")
    module = torch.nn.Identity()
    module.pretrained_cfg = cfg.to_dict()
    return timm_library.preprocess_of(module)


PREPROCESSES = {
    **{str(w): torchvision_library.preprocess_of(w.transforms(), str(w)) for w in TORCHVISION},
    **{name: timm_preprocess(name) for name in TIMM},
}


def in_grey_levels(preprocess: Preprocess, normalised: torch.Tensor) -> torch.Tensor:
    """(3, H, W) as the backbone sees it -> values in [0, 255]."""
    std = torch.tensor(preprocess.std).view(3, 1, 1)
    mean = torch.tensor(preprocess.mean).view(3, 1, 1)
    return (normalised * std + mean) * 255


def fast(preprocess: Preprocess, image: Image.Image) -> torch.Tensor:
    return preprocess.normalise(preprocess.crop_uint8(np.array(image))[None])[0]


@pytest.mark.parametrize("name", slow_except(PREPROCESSES, *list(PREPROCESSES)[::3]))
def test_the_fast_path_is_within_two_grey_levels(name: str) -> None:
    preprocess = PREPROCESSES[name]
    assert preprocess.has_fast_path
    for i, (width, height) in enumerate(SIZES):
        image = make_image(width, height, seed=i)
        expected = in_grey_levels(preprocess, preprocess.reference(image))
        found = in_grey_levels(preprocess, fast(preprocess, image))
        assert found.shape == expected.shape == (3, *preprocess.crop)
        difference = (found - expected).abs()
        assert difference.max() <= 2.01, (width, height)
        assert difference.mean() <= 0.5, (width, height)


@pytest.mark.parametrize("preprocess", PREPROCESSES.values(), ids=PREPROCESSES)
def test_hard_edges_do_not_overflow(preprocess: Preprocess) -> None:
    """Bicubic weights are negative in places: 255 must not become 0, nor 0 become 255."""
    board = (np.indices((300, 380)).sum(0) // 3 % 2 * 255).astype(np.uint8)
    image = Image.fromarray(board).convert("RGB")
    expected = in_grey_levels(preprocess, preprocess.reference(image))
    difference = (in_grey_levels(preprocess, fast(preprocess, image)) - expected).abs()
    assert difference.max() <= 2.01


def test_channels_and_axes_keep_their_places() -> None:
    """Left half red, lower right corner blue."""
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[:, :128, 0] = 255
    pixels[192:, 192:, 2] = 255
    preprocess = Preprocess(None, (224, 224), 256, "bilinear", (0, 0, 0), (1, 1, 1))
    x = preprocess.crop_uint8(pixels)
    assert x.dtype == torch.uint8
    assert x[:, 100, 10].tolist() == [255, 0, 0]
    assert x[:, 100, 200].tolist() == [0, 0, 0]
    assert x[:, 210, 200].tolist() == [0, 0, 255]
    assert x[:, 10, 200].tolist() == [0, 0, 0]


def test_an_image_of_the_right_size_is_not_resampled() -> None:
    image = make_image(256, 320)
    preprocess = Preprocess(None, (224, 224), 256, "bicubic", (0, 0, 0), (1, 1, 1))
    expected = np.asarray(image)[48 : 48 + 224, 16 : 16 + 224].transpose(2, 0, 1)
    assert np.array_equal(preprocess.crop_uint8(np.array(image)).numpy(), expected)


def test_a_crop_that_is_not_square() -> None:
    preprocess = Preprocess(None, (100, 200), 120, "bilinear", (0, 0, 0), (1, 1, 1))
    assert preprocess.crop_uint8(np.array(make_image(400, 130))).shape == (3, 100, 200)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_the_centre_crop_is_torchvisions(height: int, width: int, crop: tuple[int, int]) -> None:
    x = torch.arange(1, 3 * height * width + 1).reshape(3, height, width)
    assert torch.equal(centre_crop(x, crop), TF.center_crop(x, list(crop)))


@pytest.mark.parametrize("preprocess", PREPROCESSES.values(), ids=PREPROCESSES)
def test_normalise_is_torchvisions(preprocess: Preprocess) -> None:
    x = torch.arange(256, dtype=torch.uint8).repeat(2, 3, 4, 1)
    expected = TF.normalize(x.float() / 255, list(preprocess.mean), list(preprocess.std))
    found = preprocess.normalise(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("preprocess", PREPROCESSES.values(), ids=PREPROCESSES)
def test_normalising_in_another_layout_gives_equal_bits(preprocess: Preprocess) -> None:
    x = torch.randint(256, (3, 3, 9, 8), dtype=torch.uint8)
    for each in (preprocess, replace(preprocess, channels="bgr")):
        found = each.normalise(x, torch.channels_last)
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found, each.normalise(x))


@pytest.mark.parametrize("preprocess", PREPROCESSES.values(), ids=PREPROCESSES)
def test_the_reference_gives_what_it_says(preprocess: Preprocess) -> None:
    check_reference(preprocess)


@pytest.mark.parametrize(
    "reference",
    [
        lambda image: torch.zeros(3, 8, 9),
        lambda image: torch.zeros(1, 8, 8),
        lambda image: torch.zeros(3, 8, 8, dtype=torch.float64),
        lambda image: TF.pil_to_tensor(image).float(),
    ],
)
def test_a_reference_of_another_shape_or_type_is_refused(reference: object) -> None:
    preprocess = Preprocess(reference, (8, 8), None, "other", (0, 0, 0), (1, 1, 1))
    with pytest.raises(ModelError, match=r"expected \(3, 8, 8\) float32"):
        check_reference(preprocess)


def test_a_reference_that_fails_is_named() -> None:
    preprocess = timm_preprocess("resnet18.a1_in1k")
    broken = replace(preprocess, reference=lambda image: TF.normalize(image, [0], [0]))
    with pytest.raises(ModelError, match=r"the transform of the weights fails for an RGB image"):
        check_reference(broken)


def test_borders_and_sizes_that_keep_proportions_are_left_to_timm() -> None:
    assert not timm_preprocess("deepseek_vit_412m.deepseek_v4_1_flash").has_fast_path


@pytest.mark.parametrize(("resize", "interpolation"), [(None, "bilinear"), (8, "nearest")])
def test_what_the_fast_path_cannot_follow_it_says(resize: int | None, interpolation: str) -> None:
    assert not Preprocess(None, (8, 8), resize, interpolation, (0, 0, 0), (1, 1, 1)).has_fast_path


@pytest.mark.parametrize("name", SQUASHED)
def test_an_exact_resize_is_timms(name: str) -> None:
    """timm's crop mode squash. Pillow 13 resizes the height first for some proportions, which shows
    at edges of bicubic images."""
    preprocess = timm_preprocess(name)
    assert preprocess.has_fast_path
    assert isinstance(preprocess.resize, tuple)
    sizes = [(500, 333), (333, 500), (400, 475), (475, 400), (225, 301), (600, 90), (90, 600)]
    for i, (width, height) in enumerate([*sizes, (1, 9), preprocess.crop[::-1]]):
        image = make_image(width, height, seed=i)
        expected = in_grey_levels(preprocess, preprocess.reference(image))
        difference = (in_grey_levels(preprocess, fast(preprocess, image)) - expected).abs()
        assert difference.mean() <= 0.2, (width, height)
        assert difference.max() <= 3.01, (width, height)


@pytest.mark.parametrize("size", [(225, 301), (224, 227), (90, 91)], ids=str)
def test_the_offset_of_a_crop_may_be_cut(size: tuple[int, int]) -> None:
    """As the processors of transformers do: (height - crop) // 2."""
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    cut = Preprocess(None, (64, 64), size, "bilinear", (0, 0, 0), (1, 1, 1), "floor")
    top, left = (size[0] - 64) // 2, (size[1] - 64) // 2
    expected = pixels[top : top + 64, left : left + 64].transpose(2, 0, 1)
    assert np.array_equal(cut.crop_uint8(pixels).numpy(), expected)
    assert "crop 64x64 floor" in cut.describe()
    assert f"resize to {size[0]}x{size[1]} bilinear" in cut.describe()


def test_the_description_tells_transforms_apart() -> None:
    """It is part of the fingerprint: whatever changes values must show."""
    texts = [preprocess.describe() for preprocess in PREPROCESSES.values()]
    settings_of = {
        (p.resize, p.crop, p.interpolation, p.mean, p.std) for p in PREPROCESSES.values()
    }
    assert len(set(texts)) == len(settings_of) > 6
    assert PREPROCESSES["resnet18.a1_in1k"].describe() == (
        "resize 235 bicubic antialias, crop 224x224, "
        "mean [0.485, 0.456, 0.406], std [0.229, 0.224, 0.225]"
    )
