"""torchvision's models with its own weights and transforms; no network, tensors only."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urlparse

import pytest
import torch
from conftest import make_image, slow_except
from torchvision import models
from torchvision.models import MobileNet_V3_Small_Weights

from featx.config import model_options
from featx.errors import ModelError, WeightsError
from featx.images import check_reference
from featx.models import Backbone, build_backbone, seeded

State = dict[str, torch.Tensor]


def build(name: str, weights: str | None = "default", seed: int = 0) -> Backbone:
    return build_backbone(model_options(name=name, library="torchvision", weights=weights), seed)


def file_name(entry: object) -> str:
    return Path(urlparse(entry.url).path).name  # type: ignore[attr-defined]


def random_state(name: str, **arguments: object) -> State:
    with seeded(5):
        return models.get_model(name, weights=None, **arguments).state_dict()


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of PyTorch, where its downloads would go."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def test_default_weights_come_from_pytorchs_cache(checkpoints: Path) -> None:
    state = random_state("mobilenet_v3_small")
    torch.save(state, checkpoints / file_name(MobileNet_V3_Small_Weights.DEFAULT))
    for weights in ("default", "MobileNet_V3_Small_Weights.IMAGENET1K_V1"):
        backbone = build("mobilenet_v3_small", weights)
        assert backbone.weights == "MobileNet_V3_Small_Weights.IMAGENET1K_V1"
        own = backbone.module.state_dict()
        assert all(torch.equal(own[name], x) for name, x in state.items())


def test_a_cached_file_of_another_model_is_refused(checkpoints: Path) -> None:
    cached = checkpoints / file_name(MobileNet_V3_Small_Weights.DEFAULT)
    torch.save(random_state("squeezenet1_1"), cached)
    with pytest.raises(WeightsError, match="not fit this model"):
        build("mobilenet_v3_small")


def test_without_a_network_the_message_names_the_file_the_place_and_two_ways_on(
    checkpoints: Path,
) -> None:
    started_at = time.perf_counter()
    with pytest.raises(WeightsError) as caught:
        build("resnet18")
    assert time.perf_counter() - started_at < 5
    message = str(caught.value)
    for part in (
        "resnet18-f37072fd.pth",
        str(checkpoints),
        "https://download.pytorch.org/models/",
        "Either download the file",
        "model.weights=PATH",
    ):
        assert part in message
    assert list(checkpoints.iterdir()) == []


def test_a_cache_that_cannot_be_made_is_a_weights_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match=r"cannot be downloaded .*model\.weights=PATH"):
        build("resnet18")


def test_a_wrong_tag_lists_the_tags() -> None:
    with pytest.raises(WeightsError, match=r"it has IMAGENET1K_V1, IMAGENET1K_V2"):
        build("resnet50", "IMAGENET1K_V3")


def test_each_set_of_weights_brings_its_own_transform(checkpoints: Path) -> None:
    """V1 resizes to 256 pixels and V2 to 232; a file of either is known by its name."""
    enum = models.MobileNet_V2_Weights
    state = random_state("mobilenet_v2")
    for entry, resize in ((enum.IMAGENET1K_V1, 256), (enum.DEFAULT, 232)):
        torch.save(state, checkpoints / file_name(entry))
        assert build("mobilenet_v2", entry.name).preprocess.resize == resize
        elsewhere = checkpoints.parent / file_name(entry)
        torch.save(state, elsewhere)
        backbone = build("mobilenet_v2", str(elsewhere))
        assert (backbone.preprocess.resize, backbone.weights) == (resize, str(elsewhere))
        image = make_image(300, 260)
        assert torch.equal(backbone.preprocess.reference(image), entry.transforms()(image))


@pytest.mark.slow
def test_torchvisions_googlenet_file_by_path_rescales_its_input(tmp_path: Path) -> None:
    """Its builder sets transform_input for its own weights only; without it values are wrong."""
    state = random_state("googlenet", init_weights=True, transform_input=True)
    path = tmp_path / file_name(models.GoogLeNet_Weights.DEFAULT)
    torch.save(state, path)
    assert build("googlenet", str(path)).module.transform_input
    torch.save(state, tmp_path / "mine.pth")
    assert not build("googlenet", str(tmp_path / "mine.pth")).module.transform_input


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "r3d_18", "raft_large"])
@pytest.mark.parametrize("weights", [None, "default"])
def test_models_that_take_no_single_images_are_refused_before_any_download(
    name: str, weights: str | None
) -> None:
    with pytest.raises(ModelError, match=f"{name} takes no batch of single images") as caught:
        build(name, weights)
    assert not isinstance(caught.value, WeightsError)


def test_quantised_models_are_refused_with_the_plain_name() -> None:
    with pytest.raises(ModelError, match="name the plain one: resnet18"):
        build("quantized_resnet18")


def test_every_image_model_states_a_transform_that_fits_its_input() -> None:
    """All weights of all classification and segmentation models; no module is built."""
    from torchvision.transforms._presets import ImageClassification, SemanticSegmentation

    from featx.models.libraries.torchvision import preprocess_of

    seen: set[str] = set()
    count = 0
    for name in models.list_models():
        for entry in models.get_model_weights(name):
            preset = entry.transforms()
            if isinstance(preset, ImageClassification | SemanticSegmentation):
                preprocess = preprocess_of(preset, name)
                assert preprocess.has_fast_path
                if preprocess.describe() not in seen:
                    check_reference(preprocess)
                seen.add(preprocess.describe())
                count += 1
    assert count > 80


@pytest.mark.parametrize("name", slow_except(["inception_v3", "fcn_resnet50"], "fcn_resnet50"))
def test_models_with_odd_builders(name: str) -> None:
    """Auxiliary heads and backbones with weights of their own; built without a warning."""
    backbone = build(name, None)
    check_reference(backbone.preprocess)
    assert not backbone.module.training
