"""Checkpoints of other training code: the model that was saved, converted by timm or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from saved_weights import State, saved

from featx.config import CheckpointConfig, model_options
from featx.errors import ConfigError, WeightsError
from featx.models import Backbone, build_backbone, seeded

VIT = {"depth": 3, "embed_dim": 48, "num_heads": 3}
SWIN = {"embed_dim": 12, "depths": (1, 2), "num_heads": (1, 2), "window_size": 4}

REGISTERS, PLAIN, DINOV3, SWIN_NAME = (
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch14_dinov2",
    "vit_small_patch16_dinov3",
    "swin_tiny_patch4_window7_224",
)

SIZES = {REGISTERS: 56, PLAIN: 56, DINOV3: 64, SWIN_NAME: 64}

ARGS: dict[str, dict[str, Any]] = {
    REGISTERS: VIT,
    PLAIN: VIT,
    DINOV3: VIT,
    SWIN_NAME: {**SWIN, "num_classes": 0},
}


def made(name: str, seed: int = 0, **more: Any) -> torch.nn.Module:
    """Small model of a family, all of whose values are random."""
    with seeded(seed):
        options = {"img_size": SIZES[name], **ARGS[name], **more}
        model: torch.nn.Module = timm.create_model(name, **options)
        for x in model.parameters():
            torch.nn.init.normal_(x, std=0.2)
    return model.eval()


def state_of(name: str, seed: int = 0, **more: Any) -> State:
    return {key: x.clone() for key, x in made(name, seed, **more).state_dict().items()}


def renamed(state: State, *pairs: tuple[str, str]) -> State:
    """The tensors with regular expressions replaced in their names."""
    result = {}
    for key, x in state.items():
        for old, new in pairs:
            key = re.sub(old, new, key)
        result[key] = x
    return result


def with_prefix(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


def build(
    path: Path, name: str = PLAIN, args: dict[str, Any] | None = None, **checkpoint: Any
) -> Backbone:
    config = model_options(
        name=name,
        library="timm",
        weights=str(path),
        args={**ARGS[name], **(args or {})},
        input_size=[SIZES[name]] * 2,
        checkpoint=CheckpointConfig(**checkpoint),
    )
    return build_backbone(config, 5)


MASK = {"mask_token": torch.zeros(1, 48)}
HEAD = {"head.weight": torch.zeros(37, 48), "head.bias": torch.zeros(37)}
DECODER = {
    "decoder_pos_embed": torch.zeros(1, 17, 32),
    "decoder_blocks.0.norm.weight": torch.ones(3),
}
LOSS = {"loss.centers": torch.zeros(9, 4)}

EQUAL: dict[str, Callable[[State], Any]] = {
    "plain": lambda s: s,
    "state_dict": lambda s: {"state_dict": s, "epoch": 3},
    "DataParallel": lambda s: with_prefix("module.", s),
    "half": lambda s: {name: value.half() for name, value in s.items()},
    "official DINOv2": lambda s: {**s, **MASK},
    "compiled": lambda s: with_prefix("_orig_mod.", s),
    "compiled, DataParallel": lambda s: with_prefix("module._orig_mod.", s),
    "backbone and head": lambda s: {**with_prefix("backbone.", s), **HEAD},
    "Lightning": lambda s: {
        "state_dict": {**with_prefix("model.", s), **LOSS},
        "hparams": {"lr": 1},
    },
    "MAE": lambda s: {"model": {**s, **MASK, **DECODER}},
    "optimiser": lambda s: {"net": s, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}},
    "an equal copy": lambda s: {"model": s, "model_ema": {k: v.clone() for k, v in s.items()}},
}

DROPPED = {
    "official DINOv2": "1 tensor left out, as no part of the model: mask_token (1)",
    "MAE": "decoder_blocks (1)",
    "backbone and head": "head (2)",
    "Lightning": "loss (1)",
}
"""Kind -> what the message about tensors that are left out names."""

SEVERAL: dict[str, tuple[Callable[[State, State], Any], str]] = {
    "EMA": (lambda s, t: {"model": s, "model_ema": t}, "model_ema/"),
    "EMA of timm": (lambda s, t: {"state_dict": s, "state_dict_ema": t}, "state_dict_ema/"),
    "EMA beside the names themselves": (lambda s, t: {**t, **with_prefix("ema.", s)}, ""),
    "DINO": (
        lambda s, t: {
            "student": with_prefix("module.backbone.", s),
            "teacher": {**with_prefix("backbone.", t), "head.mlp.0.weight": torch.ones(2, 2)},
        },
        "teacher/backbone.",
    ),
    "MoCo": (
        lambda s, t: {
            "state_dict": {
                **with_prefix("module.base_encoder.", s),
                **with_prefix("module.momentum_encoder.", t),
            }
        },
        "state_dict/module.momentum_encoder.",
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[Callable[[State], Any], str]] = {
    "five blocks": (lambda s: state_of(PLAIN, depth=5), r"unexpected \(blocks\.3\.attn"),
    "fc_norm for norm": (
        lambda s: {k.replace("norm.", "fc_norm.") if k[:5] == "norm." else k: s[k] for k in s},
        r"2 keys missing \(norm\.bias, norm\.weight\)",
    ),
    "names of Hugging Face": (
        lambda s: with_prefix("encoder.", renamed(s, (r"blocks\.", "layer."))),
        "keys missing",
    ),
    "registers": (lambda s: {**s, "register_tokens": torch.zeros(1, 4, 48)}, "register_tokens"),
    "patches of 8": (lambda s: state_of(PLAIN, patch_size=8, img_size=32), "of another shape"),
    "112 pixels": (lambda s: state_of(PLAIN, img_size=112), r"pos_embed \(1, 65, 48\) instead of"),
}  # fmt: skip


def is_equal(backbone: Backbone, state: State, is_half: bool = False) -> bool:
    own = backbone.module.state_dict()
    expected = {k: v.half().float() if is_half else v for k, v in state.items()}
    return own.keys() == state.keys() and all(torch.equal(own[k], expected[k]) for k in own)


@pytest.mark.parametrize("kind", EQUAL)
def test_these_are_the_model_that_was_saved(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = state_of(PLAIN)
    backbone = build(saved(tmp_path, EQUAL[kind](state)))
    assert is_equal(backbone, state, kind == "half")
    said = capsys.readouterr().err
    assert DROPPED.get(kind, "") in said
    if kind in ("plain", "half", "DataParallel", "compiled"):
        assert "left out" not in said


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_state_dicts_of_one_model_are_named(tmp_path: Path, kind: str) -> None:
    make, prefix = SEVERAL[kind]
    student, teacher = state_of(PLAIN, 0), state_of(PLAIN, 1)
    path = saved(tmp_path, make(student, teacher))
    with pytest.raises(WeightsError, match=f"holds 2 state dicts .*'{prefix}'"):
        build(path)
    assert is_equal(build(path, prefix=prefix), teacher)


def test_the_one_with_a_head_is_taken_of_equal_backbones(tmp_path: Path) -> None:
    state = state_of(PLAIN, num_classes=5)
    backbone = {name: x for name, x in state.items() if not name.startswith("head.")}
    path = saved(tmp_path, {"backbone": backbone, "model": state})
    assert is_equal(build(path), state)


def test_two_heads_on_one_backbone_are_named(tmp_path: Path) -> None:
    """Trained with a frozen backbone: the averaged weights differ in the head only."""
    state = state_of(PLAIN, num_classes=5)
    averaged = {name: x + 1 if name.startswith("head.") else x for name, x in state.items()}
    path = saved(tmp_path, {"state_dict": state, "state_dict_ema": averaged})
    with pytest.raises(WeightsError, match=r"holds 2 state dicts .*'state_dict_ema/'"):
        build(path)
    assert is_equal(build(path, prefix="state_dict_ema/"), averaged)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(WeightsError, match=message):
        build(saved(tmp_path, make(state_of(PLAIN))))


def test_a_head_is_built_for_the_classes_of_the_file(tmp_path: Path) -> None:
    """Also in a model that usually has no head, and not for a head of other features."""
    state = state_of(PLAIN, num_classes=37)
    path = saved(tmp_path, {"state_dict": state})
    assert is_equal(build(path), state)
    path = saved(tmp_path, {**state, "head.weight": torch.zeros(37, 96)})
    assert is_equal(build(path), {k: x for k, x in state.items() if not k.startswith("head.")})


@pytest.mark.parametrize("library", ["timm", "torchvision", "custom"])
def test_a_prefix_without_a_file_has_no_effect(library: str) -> None:
    own = {"factory": "a:b"} if library == "custom" else {}
    options = {"checkpoint": CheckpointConfig("x."), **own}
    with pytest.raises(ConfigError, match=r"in model\.weights only"):
        build_backbone(model_options(name="resnet18", library=library, **options), 0)


# Files that a function of timm converts


def official_dinov2(state: State) -> State:
    """Facebook's file with registers: the class token has a position of its own."""
    position = torch.randn(1, 1, 48, generator=torch.Generator().manual_seed(3))
    return {
        **{key: x for key, x in state.items() if key != "reg_token"},
        "cls_token": state["cls_token"] - position,
        "pos_embed": torch.cat([position, state["pos_embed"]], dim=1),
        "register_tokens": state["reg_token"],
        "mask_token": torch.ones(1, 48),
    }


