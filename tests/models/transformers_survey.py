"""A small model of every family of transformers: what featx takes as embedding, tokens and stages.

    python tests/models/transformers_survey.py

writes its table in surveys.md anew. Each value is compared with a plain call of transformers on
the same folder: its own AutoModel, whose outputs are taken apart by the expressions in `EXPECTED`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm_survey import is_close, run_captures, write_table
from transformers_zoo import SMALL, quiet, tf, write_folder

from featx.config import ReduceConfig, make_reduce, model_options
from featx.engine import Engine
from featx.errors import LayerError, ReduceError
from featx.layers import select
from featx.models import Backbone, build_backbone


def _cls(output: Any) -> torch.Tensor:
    return output.last_hidden_state[:, 0]


def _pooled(output: Any) -> torch.Tensor:
    return output.pooler_output


@dataclass(frozen=True)
class Expected:
    """What transformers gives for one family.

    Attributes:
        words: the embedding, as the table says it.
        embedding: output of the model -> (B, D).
        prefix: number of tokens before the patch tokens; None if the model has no tokens.
        cls: whether the first of them is the class token.
    """

    words: str
    embedding: Callable[[Any], torch.Tensor]
    prefix: int | None
    cls: bool = False


POOLED = "`pooler_output`"
CLASS_TOKEN = Expected("class token of `last_hidden_state`", _cls, 1, True)
NORM_OF_CLASS_TOKEN = Expected(f"{POOLED}: norm of the class token", _pooled, 1, True)
NORM_OF_PATCHES = Expected(f"{POOLED}: norm of the mean of the patch tokens", _pooled, 1, True)
NORM_OF_MAP = Expected(f"{POOLED}: norm of the mean of the map", _pooled, None)
MAP = Expected(f"{POOLED}: mean of the map", _pooled, None)
MAP_1X1 = Expected(MAP.words, lambda output: output.pooler_output[..., 0, 0], None)
MEAN_OF_TOKENS = Expected(f"{POOLED}: mean of the tokens", _pooled, 0)
ATTENTION_POOLING = Expected(f"{POOLED}: attention pooling", _pooled, 0)
MEAN_OF_MAP = Expected(
    "mean of `last_hidden_state`", lambda output: output.last_hidden_state.mean((2, 3)), None
)
EXPECTED = {
    "aimv2_vision_model": ATTENTION_POOLING,
    "beit": NORM_OF_PATCHES,
    "blip_vision_model": NORM_OF_CLASS_TOKEN,
    "chinese_clip": NORM_OF_CLASS_TOKEN,
    "chinese_clip_vision_model": NORM_OF_CLASS_TOKEN,
    "clip": NORM_OF_CLASS_TOKEN,
    "clip_vision_model": NORM_OF_CLASS_TOKEN,
    "convnext": NORM_OF_MAP,
    "convnextv2": NORM_OF_MAP,
    "data2vec-vision": NORM_OF_PATCHES,
    "deit": Expected(CLASS_TOKEN.words, _cls, 2, True),
    "dinov2": CLASS_TOKEN,
    "dinov2_with_registers": Expected(CLASS_TOKEN.words, _cls, 5, True),
    "dinov3_convnext": Expected(f"{POOLED}: norm of the mean of the map", _pooled, 1),
    "dinov3_vit": Expected(CLASS_TOKEN.words, _cls, 5, True),
    "dpt": Expected(f"{POOLED}: dense layer of the class token", _pooled, 1, True),
    "focalnet": MEAN_OF_TOKENS,
    "hiera": Expected(f"{POOLED}: norm of the mean of the tokens", _pooled, 0),
    "ijepa": Expected("mean of `last_hidden_state`", lambda o: o.last_hidden_state.mean(1), 0),
    "levit": MEAN_OF_TOKENS,
    "mlcd_vision_model": NORM_OF_CLASS_TOKEN,
    "mobilenet_v1": MAP,
    "mobilenet_v2": MAP,
    "mobilevit": MAP,
    "mobilevitv2": MAP,
    "pixio": Expected(f"{POOLED}: mean of its 8 class tokens", _pooled, 8),
    "poolformer": MEAN_OF_MAP,
    "pvt": CLASS_TOKEN,
    "pvt_v2": MEAN_OF_MAP,
    "regnet": MAP_1X1,
    "resnet": MAP_1X1,
    "segformer": MEAN_OF_MAP,
    "siglip": ATTENTION_POOLING,
    "siglip_vision_model": ATTENTION_POOLING,
    "swiftformer": MEAN_OF_MAP,
    "swin": MEAN_OF_TOKENS,
    "swinv2": MEAN_OF_TOKENS,
    "vit": CLASS_TOKEN,
    "vit_mae": CLASS_TOKEN,
    "vit_msn": CLASS_TOKEN,
    "vitdet": MEAN_OF_MAP,
}
"""model_type -> what transformers gives, written down beside featx's own table."""


