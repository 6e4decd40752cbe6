"""Small CLIP models of open_clip with random weights: as folders, as files, and as a tag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

open_clip = pytest.importorskip("open_clip", reason="the extra clip is not installed")

VISION: dict[str, Any] = {
    "image_size": 32,
    "layers": 3,
    "width": 32,
    "head_width": 8,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    "context_length": 16,
    "vocab_size": 49408,
    "width": 16,
    "heads": 2,
    "layers": 1,
}
SMALL: dict[str, dict[str, Any]] = {
    "vit": {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT},
    "quick_gelu": {
        "embed_dim": 12,
        "vision_cfg": VISION,
        "text_cfg": TEXT,
        "quick_gelu": True,
    },
    "resnet": {
        "embed_dim": 12,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
        "text_cfg": TEXT,
    },
    "timm": {
        "embed_dim": 64,
        "vision_cfg": {
            "timm_model_name": "test_vit",
            "timm_model_pretrained": False,
            "timm_pool": "map",
            "timm_proj": "none",
            "image_size": 160,
        },
        "text_cfg": TEXT,
        "custom_text": True,
        "init_logit_bias": -10,
    },
    "coca": {
        "embed_dim": 12,
        "vision_cfg": {**VISION, "attentional_pool": True, "attn_pooler_heads": 4}
        | {"output_tokens": True},
        "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {**TEXT, "attn_pooler_heads": 2},
        "custom_text": True,
    },
}
"""Name -> configuration; each builds another class of open_clip."""

NAME = "featx-small-ViT"
"""Architecture that `registered` adds to open_clip."""


def preprocess_of(name: str) -> dict[str, Any]:
    """What a folder says about the images; other values than the default."""
    return {
        "size": SMALL[name]["vision_cfg"]["image_size"],
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.4],
        "interpolation": "bilinear" if name == "resnet" else "bicubic",
        "resize_mode": "squash" if name == "timm" else "shortest",
    }


def write_folder(folder: Path, name: str) -> Path:
    """Write a small model as open_clip's push_to_hf_hub does, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model_cfg": SMALL[name], "preprocess_cfg": preprocess_of(name)}
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
        if name == "coca":  # open_clip leaves this parameter as the memory was
            torch.nn.init.normal_(model.text_decoder.text_projection)
    save_file(
        {key: x.clone() for key, x in model.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    return folder


def plain_model(folder: Path) -> tuple[Any, Any]:
    """The model and its transform, as open_clip alone opens the folder."""
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    return model.eval(), transform


def register(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """Add an architecture with two tags to open_clip; the weights are those of a folder."""
    config = folder / f"{NAME}.json"
    config.write_text(json.dumps(SMALL["vit"]))
    file = str(folder / "open_clip_model.safetensors")
    squash = {"resize_mode": "squash", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    patch.setattr(open_clip.factory, "_MODEL_CONFIGS", {**open_clip.factory._MODEL_CONFIGS})
    patch.setattr(
        open_clip.factory, "_MODEL_CONFIG_PATHS", [*open_clip.factory._MODEL_CONFIG_PATHS]
    )
    open_clip.add_model_config(config)
    tags = {
        "openai": {"file": file, "quick_gelu": True},
        "other": {"file": file, **squash},
        "far": {"hf_hub": "featx/no-such-model/"},
    }
    patch.setitem(open_clip.pretrained._PRETRAINED, NAME, tags)
    return NAME