def official_dinov3(state: State) -> State:
    """Facebook's file: a bias of zeros that timm's model lacks, and constants of the code."""
    official = renamed(state, ("gamma_([12])", r"ls\1.gamma"), ("reg_token", "storage_tokens"))
    for block in range(VIT["depth"]):
        official[f"blocks.{block}.attn.qkv.bias"] = torch.zeros(144)
        official[f"blocks.{block}.attn.qkv.bias_mask"] = torch.ones(144)
    return {
        **official,
        "rope_embed.periods": torch.ones(4),
        "mask_token": torch.ones(1, 48),
    }


def official_swin(state: State) -> State:
    """Microsoft's file: the layers reduce their size at their end, and tables of positions."""
    official = renamed(state, (r"layers\.1\.downsample", "layers.0.downsample"))
    for name in [n for n in official if n.endswith("relative_position_bias_table")]:
        stem = name.removesuffix("relative_position_bias_table")
        official[f"{stem}relative_position_index"] = torch.arange(256).reshape(16, 16)
    return {**official, "layers.0.blocks.1.attn_mask": torch.ones(4, 16, 16)}


OFFICIAL: dict[str, tuple[str, Callable[[State], State]]] = {
    "DINOv2 with registers": (REGISTERS, official_dinov2),
    "DINOv3": (DINOV3, official_dinov3),
    "Swin": (SWIN_NAME, official_swin),
}


