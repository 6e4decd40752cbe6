"""model.transform: single values of a preprocessing, over those of the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_image
from PIL import Image
from torchvision.transforms import functional as TF

from featx.config import TransformConfig, model_options
from featx.errors import ConfigError
from featx.images import Preprocess
from featx.models import build_backbone, stated_preprocess


def preprocess(name: str, library: str, **transform: Any) -> Preprocess:
    config = model_options(
        name=name, library=library, weights=None, transform=TransformConfig(**transform)
    )
    return build_backbone(config, 0).preprocess


@pytest.mark.parametrize(("library", "name"), [("timm", "test_vit"), ("torchvision", "resnet18")])
def test_what_is_not_given_is_that_of_the_weights(library: str, name: str) -> None:
    own = preprocess(name, library)
    changed = preprocess(name, library, mean=[0.1, 0.2, 0.3])
    assert changed.mean == (0.1, 0.2, 0.3)
    assert changed.describe() != own.describe(), "it is part of the fingerprint"
    same = ("crop", "resize", "interpolation", "std", "offset")
    assert all(getattr(changed, key) == getattr(own, key) for key in same)
    image = make_image(300, 211)
    std = torch.tensor(own.std).view(3, 1, 1)
    moved = (torch.tensor(own.mean) - torch.tensor(changed.mean)).view(3, 1, 1) / std
    torch.testing.assert_close(changed.reference(image), own.reference(image) + moved)


def test_an_exact_resize_and_a_cut_offset() -> None:
    changed = preprocess("resnet18", "torchvision", resize=[231, 256], offset="floor")
    assert changed.has_fast_path
    image = make_image(300, 211)
    pixels = np.asarray(image.resize((256, 231), Image.Resampling.BILINEAR))[3:227, 16:240]
    expected = TF.normalize(
        torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255, changed.mean, changed.std
    )
    torch.testing.assert_close(changed.reference(image), expected)
    fast = changed.normalise(changed.crop_uint8(np.array(image))[None])[0]
    assert ((fast - expected).abs().max() * 255 * max(changed.std)) <= 2.01
    stated = stated_preprocess(TransformConfig(resize=[60, 90], crop=[32, 64]))
    assert stated.reference(image).shape == (3, 32, 64)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ({"crop": 160}, r"have 224 x 224 pixels\. 'model\.input_size="),
        ({"resize": 200}, r"crop=224x224: expected at most model\.transform\.resize=200"),
        ({"resize": [1, 2, 3]}, r"resize=\[1,2,3\]: expected a whole number of pixels"),
        ({"resize": "large"}, "expected a whole number of pixels"),
        ({"offset": "up"}, "expected one of round, floor"),
        ({"mean": [0.5]}, "three numbers"),
    ],
)
def test_what_is_refused(transform: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preprocess("resnet18", "torchvision", **transform)


def test_a_transform_that_options_cannot_change_in_part() -> None:
    """A size that is not square keeps the proportions of the image, which only timm computes."""
    size = {"input_size": [96, 160], "library": "timm", "name": "test_vit", "weights": None}
    with pytest.raises(ConfigError, match=r"Give model\.transform\.resize as well"):
        build_backbone(model_options(**size, transform=TransformConfig(mean=[0.5] * 3)), 0)
    whole = TransformConfig(mean=[0.5] * 3, resize=[96, 160])
    assert build_backbone(model_options(**size, transform=whole), 0).preprocess.has_fast_path
