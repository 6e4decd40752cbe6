"""Checkpoints of other training code: equal to the model that was saved, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from featx.config import CheckpointConfig, model_options
from featx.errors import ConfigError, WeightsError
from featx.models import build_backbone, seeded

ARGS = {"depth": 3, "embed_dim": 48, "num_heads": 3}
State = dict[str, torch.Tensor]


def vit(seed: int = 0, **more: Any) -> State:
    """State dict of a small model of the family of DINOv2, without a head."""
    with seeded(seed):
        model = timm.create_model("vit_small_patch14_dinov2", **{"img_size": 56, **ARGS, **more})
    return {name: value.clone() for name, value in model.state_dict().items()}


def with_prefix(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


def renamed(state: State, old: str, new: str) -> State:
    return {key.replace(old, new): value for key, value in state.items()}


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
    "five blocks": (lambda s: vit(depth=5), r"unexpected \(blocks\.3\.attn"),
    "fc_norm for norm": (
        lambda s: {k.replace("norm.", "fc_norm.") if k[:5] == "norm." else k: s[k] for k in s},
        r"2 keys missing \(norm\.bias, norm\.weight\)",
    ),
    "names of Hugging Face": (
        lambda s: with_prefix("encoder.", renamed(s, "blocks.", "layer.")),
        "keys missing",
    ),
    "registers": (lambda s: {**s, "register_tokens": torch.zeros(1, 4, 48)}, "register_tokens"),
    "patches of 8": (lambda s: vit(patch_size=8, img_size=32), "of another shape"),
    "112 pixels": (lambda s: vit(img_size=112), r"pos_embed \(1, 65, 48\) instead of"),
}  # fmt: skip


def build(path: Path, **options: Any) -> torch.nn.Module:
    config = model_options(
        name="vit_small_patch14_dinov2",
        library="timm",
        weights=str(path),
        args=ARGS,
        input_size=[56, 56],
        **options,
    )
    return build_backbone(config, 5).module


def saved(folder: Path, checkpoint: Any) -> Path:
    torch.save(checkpoint, folder / "checkpoint.pth")
    return folder / "checkpoint.pth"


def is_equal(module: torch.nn.Module, state: State, is_half: bool = False) -> bool:
    own = module.state_dict()
    expected = {k: v.half().float() if is_half else v for k, v in state.items()}
    return own.keys() == state.keys() and all(torch.equal(own[k], expected[k]) for k in own)


@pytest.mark.parametrize("kind", EQUAL)
def test_these_are_the_model_that_was_saved(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = vit()
    module = build(saved(tmp_path, EQUAL[kind](state)))
    assert is_equal(module, state, kind == "half")
    said = capsys.readouterr().err
    assert DROPPED.get(kind, "") in said
    if kind in ("plain", "half", "DataParallel", "compiled"):
        assert "left out" not in said


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_state_dicts_of_one_model_are_named(tmp_path: Path, kind: str) -> None:
    make, prefix = SEVERAL[kind]
    student, teacher = vit(0), vit(1)
    path = saved(tmp_path, make(student, teacher))
    with pytest.raises(WeightsError, match=f"holds 2 state dicts .*'{prefix}'"):
        build(path)
    assert is_equal(build(path, checkpoint=CheckpointConfig(prefix)), teacher)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(WeightsError, match=message):
        build(saved(tmp_path, make(vit())))


def test_a_head_is_built_for_the_classes_of_the_file(tmp_path: Path) -> None:
    """Also in a model that usually has no head, and not for a head of other features."""
    state = vit(num_classes=37)
    path = saved(tmp_path, {"state_dict": state})
    assert is_equal(build(path), state)
    path = saved(tmp_path, {**state, "head.weight": torch.zeros(37, 96)})
    assert is_equal(build(path), {k: x for k, x in state.items() if not k.startswith("head.")})
    path = saved(tmp_path, {"state_dict": state})
    config = {"name": "vit_small_patch14_dinov2", "library": "timm", "input_size": [56, 56]}
    for classes, expected in ((37, state), (0, None)):
        asked = model_options(**config, weights=str(path), args={**ARGS, "num_classes": classes})
        own = build_backbone(asked, 0).module.state_dict()
        assert ("head.weight" in own) == (expected is not None)
        assert all(torch.equal(own[name], state[name]) for name in own)
    asked = model_options(**config, weights=str(path), args={**ARGS, "num_classes": 12})
    with pytest.raises(WeightsError, match=r"head\.weight \(37, 48\) .*num_classes: N"):
        build_backbone(asked, 0)


@pytest.mark.parametrize("library", ["timm", "torchvision", "custom"])
def test_a_prefix_without_a_file_has_no_effect(library: str) -> None:
    own = {"factory": "a:b"} if library == "custom" else {}
    with pytest.raises(ConfigError, match=r"in model\.weights only"):
        build_backbone(
            model_options(
                name="resnet18", library=library, checkpoint=CheckpointConfig("x."), **own
            ),
            0,
        )