@pytest.mark.parametrize("kind", OFFICIAL)
def test_official_files_become_the_model_of_timm(tmp_path: Path, kind: str) -> None:
    name, official = OFFICIAL[kind]
    expected = made(name)
    backbone = build(saved(tmp_path, {"model": official(state_of(name))}), name)
    own = backbone.module.state_dict()
    for key, x in expected.state_dict().items():
        torch.testing.assert_close(own[key], x, rtol=0, atol=1e-6)
    x = torch.randn(2, 3, SIZES[name], SIZES[name])
    with torch.no_grad():
        torch.testing.assert_close(backbone.module(x), expected(x), rtol=1e-4, atol=1e-5)
    assert backbone.checkpoint["prefix"] == "model/"
    assert backbone.checkpoint["convert"].endswith("checkpoint_filter_fn")


def test_what_a_conversion_leaves_out_is_recorded(tmp_path: Path) -> None:
    backbone = build(saved(tmp_path, official_dinov2(state_of(REGISTERS))), REGISTERS)
    assert dict(backbone.checkpoint) == {
        "convert": "timm.models.vision_transformer.checkpoint_filter_fn",
        "dropped": ["mask_token"],
    }


def test_values_that_a_conversion_would_lose_are_refused(tmp_path: Path) -> None:
    """timm's filter drops this bias, of a model trained with it, without a word."""
    official = official_dinov3(state_of(DINOV3))
    official["blocks.1.attn.qkv.bias"][7] = 0.25
    with pytest.raises(WeightsError, match=r"blocks\.1\.attn\.qkv\.bias would be lost"):
        build(saved(tmp_path, official), DINOV3)


