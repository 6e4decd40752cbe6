"""timm's models by name and tag, with their data configs; no network, tensors only."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pytest
import timm
import torch
from conftest import make_image, run_python
from safetensors.torch import save_file
from saved_weights import RunsCode
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform

from featx.config import model_options
from featx.errors import ModelError, WeightsError
from featx.images import check_reference
from featx.models import Backbone, build_backbone, seeded, state_sha256
from featx.models.libraries.timm import embedding_of


def build(name: str, weights: str | None = "default", seed: int = 0) -> Backbone:
    return build_backbone(model_options(name=name, library="timm", weights=weights), seed)


@pytest.mark.slow
def test_default_weights_come_from_the_hubs_cache(tmp_path: Path) -> None:
    """In a process of its own, for the hub reads its environment when it is imported."""
    with seeded(5):
        module = timm.create_model("test_vit", pretrained=False)
    repository = timm.get_pretrained_cfg("test_vit").hf_hub_id.replace("/", "--")
    folder = tmp_path / "hub" / f"models--{repository}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    save_file(module.state_dict(), snapshot / "model.safetensors")
    program = (
        "from featx.config import model_options\n"
        "from featx.models import build_backbone\n"
        "backbone = build_backbone(model_options(name='test_vit', library='timm'), 0)\n"
        "print(backbone.weights, backbone.weights_sha256)\n"
    )
    done = run_python("-c", program, env={"HF_HOME": str(tmp_path)})
    assert done.stdout == f"timm r160_in1k {state_sha256(module)}\n"


@pytest.fixture
def cached_gcvit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where PyTorch's cache would keep the weights of a model that is on no hub."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    url = timm.get_pretrained_cfg("gcvit_xxtiny").url
    path = tmp_path / "hub" / "checkpoints" / Path(urlparse(url).path).name
    path.parent.mkdir(parents=True)
    return path


def test_weights_with_a_url_come_from_pytorchs_cache(cached_gcvit: Path) -> None:
    with seeded(5):
        module = timm.create_model("gcvit_xxtiny", pretrained=False)
    torch.save(module.state_dict(), cached_gcvit)
    assert build("gcvit_xxtiny").weights_sha256 == state_sha256(module)


def test_a_cached_pickle_with_code_is_refused_and_not_run(cached_gcvit: Path) -> None:
    torch.save({"w": RunsCode(cached_gcvit.parent / "ran")}, cached_gcvit)
    with pytest.raises(WeightsError, match=r"gcvit_xxtiny.*cannot be read.*tensors only"):
        build("gcvit_xxtiny")
    assert not (cached_gcvit.parent / "ran").exists()


def test_a_missing_url_names_the_file_and_the_place(cached_gcvit: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        build("gcvit_xxtiny")
    assert cached_gcvit.name in str(caught.value)
    assert str(cached_gcvit.parent) in str(caught.value)
    assert "model.weights=PATH" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "weights", "what"),
    [
        ("vit_small_patch14_dinov2.lvd142m", "default", "timm/vit_small_patch14_dinov2.lvd142m"),
        ("vit_small_patch14_dinov2", "lvd142m", "timm/vit_small_patch14_dinov2.lvd142m"),
        ("tv_resnet34", "default", "timm/resnet34.tv_in1k"),
        ("hf-hub:owner/no-such-model", "default", "owner/no-such-model"),
        ("hf-hub:owner/no-such-model", None, "owner/no-such-model"),
    ],
)
def test_without_a_network_the_message_comes_at_once_and_says_what_to_do(
    name: str, weights: str | None, what: str
) -> None:
    started_at = time.perf_counter()
    with pytest.raises(WeightsError) as caught:
        build(name, weights)
    assert time.perf_counter() - started_at < 5
    message = str(caught.value)
    remedy = "PATH" if weights else "without hf-hub:, which needs no file for random weights"
    for part in (what, "Looked in", "huggingface", "Either run", "hf download", remedy):
        assert part in message


def test_a_wrong_tag_lists_the_tags() -> None:
    for name, weights in (("resnet18.nope", "default"), ("resnet18", "nope")):
        with pytest.raises(WeightsError, match=r"no weights 'nope' for resnet18.*a1_in1k.*tv_in1k"):
            build(name, weights)


def test_a_model_without_weights_says_so() -> None:
    with pytest.raises(WeightsError, match=r"no pretrained weights for .*model\.weights=null"):
        build("vit_giant_patch14_224")


def test_a_tag_brings_its_transform_also_with_a_local_file(tmp_path: Path) -> None:
    """tv_in1k resizes to 256 bilinear, a1_in1k to 235 bicubic."""
    path = tmp_path / "w.pth"
    with seeded(5):
        torch.save(timm.create_model("resnet18", pretrained=False).state_dict(), path)
    shown = [
        build(name, str(path)).preprocess.describe()
        for name in ("resnet18.tv_in1k", "resnet18.a1_in1k")
    ]
    assert shown[0].startswith("resize 256 bilinear")
    assert shown[1].startswith("resize 235 bicubic")


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet"])
def test_the_transform_is_timms_own(name: str) -> None:
    backbone = build(name, None)
    data = resolve_model_data_config(backbone.module)
    transform = create_transform(**data, is_training=False)
    image = make_image(210, 190)
    assert torch.equal(backbone.preprocess.reference(image), transform(image))
    assert backbone.preprocess.crop == tuple(data["input_size"][1:])
    fast = backbone.preprocess.normalise(backbone.preprocess.crop_uint8(np.array(image))[None])[0]
    assert (fast - transform(image)).abs().mean() < 0.02
    check_reference(backbone.preprocess)


@pytest.mark.parametrize(
    ("name", "prefix", "class_token"),
    [
        ("test_vit", 1, True),
        ("test_vit2", 1, False),  # a register and no class token
        ("test_resnet", 0, False),
        ("deit_tiny_distilled_patch16_224", 2, True),
    ],
)
def test_prefix_tokens_come_from_the_model(name: str, prefix: int, class_token: bool) -> None:
    backbone = build(name, None)
    assert (backbone.num_prefix_tokens, backbone.has_class_token) == (prefix, class_token)


def test_a_model_of_other_than_three_channels_is_refused() -> None:
    from featx.models.libraries.timm import preprocess_of

    overlay = {"input_size": (1, 160, 160)}
    module = timm.create_model("test_resnet", in_chans=1, pretrained_cfg_overlay=overlay)
    with pytest.raises(ModelError, match="takes 1 channels"):
        preprocess_of(module)


def test_an_encoder_has_its_output_as_embedding() -> None:
    """MobileNetV5's encoder is the one class of timm whose forward_head has no `pre_logits`."""

    class Encoder(torch.nn.Flatten):
        def forward_head(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    x = torch.arange(24.0).reshape(2, 3, 2, 2)
    assert torch.equal(embedding_of(Encoder()).compute(x), x.flatten(1))