def survey(model_type: str, folder: Path) -> str:
    """Compare one family with plain calls of transformers; return its row of the table.

    Args:
        model_type: the family.
        folder: folder of its small model.

    Raises:
        AssertionError: featx gives other values than transformers.
    """
    backbone = build_backbone(model_options(library="transformers", name=str(folder)), 0)
    x = torch.randn(2, 3, *backbone.preprocess.crop, generator=torch.Generator().manual_seed(1))
    expected, output = EXPECTED[model_type], plain_output(model_type, folder, x)
    with Engine(backbone, torch.device("cpu"), "float32") as engine:
        [(_, found)] = run(engine, "embedding", x)
        assert is_close(found, expected.embedding(output)), "embedding is not that of transformers"
        tokens = _tokens(engine, expected, output, x)
        stages = _stages(engine, output, x)
        kind = type(backbone.module).__name__
    cells = f"`{model_type}`", f"`{kind}`", expected.words, *tokens, *stages
    return f"| {' | '.join(cells)} |"


@torch.no_grad()
def plain_output(model_type: str, folder: Path, x: torch.Tensor) -> Any:
    """What the part of a model that reads images returns, opened by transformers alone."""
    with quiet():
        if model_type == "vit_mae":  # ViTMAEModel drops three quarters of the tokens
            config = tf.ViTConfig(**tf.AutoConfig.from_pretrained(folder).to_dict())
            model = tf.ViTModel.from_pretrained(folder, config=config, add_pooling_layer=False)
        elif model_type == "blip_vision_model":  # AutoModel does not know it
            model = tf.BlipVisionModel.from_pretrained(folder)
        elif model_type == "data2vec-vision":  # AutoModel leaves its pooler out
            model = tf.Data2VecVisionModel.from_pretrained(folder, add_pooling_layer=True)
        else:
            model = tf.AutoModel.from_pretrained(folder)
        model = getattr(model, "vision_model", model).eval()
        return model(pixel_values=x.clone(), output_hidden_states=True)


def run(
    engine: Engine, request: str, x: torch.Tensor, reduce: ReduceConfig | None = None
) -> list[tuple[Any, torch.Tensor]]:
    """The captures of one request, each with the rows that a run stores."""
    engine.backbone.module.requires_grad_(False)  # as before the first `configure_compute`
    traced = engine.trace([request])
    chosen = select(
        [(request, reduce or ReduceConfig())], traced, None, engine.backbone.stages
    ).chosen
    return run_captures(engine, chosen, x)


def _tokens(engine: Engine, expected: Expected, output: Any, x: torch.Tensor) -> tuple[str, str]:
    """The layer that gives `last_hidden_state`, and what cls and patch_avg of it are."""
    last = output.last_hidden_state
    if expected.prefix is None:
        return "a map", ""
    layer = _layer_of(engine, last, x)
    words = []
    for name, rows in (("cls", last[:, 0]), ("patch_avg", last[:, expected.prefix :].mean(1))):
        try:
            [(_, found)] = run(engine, layer, x, make_reduce(name))
        except ReduceError:
            continue
        assert name != "cls" or expected.cls, "a token that is no class token"
        assert is_close(found, rows), f"reduce={name} of {layer}"
        words.append(f"`{name}`")
    assert ("`cls`" in words) == expected.cls
    prefix = engine.backbone.num_prefix_tokens
    assert prefix == expected.prefix
    return f"`{layer}`, {prefix} prefix", ", ".join(words) or "refused"


