"""model.args and model.input_size of timm and torchvision: the model and its images agree."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import make_image, run_python
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from transformers_zoo import write_folder

from featx.config import model_options
from featx.engine import Engine
from featx.errors import ConfigError, FeatxError, ModelError, WeightsError
from featx.models import Backbone, build_backbone, seeded


def build(name: str, weights: str | None = None, **options: Any) -> Backbone:
    return build_backbone(model_options(name=name, weights=weights, **options), 0)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A vit of timm with "pretrained" weights in a folder, as its hub would give them."""
    folder = tmp_path_factory.mktemp("vit")
    with seeded(7):
        model = timm.create_model("test_vit", num_classes=5)
    save_file(model.state_dict(), folder / "model.safetensors")
    cfg = {**model.pretrained_cfg, "num_classes": 5, "input_size": [3, 160, 160]}
    keys = ("input_size", "fixed_input_size", "crop_pct", "mean", "std", "classifier", "first_conv")
    config = {
        "architecture": "test_vit",
        "num_classes": 5,
        "pretrained_cfg": {key: cfg[key] for key in ("num_classes", *keys)},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return f"local-dir:{folder}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pretrained_cfg": {"std": 1}}, r"timm cannot prepare images as the config of this model"),
        ({"model_args": [0]}, r"timm cannot build local-dir:"),
    ],
)
def test_a_damaged_config_of_a_folder_is_named(
    wrong: dict[str, Any], message: str, pretrained: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pretrained.partition(":")[2], tmp_path / "vit"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **wrong}))
    with pytest.raises(ModelError, match=message):
        build_backbone(model_options(library="timm", name=f"local-dir:{folder}"), 0)


def test_another_config_with_the_same_weights_is_another_model(
    pretrained: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pretrained.partition(":")[2], tmp_path / "vit"))
    config = json.loads((folder / "config.json").read_text())
    name = model_options(library="timm", name=f"local-dir:{folder}")
    first = build_backbone(name, 0)
    config["model_args"] = {"act_layer": "relu"}
    (folder / "config.json").write_text(json.dumps(config))
    second = build_backbone(name, 0)
    assert first.weights_sha256 == second.weights_sha256
    assert first.provenance != second.provenance


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("test_vit", {}),
        pytest.param("test_vit", {"dynamic_img_size": True}, marks=pytest.mark.slow),
        ("test_efficientnet", {}),
        pytest.param(
            "swin_tiny_patch4_window7_224",
            {"depths": [1, 1, 1, 1], "embed_dim": 24},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_timm_is_fed_the_size_that_it_is_built_for(name: str, args: dict[str, Any]) -> None:
    backbone = build(name, library="timm", args=args, input_size=[448, 448])
    assert backbone.preprocess.crop == (448, 448)
    assert "crop 448x448" in backbone.preprocess.describe()
    data = resolve_data_config({"input_size": (3, 448, 448)}, model=backbone.module)
    image = make_image(500, 640)
    expected = create_transform(**data)(image)
    assert torch.equal(backbone.preprocess.reference(image), expected)
    with Engine(backbone, torch.device("cpu"), "float32") as engine:
        assert engine.trace().calls
    assert backbone.args == args
    assert backbone.module(expected[None]).shape[0] == 1


def test_a_size_that_is_not_square() -> None:
    backbone = build("test_vit", library="timm", input_size=[96, 160])
    assert backbone.preprocess.crop == (96, 160)
    assert not backbone.preprocess.has_fast_path
    assert backbone.preprocess.reference(make_image(300, 200)).shape == (3, 96, 160)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": {"img_size": 448}}, r"'model\.input_size=\[HEIGHT,WIDTH\]' sets"),
        ({"args": {"pretrained": True}}, r"model\.args\.pretrained cannot be given"),
        ({"args": {"in_chans": 1}}, r"Give model\.transform\.scale.*mean=\[0\.5\]'"),
        ({"args": {"checkpoint_path": "x.pth"}}, r"model\.weights=PATH"),
        ({"args": {"glubal_pool": "avg"}}, "unexpected keyword argument 'glubal_pool'"),
        ({"input_size": [448]}, r"expected \[height, width\]"),
        (
            {"factory": "a:b"},
            r"model\.factory has an effect with model\.library=custom or model\.library=hub",
        ),
    ],
)
def test_what_is_refused_of_timm(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FeatxError, match=message):
        build("test_vit", library="timm", **options)


