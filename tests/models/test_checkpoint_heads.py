"""Heads of checkpoints: built for the classes of the file, or left out; never random logits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from conftest import slow_except
from saved_weights import State, saved
from tiny_model import extract, run_job, write_images

import featx
from featx.config import CheckpointConfig, TransformConfig, model_options
from featx.errors import ConfigError, LayerError, ModelError, WeightsError
from featx.models import Backbone, build_backbone, seeded

NAMES = {"timm": "test_resnet", "torchvision": "mobilenet_v3_small"}
HEADS = {"timm": "fc", "torchvision": "classifier.3"}


def made(library: str, classes: int) -> torch.nn.Module:
    with seeded(1):
        if library == "timm":
            model = timm.create_model(NAMES[library], num_classes=classes)
        else:
            model = torchvision.models.get_model(NAMES[library], weights=None, num_classes=classes)
    return model.eval()  # type: ignore[no-any-return]


def build(path: Path, library: str, **options: Any) -> Backbone:
    config = model_options(name=NAMES[library], library=library, weights=str(path), **options)
    return build_backbone(config, 0)


def without_head(model: torch.nn.Module, library: str) -> State:
    return {k: x for k, x in model.state_dict().items() if not k.startswith(HEADS[library])}


@pytest.mark.parametrize("library", NAMES)
def test_the_head_has_the_classes_of_the_file(tmp_path: Path, library: str) -> None:
    model = made(library, 37)
    backbone = build(saved(tmp_path, {"state_dict": model.state_dict()}), library)
    own = backbone.module.state_dict()
    assert all(torch.equal(own[key], x) for key, x in model.state_dict().items())
    assert backbone.missing_heads == ()
    height, width = backbone.preprocess.crop
    x = torch.randn(2, 3, height, width)
    with torch.no_grad():
        assert torch.equal(backbone.module(x), model(x))


@pytest.mark.parametrize("library", NAMES)
def test_reset_keeps_the_classes_of_the_file(tmp_path: Path, library: str) -> None:
    path = saved(tmp_path, {"m": made(library, 37).state_dict()})
    prefix = CheckpointConfig("m/")
    backbone = build(path, library, init="reset", checkpoint=prefix)
    assert len(backbone.module.state_dict()[f"{HEADS[library]}.weight"]) == 37


@pytest.mark.parametrize(
    ("library", "kind"),
    [("timm", "no head"), ("torchvision", "another head"), ("timm", "half a head")],
)
def test_a_head_that_does_not_fit_is_left_out(
    tmp_path: Path, library: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = made(library, 37)
    state, head = without_head(model, library), HEADS[library]
    if kind == "another head":
        state |= {f"{head}.weight": torch.ones(9, 5), f"{head}.bias": torch.ones(9)}
    if kind == "half a head":
        state |= {f"{head}.weight": model.state_dict()[f"{head}.weight"]}
    backbone = build(saved(tmp_path, state), library)
    assert backbone.missing_heads == (head,)
    own = backbone.module.state_dict()
    assert own.keys() == without_head(model, library).keys()
    assert all(torch.equal(own[key], state[key]) for key in own)
    assert "there are no logits" in capsys.readouterr().err


@pytest.mark.parametrize("library", slow_except(NAMES, "timm"))
def test_without_a_head_features_are_stored_and_logits_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.chdir(tmp_path)
    photos, model = write_images(tmp_path / "photos", 2), made(library, 37)
    whole = str(saved(tmp_path, {"state_dict": model.state_dict()}))
    (tmp_path / "bare").mkdir()
    bare = str(saved(tmp_path / "bare", without_head(model, library)))

    def run(weights: str, layers: list[str], **more: Any) -> featx.FeatureStore:
        named = {"name": NAMES[library], "library": library, "weights": weights}
        return extract(photos, model=named, layers=layers, dtype="float32", pack=False, **more)

    expected = run(whole, ["embedding"], out="whole")
    found = run(bare, ["embedding"], out="found")
    np.testing.assert_array_equal(found["embedding"][:], expected["embedding"][:])
    manifest = json.loads((tmp_path / "whole" / "featx.json").read_text())
    fingerprint = manifest["fingerprint"]
    assert fingerprint["model.checkpoint"] == {"prefix": "state_dict/"}
    head = HEADS[library]
    with pytest.raises(LayerError, match=f"the layer {head}: .* no classifier that fits"):
        run(bare, [head], out="logits")
    every = run(bare, ["*"], out="every")
    assert head.split(".")[0] not in every.layers
    with pytest.raises(LayerError, match=r"gradients of logits: .* no classifier"):
        run(bare, [f"{every.layers[0]}:grad_output"], out="gradients")
    named = {"name": NAMES[library], "library": library, "weights": bare}
    with pytest.raises(ModelError, match=r"heat maps explain logits: .* no classifier that fits"):
        run_job("attribute", model=named, data=photos, out="maps")


def test_classes_that_the_user_states_have_to_be_those_of_the_file(tmp_path: Path) -> None:
    for library in NAMES:
        path = saved(tmp_path, made(library, 37).state_dict())
        with pytest.raises(WeightsError, match=r"weight \(37, .*num_classes: N"):
            build(path, library, args={"num_classes": 12})


def test_a_stated_head_of_no_classes_leaves_that_of_the_file_out(tmp_path: Path) -> None:
    """Its module `head` stays in a ConvNeXt, with the normalisation before the classifier."""
    path = saved(tmp_path, timm.create_model("test_convnext", num_classes=9).state_dict())
    config = {"name": "test_convnext", "library": "timm", "weights": str(path)}
    backbone = build_backbone(model_options(**config, args={"num_classes": 0}), 0)
    assert backbone.checkpoint == {"dropped": ["head.fc.bias", "head.fc.weight"]}
    assert backbone.missing_heads == ()


def test_the_checksum_is_compared_before_the_file_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path, made("timm", 3).state_dict())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    options = {"checkpoint": CheckpointConfig(sha256=digest.upper())}
    assert build(path, "timm", **options).module.num_classes == 3
    path.write_bytes(b"neither a pickle nor anything else")
    with pytest.raises(WeightsError, match=f"its SHA-256 is [0-9a-f]+, expected {digest}"):
        build(path, "timm", **options)


def test_a_file_takes_the_preprocessing_of_the_weights_that_it_is_like(tmp_path: Path) -> None:
    own = {"name": "mobilenet_v3_large", "library": "torchvision"}
    path = saved(tmp_path, torchvision.models.mobilenet_v3_large().state_dict())
    for tag, resize in (("IMAGENET1K_V1", 256), ("IMAGENET1K_V2", 232)):
        config = model_options(**own, weights=str(path), weights_like=tag)
        assert build_backbone(config, 0).preprocess.resize == resize
    path = saved(tmp_path, timm.create_model("mobilenetv3_small_050").state_dict())
    own = {"name": "mobilenetv3_small_050", "library": "timm"}
    config = model_options(**own, weights=str(path), weights_like="lamb_in1k")
    assert build_backbone(config, 0).name == "timm/mobilenetv3_small_050.lamb_in1k"
    with pytest.raises(WeightsError, match="timm has no weights 'lamb'"):
        build_backbone(model_options(**own, weights=str(path), weights_like="lamb"), 0)


@pytest.mark.slow
def test_a_vision_transformer_takes_the_size_of_the_weights_that_it_is_like(tmp_path: Path) -> None:
    model = torchvision.models.vit_b_16(image_size=384)
    own = {"name": "vit_b_16", "library": "torchvision", "weights_like": "IMAGENET1K_SWAG_E2E_V1"}
    path = saved(tmp_path, model.state_dict())
    assert build_backbone(model_options(**own, weights=str(path)), 0).preprocess.crop == (384, 384)


@pytest.mark.parametrize("library", NAMES)
def test_a_tag_to_be_like_needs_a_file(library: str) -> None:
    config = model_options(name=NAMES[library], library=library, weights=None, weights_like="x")
    with pytest.raises(ConfigError, match="weights_like has an effect with a file"):
        build_backbone(config, 0)


def test_a_transform_still_changes_single_values(tmp_path: Path) -> None:
    path = saved(tmp_path, made("timm", 3).state_dict())
    backbone = build(path, "timm", transform=TransformConfig(interpolation="bilinear"))
    assert backbone.preprocess.interpolation == "bilinear"
