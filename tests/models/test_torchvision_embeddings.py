"""`embedding` of one member of every family of torchvision, against the model cut by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import slow_except
from timm_survey import is_close, randomise_constants
from tiny_engine import backbone_of, bound, noise
from torch import nn
from torchvision import models

from featx.errors import LayerError
from featx.layers import find_stages, trace_forward
from featx.models import Backbone, seeded
from featx.models.libraries.torchvision import classifier_of

LAST = {
    "alexnet": ("classifier.6", 64),
    "convnext_tiny": ("classifier.2", 64),
    "densenet121": ("classifier", 64),
    "efficientnet_b0": ("classifier.1", 64),
    "efficientnet_v2_s": ("classifier.1", 64),
    "googlenet": ("fc", 64),
    "inception_v3": ("fc", 96),
    "maxvit_t": ("classifier.5", 224),
    "mnasnet0_5": ("classifier.1", 64),
    "mobilenet_v2": ("classifier.1", 64),
    "mobilenet_v3_small": ("classifier.3", 64),
    "regnet_x_400mf": ("fc", 64),
    "resnet18": ("fc", 64),
    "resnext50_32x4d": ("fc", 64),
    "shufflenet_v2_x0_5": ("fc", 64),
    "swin_t": ("head", 64),
    "swin_v2_t": ("head", 64),
    "vgg11": ("classifier.6", 64),
    "vit_b_32": ("heads.head", 224),
    "wide_resnet50_2": ("fc", 64),
}
"""Architecture -> its classifier, and the side of an image that it can take."""


def embedding(backbone: Backbone, x: torch.Tensor) -> torch.Tensor:
    with bound(backbone, "embedding") as engine:
        return engine.run(x)["embedding"]


def build(name: str, **options: object) -> nn.Module:
    with seeded(0):
        module = models.get_model(name, weights=None, **options).eval()
    randomise_constants(module)
    return module


def cut(module: nn.Module, last: str) -> nn.Module:
    """The model with its classifier replaced by the identity."""
    module = copy.deepcopy(module)
    parent, _, leaf = last.rpartition(".")
    setattr(module.get_submodule(parent), leaf, nn.Identity())
    return module


@pytest.mark.parametrize("name", slow_except(LAST, "mobilenet_v3_small"))
def test_the_embedding_is_what_the_classifier_is_given(name: str) -> None:
    last, side = LAST[name]
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    module = build(name, **options)
    x = noise(2, side)
    with torch.no_grad():
        expected = cut(module, last)(x)
    assert is_close(embedding(backbone_of(module, side), x), expected)


def test_the_embedding_in_front_of_a_convolutional_classifier_is_averaged() -> None:
    module, x = build("squeezenet1_1"), noise(2, 64)
    with torch.no_grad():
        expected = module.features(x).mean((2, 3))
    assert is_close(embedding(backbone_of(module, 64), x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcn_resnet50", "deeplabv3_mobilenet_v3_large"])
def test_the_embedding_of_a_segmentation_model_is_that_of_its_main_head(name: str) -> None:
    """With its usual weights there is an auxiliary head, whose layers run last."""
    module, x = build(name, weights_backbone=None, aux_loss=True), noise(2, 64)
    backbone = backbone_of(module, 64)
    backbone.classifier = classifier_of(module)
    head = module.classifier
    with torch.no_grad():
        expected = nn.Sequential(*list(head)[:-1])(module.backbone(x)["out"]).mean((2, 3))
    assert is_close(embedding(backbone, x), expected)


@pytest.mark.parametrize("aux_loss", slow_except([True, False], False))
def test_the_head_of_a_segmentation_model_is_no_stage(aux_loss: bool) -> None:
    """The blocks of its dilated backbone and its head have one size."""
    module = build("fcn_resnet50", weights_backbone=None, aux_loss=aux_loss)
    trace = trace_forward(module, noise(2, 64))
    expected = [f"backbone.{name}" for name in ("relu", "layer1", "layer4")]
    assert find_stages(trace, classifier_of(module)) == expected


def test_a_segmentation_head_with_two_classifiers_has_no_embedding_and_is_no_stage() -> None:
    module = build("lraspp_mobilenet_v3_large", weights_backbone=None)
    backbone = backbone_of(module, 64)
    with pytest.raises(LayerError, match=r"classifier\.high_classifier, is not its classifier"):
        embedding(backbone, noise(2, 64))
    backbone.classifier = classifier_of(module)
    with pytest.raises(LayerError, match="the input of classifier gives 2 tensors"):
        embedding(backbone, noise(2, 64))
    stages = find_stages(trace_forward(module, noise(2, 64)), backbone.classifier)
    assert stages == [f"backbone.{number}" for number in (1, 3, 6, 16)]