def test_pretrained_weights_follow_the_size(pretrained: str) -> None:
    plain = build(pretrained, "default")
    assert plain.preprocess.crop == (160, 160)
    larger = build(pretrained, "default", input_size=[192, 192])
    assert larger.preprocess.crop == (192, 192)
    expected = timm.create_model(pretrained, pretrained=True, img_size=192).eval()
    x = torch.randn(1, 3, 192, 192)
    with torch.inference_mode():
        assert torch.equal(larger.module(x), expected(x))


def test_weights_that_lack_parameters_of_the_args_are_refused(pretrained: str) -> None:
    """timm builds all of these, with a random or an untrained tensor and a line in its log."""
    headless = build(pretrained, "default", args={"num_classes": 0})
    plain = build(pretrained, "default")
    x = torch.randn(2, 3, 160, 160)
    with torch.inference_mode():
        assert torch.equal(headless.embedding.compute(x), plain.embedding.compute(x))
    assert headless.classes == ()
    with pytest.raises(WeightsError, match=r"lack head\.weight, head\.bias of the model that"):
        build(pretrained, "default", args={"num_classes": 7})
    with pytest.raises(WeightsError, match=r"lack fc_norm\.weight, fc_norm\.bias"):
        build(pretrained, "default", args={"num_classes": 0, "global_pool": "avg"})
    with pytest.raises(WeightsError, match=r"do not load: .* with the given model\.args"):
        build(pretrained, "default", args={"depth": 3})


def test_torch_and_timm_stay_as_they_are_while_weights_are_loaded(
    pretrained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread of the program may load weights of its own at that moment."""
    builder = sys.modules["timm.models._builder"]
    load_pretrained, before = builder.load_pretrained, dict(vars(torch.nn.Module))
    seen = []

    def load(*args: Any, **keywords: Any) -> None:
        seen.append(dict(vars(torch.nn.Module)) == before)
        load_pretrained(*args, **keywords)

    monkeypatch.setattr(builder, "load_pretrained", load)
    build(pretrained, "default", args={"num_classes": 0})
    assert seen
    assert all(seen)


@pytest.mark.slow
def test_torchvision_is_fed_the_size_that_it_is_built_for() -> None:
    backbone = build("resnet18", input_size=[320, 320])
    assert backbone.preprocess.crop == (320, 320)
    assert backbone.preprocess.resize == 366  # 256 / 224 of 320
    vit = build("vit_b_32", input_size=[64, 64])
    assert vit.preprocess.crop == (64, 64)
    assert vit.module.image_size == 64
    with torch.inference_mode():
        assert vit.module(torch.randn(1, 3, 64, 64)).shape == (1, 1000)
    dilated = build("resnet50", args={"replace_stride_with_dilation": [False, True, True]})
    with torch.inference_mode():
        assert dilated.module.layer4(torch.randn(1, 1024, 14, 14)).shape[-1] == 14
    assert dilated.args == {"replace_stride_with_dilation": [False, True, True]}
    assert dilated.weights_sha256 == build("resnet50").weights_sha256, "so args are compared"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_size": [320, 256]}, "crop squares"),
        ({"args": {"weights": "x"}}, r"model\.weights"),
        ({"args": {"zero_init": True}}, "unexpected keyword argument 'zero_init'"),
        ({"args": {"seed": 1}}, "unexpected keyword argument 'seed'"),
    ],
)
def test_what_is_refused_of_torchvision(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        build("resnet18", library="torchvision", **options)


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    """Those in blocks of sh; tests/test_docs.py runs the others."""
    page = Path(__file__).parents[2] / "docs" / "models.md"
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if line[:7] == "python "]
    assert len(lines) >= 5
    write_folder(tmp_path / "dinov2-small", "dinov2")
    (tmp_path / "photos").mkdir()
    make_image(80, 60).save(tmp_path / "photos" / "a.png")
    for line in lines:
        run_python(*shlex.split(line)[1:], cwd=tmp_path)
