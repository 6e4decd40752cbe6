"""Places of tokens, as the shape of a layer's rows and the model tell them."""

from __future__ import annotations

import functools

import pytest

from featx.config import model_options
from featx.layers import token_geometries
from featx.models import Backbone, build_backbone
from featx.types import LayerSpec, TokenGeometry

VIT = "vit_tiny_patch16_224"


@functools.cache
def built(model: str, library: str) -> Backbone:
    return build_backbone(model_options(name=model, library=library, weights=None), 0)


def places(
    model: str, library: str, shape: tuple[int, ...], capture: str = "output", reduce: str = "none"
) -> TokenGeometry | None:
    backbone = built(model, library)
    spec = LayerSpec("x", "x", capture, reduce, {}, shape, "float16", "float32")
    return token_geometries([spec], backbone).get("x")


@pytest.mark.parametrize(
    ("model", "library", "shape", "expected"),
    [
        (VIT, "timm", (197, 192), TokenGeometry(1, True, (14, 14), (224, 224))),
        (VIT, "timm", (196, 192), TokenGeometry(0, False, (14, 14), (224, 224))),
        ("deit_tiny_distilled_patch16_224", "timm", (198, 192),
         TokenGeometry(2, True, (14, 14), (224, 224))),
        ("resnet18", "torchvision", (512, 7, 7), TokenGeometry(0, False, (7, 7), (224, 224))),
        ("swin_t", "torchvision", (7, 7, 768), TokenGeometry(0, False, (7, 7), (224, 224))),
        # Neither tokens with one prefix nor a grid alone.
        (VIT, "timm", (195, 192), None),
        (VIT, "timm", (192,), None),
        # Channels first or last?
        ("resnet18", "torchvision", (7, 7, 7), None),
    ],
)  # fmt: skip
def test_shapes(
    model: str, library: str, shape: tuple[int, ...], expected: TokenGeometry | None
) -> None:
    assert places(model, library, shape) == expected


def test_attention_weights_are_no_map() -> None:
    assert places("resnet18", "torchvision", (3, 14, 14), "attention") is None
    assert places("resnet18", "torchvision", (3, 14, 14)) is not None


def test_a_reduced_grid_is_a_map_and_a_pooled_layer_is_none() -> None:
    found = places(VIT, "timm", (192, 2, 2), reduce="grid")
    assert found == TokenGeometry(0, False, (2, 2), (224, 224))
    assert places(VIT, "timm", (197, 192), reduce="flatten") is None