def test_a_missing_tensor_is_refused_after_a_conversion_too(tmp_path: Path) -> None:
    official = official_dinov2(state_of(REGISTERS))
    del official["blocks.1.norm1.bias"]
    with pytest.raises(WeightsError, match=r"2 keys missing.* Converted by .*: 1 key missing"):
        build(saved(tmp_path, official), REGISTERS)


def test_two_models_with_official_names_are_refused(tmp_path: Path) -> None:
    files = {key: official_dinov2(state_of(REGISTERS, seed)) for seed, key in enumerate("ab")}
    path = saved(tmp_path, files)
    with pytest.raises(WeightsError, match=r"holds 2 state dicts .*'a/', 'b/'"):
        build(path, REGISTERS)
    backbone = build(path, REGISTERS, prefix="b/")
    key = "blocks.0.attn.qkv.weight"
    assert torch.equal(backbone.module.state_dict()[key], files["b"][key])


def test_without_conversion_official_names_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, official_dinov2(state_of(REGISTERS)))
    with pytest.raises(WeightsError, match=r"missing.*reg_token.*unexpected \(register_tokens\)"):
        build(path, REGISTERS, convert="none")


@pytest.mark.parametrize("made_for", [{"img_size": 112}, {"patch_size": 8, "img_size": 32}])
def test_resampling_has_to_be_asked_for(tmp_path: Path, made_for: dict[str, int]) -> None:
    path = saved(tmp_path, state_of(PLAIN, **made_for))
    with pytest.raises(WeightsError, match=r"would be resampled.*checkpoint\.convert=resample"):
        build(path, PLAIN)
    backbone = build(path, PLAIN, convert="resample")
    [changed] = backbone.checkpoint["resample"]
    assert changed == ("patch_embed.proj.weight" if "patch_size" in made_for else "pos_embed")
    expected = timm.create_model(
        PLAIN, pretrained=True, pretrained_cfg_overlay={"file": str(path)}, img_size=56, **VIT
    ).state_dict()
    own = backbone.module.state_dict()
    assert all(torch.equal(own[key], x) for key, x in expected.items())


def test_a_family_without_a_conversion_says_so(tmp_path: Path) -> None:
    state = timm.create_model("test_resnet").state_dict()
    config = model_options(
        name="test_resnet",
        library="timm",
        weights=str(saved(tmp_path, state)),
        checkpoint=CheckpointConfig(convert="timm"),
    )
    with pytest.raises(ConfigError, match="no function that converts files of test_resnet"):
        build_backbone(config, 0)


@pytest.mark.parametrize("option", [{"convert": "timm"}, {"convert": "resample"}])
@pytest.mark.parametrize("library", ["torchvision", "custom"])
def test_other_libraries_convert_nothing(
    tmp_path: Path, library: str, option: dict[str, Any]
) -> None:
    own = {"factory": "a:b"} if library == "custom" else {}
    options = {"checkpoint": CheckpointConfig(**option), "weights": str(tmp_path / "w.pth"), **own}
    with pytest.raises(ConfigError, match="with model=timm only"):
        build_backbone(model_options(name="resnet18", library=library, **options), 0)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="convert=tim: expected one of auto, none, timm"):
        CheckpointConfig(convert="tim")
    with pytest.raises(ConfigError, match="the 64 hex digits"):
        CheckpointConfig(sha256="12ab")
