"""The preset `embedding`: the library's own vector, or what alone decides the logits."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_engine import backbone_of, bound, noise
from torch import nn

from featx.errors import LayerError
from featx.layers import CapturePoint
from featx.models import Backbone, LibraryEmbedding
from featx.models.libraries.timm import embedding_of


class Head(nn.Module):
    """BatchNorm in front of the classifier, as in timm's efficientvit_m0."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.bn(x))


class Timm(nn.Module):
    """timm's interface; `vector` says which embedding it defines."""

    def __init__(self, vector: str = "pooled") -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)
        self.head, self.head_dist = Head(), Head()
        self.vector = vector

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        pooled = self.pool(x).flatten(1)
        if not pre_logits:
            return (self.head(pooled) + self.head_dist(pooled)) / 2
        if self.vector == "none":
            raise NotImplementedError
        return {
            "pooled": pooled,
            "mean": (pooled + x.amax((2, 3))) / 2,
            "map": x,
            "constant": torch.ones(len(x), 4),
        }[self.vector]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


def timm_backbone(vector: str = "pooled") -> Backbone:
    torch.manual_seed(0)
    backbone = backbone_of(Timm(vector))
    backbone.embedding = embedding_of(backbone.module)
    return backbone


def embedding(backbone: Backbone, x: torch.Tensor) -> tuple[CapturePoint, torch.Tensor]:
    with bound(backbone, "embedding") as engine:
        return engine.chosen[0][0], engine.run(x)["embedding"]  # type: ignore[attr-defined]


def test_a_fresh_batchnorm_does_not_pass_for_the_identity() -> None:
    """It changes values by 5e-6 only; the embedding is what goes into it."""
    backbone, x = timm_backbone(), noise()
    point, found = embedding(backbone, x)
    assert (point.module, point.capture) == ("head_dist.bn", "input")
    assert torch.equal(found, backbone.module.conv(x).mean((2, 3)))


def test_an_embedding_that_is_no_tensor_of_the_pass_is_computed_by_the_library() -> None:
    """Such as the mean of class and distillation token; the logits stay the same."""
    backbone, x = timm_backbone("mean"), noise()
    logits = backbone.module(x)
    point, found = embedding(backbone, x)
    maps = backbone.module.conv(x)
    assert point.module == "pre_logits"
    assert torch.equal(found, (maps.mean((2, 3)) + maps.amax((2, 3))) / 2)
    assert torch.equal(backbone.module(x), logits)
    copied = copy.deepcopy(backbone.module)
    with torch.no_grad():
        copied.head.fc.bias.add_(1)
    assert not torch.equal(copied(x), logits)
    assert torch.equal(backbone.module(x), logits)


def test_a_model_without_pre_logits_is_its_own_embedding() -> None:
    backbone, x = timm_backbone("none"), noise()
    _, found = embedding(backbone, x)
    assert torch.equal(found, backbone.module(x))


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ("map", r"is a vector.*rows of shape \(4, 6, 6\)"),
        ("constant", "the same for different images"),
    ],
)
def test_what_cannot_be_an_embedding_is_refused(vector: str, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        embedding(timm_backbone(vector), noise())


def test_an_embedding_that_the_pass_never_makes_is_refused() -> None:
    backbone = backbone_of(Timm())
    backbone.embedding = LibraryEmbedding(lambda x: x.flatten(1)[:, :4].cumsum(1), lambda: None)
    with pytest.raises(LayerError, match="not a tensor of its forward pass"):
        embedding(backbone, noise())


class Encoder(nn.Module):
    """A transformer block without a classifier; its last layer is the MLP's second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc1, self.fc2 = nn.Conv2d(3, 4, 4, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        return (x + self.fc2(self.fc1(x).relu())).mean(1)


class Excited(nn.Module):
    """Squeeze and excitation at the end; the last layer gives a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.conv(x)
        return {"one": self.one(x.amax((2, 3))), "two": self.two(x.mean((2, 3)))}


@pytest.mark.parametrize(
    ("module", "last"), [(Encoder(), "fc2"), (Excited(), "gate"), (TwoHeads(), "two")]
)
def test_a_last_linear_layer_that_decides_nothing_alone_is_no_classifier(
    module: nn.Module, last: str
) -> None:
    with pytest.raises(
        LayerError, match=f"last linear layer of this model, {last}, is not its classifier"
    ):
        embedding(backbone_of(module), noise())


def test_what_follows_a_classifier_does_not_matter() -> None:
    layers = [nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    module, x = nn.Sequential(*layers, nn.Softmax(1)), noise()
    point, found = embedding(backbone_of(module), x)
    assert (point.module, point.capture) == ("3", "input")
    assert torch.equal(found, module[:3](x))