def _layer_of(engine: Engine, expected: torch.Tensor, x: torch.Tensor) -> str:
    """Name of the last layer whose output is `last_hidden_state`."""
    engine.backbone.module.requires_grad_(False)
    traced = engine.trace()
    for call in reversed(traced.calls):
        if not call.module or tuple(expected.shape) not in call.outputs.values():
            continue
        [(_, found)] = run(engine, f"{call.module}@{call.number}", x)
        if is_close(found, expected):
            return traced.call_name(call)
    raise AssertionError("no layer gives last_hidden_state")


def _stages(engine: Engine, output: Any, x: torch.Tensor) -> tuple[str, str]:
    """What `stages` gives beside the hidden states of transformers; `reduce=grid` of it."""
    found = run(engine, "stages", x)
    hidden = list(output.hidden_states)
    same = 0
    for point, value in found:
        shrunk = _shrunk(engine.backbone.module, point.module, value)
        same += any(is_close(view, x) for x in hidden for view in (shrunk, _as_map(shrunk, x)))
    words = f"{len(found)}, `{found[0][0].layer}` and on"
    if same == len(found):
        words += ", its hidden states"
    elif same:
        words += f", {same} of its hidden states"
    return words, _grids(engine, found, x)


def _as_map(value: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Tokens as the map that a hidden state is, if it is one with as many numbers."""
    is_map = value.dim() == 3 and hidden.dim() == 4 and value.numel() == hidden.numel()
    return value.transpose(1, 2).reshape(hidden.shape) if is_map else value


@torch.no_grad()
def _shrunk(module: Any, block: str, value: torch.Tensor) -> torch.Tensor:
    """The output of the last block of a stage as the stage passes it on, which may shrink it."""
    stage = block.rpartition(".")[0].rpartition(".")[0]
    downsample = getattr(module.get_submodule(stage), "downsample", None)
    if downsample is None:
        return value
    side = round(value.shape[1] ** 0.5)
    if "FocalNet" in type(downsample).__name__:
        return downsample(value.transpose(1, 2).reshape(len(value), -1, side, side))[0]
    return downsample(value, (side, side))


def _grids(engine: Engine, found: list[tuple[Any, torch.Tensor]], x: torch.Tensor) -> str:
    right, refused = 0, 0
    for point, value in found:
        try:
            [(_, grid)] = run(engine, point.name, x, make_reduce("grid", size=2))
        except (ReduceError, LayerError):
            refused += 1
            continue
        assert is_close(grid, _as_grid(value, engine.backbone)), f"reduce=grid of {point.name}"
        right += 1
    words = [f"{right} right"] * bool(right) + [f"{refused} refused"] * bool(refused)
    return "; ".join(words)


def _as_grid(value: torch.Tensor, backbone: Backbone) -> torch.Tensor:
    """2 x 2 means of a map or of patch tokens in rows."""
    if value.dim() == 3:
        patches = value[:, backbone.num_prefix_tokens :]
        side = round(patches.shape[1] ** 0.5)
        value = patches.transpose(1, 2).reshape(len(value), -1, side, side)
    return torch.nn.functional.adaptive_avg_pool2d(value, 2)


def table(root: Path) -> str:
    """The table of surveys.md."""
    rows = []
    for model_type in SMALL:
        rows.append(survey(model_type, write_folder(root / model_type, model_type)))
        sys.stderr.write(f"{rows[-1]}\n")
    head = "| model_type | class | `embedding` | `last_hidden_state` | its reductions | `stages` |"
    return f"{head} `grid` of these |\n|{'---|' * 7}\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made_in:
        write_table("transformers", lambda: table(Path(made_in)))
