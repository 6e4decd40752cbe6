"""One member of every file of timm: `embedding`, `stages` and `reduce=grid` against timm's own API.

    python tests/models/timm_survey.py

writes its table in surveys.md anew. The weights are random, and so are all that timm sets to a
constant: statistics and weights of normalisations, layer scales. Else a layer in front of a fresh
BatchNorm would pass for the one behind it.
"""

from __future__ import annotations

import gc
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F

from featx.config import ReduceConfig, make_reduce
from featx.engine import Compute, Engine
from featx.errors import FeatxError, LayerError, ReduceError
from featx.layers import CapturePoint, select
from featx.models import Backbone
from featx.models.libraries.timm import wrap

TABLES = Path(__file__).with_name("surveys.md")
CLOSE = 1e-5
"""Largest difference to timm's values, relative to the largest of them."""


@dataclass(frozen=True)
class Member:
    """An architecture as it is built here.

    Attributes:
        file: module of timm.models.
        name: registered name.
        side: of the images, in pixels; smaller than usual where the architecture allows it.
        options: for timm.create_model.
    """

    file: str
    name: str
    side: int = 64
    options: dict[str, Any] = field(default_factory=dict)


def _sized(file: str, name: str, side: int = 64, **options: Any) -> Member:
    return Member(file, name, side, {"img_size": side, **options})


MEMBERS = (
    _sized("beit", "beit_base_patch16_224"),
    _sized("byoanet", "halonet_h1", 256),
    _sized("byobnet", "test_byobnet"),
    _sized("cait", "cait_xxs24_224"),
    _sized("coat", "coat_tiny"),
    _sized("convit", "convit_tiny"),
    Member("convmixer", "convmixer_768_32"),
    Member("convnext", "test_convnext"),
    Member("cpubone", "cpubone_nano"),
    Member("crossvit", "crossvit_tiny_240", 240),
    Member("csatv2", "csatv2"),
    Member("cspnet", "cs3darknet_focus_s"),
    Member("cspnext", "cspnext_tiny"),
    Member("davit", "davit_tiny"),
    _sized("deepseek_vit", "deepseek_vit_412m", 224, depth=2),
    _sized("deit", "deit_tiny_patch16_224"),
    _sized("deit", "deit_tiny_distilled_patch16_224"),
    Member("densenet", "densenet121"),
    Member("dla", "dla46x_c"),
    Member("dpn", "dpn48b"),
    Member("edgenext", "edgenext_xx_small"),
    _sized("efficientformer", "efficientformer_l1", 224),
    _sized("efficientformer_v2", "efficientformerv2_s0"),
    Member("efficientnet", "test_efficientnet"),
    Member("efficientvim", "efficientvim_m1"),
    Member("efficientvit_mit", "efficientvit_b0"),
    _sized("efficientvit_msra", "efficientvit_m0"),
    _sized("eva", "vit_tiny_patch16_dinov3_qkvb"),
    Member("fasternet", "fasternet_t0"),
    Member("fastvit", "fastvit_t8"),
    Member("focalnet", "focalnet_tiny_srf"),
    _sized("gcvit", "gcvit_xxtiny"),
    _sized("gemma4_vit", "gemma4_vit_167m"),
    Member("ghostnet", "ghostnet_050"),
    Member("hardcorenas", "hardcorenas_b"),
    Member("hgnet", "hgnetv2_b0"),
    _sized("hiera", "hiera_tiny_224"),
    Member("hieradet_sam2", "sam2_hiera_tiny"),
    Member("hrnet", "hrnet_w18_small"),
    Member("iformer", "iformer_t"),
    Member("inception_next", "inception_next_atto"),
    Member("inception_resnet_v2", "inception_resnet_v2", 96),
    Member("inception_v3", "inception_v3", 96),
    Member("inception_v4", "inception_v4", 96),
    Member("lcnetv2", "lcnetv2_small"),
    _sized("levit", "levit_128s"),
    Member("lowformer", "lowformer_b0"),
    Member("mambaout", "test_mambaout"),
    _sized("maxxvit", "test_coatnet"),
    Member("metaformer", "poolformerv2_s12"),
    _sized("mlp_mixer", "gmlp_ti16_224"),
    Member("mobilenetv3", "mobilenetv3_small_050"),
    Member("mobilenetv5", "mobilenetv5_base"),
    Member("mobilenetv5", "mobilenetv5_300m_enc", options={"channel_multiplier": 0.25}),
    _sized("mobilevit", "mobilevit_xxs"),
    _sized("mvitv2", "mvitv2_tiny"),
    _sized("naflexvit", "naflexvit_base_patch16_parfac_gap"),
    Member("nasnet", "nasnetalarge"),
    _sized("nest", "nest_tiny_jx"),
    Member("nextvit", "nextvit_small"),
    Member("nfnet", "test_nfnet"),
    _sized("pit", "pit_ti_224"),
    Member("pnasnet", "pnasnet5large"),
    Member("pvt_v2", "pvt_v2_b0"),
    _sized("qwen3_vit", "qwen3_vit_88m"),
    _sized("qwen3_vit", "qwen3_vit_88m_enc"),
    Member("rdnet", "rdnet_tiny"),
    Member("regnet", "regnetx_002"),
    Member("repghost", "repghostnet_050"),
    _sized("repvit", "repvit_m1"),
    Member("res2net", "res2next50"),
    Member("resnest", "resnest14d"),
    Member("resnet", "test_resnet"),
    Member("resnetv2", "resnetv2_18"),
    Member("rexnet", "rexnet_100"),
    Member("selecsls", "selecsls42"),
    Member("senet", "legacy_seresnet18"),
    _sized("sequencer", "sequencer2d_s"),
    Member("shvit", "shvit_s1"),
    Member("sknet", "skresnet18"),
    Member("starnet", "starnet_s050"),
    _sized("swiftformer", "swiftformer_xs"),
    _sized("swin_transformer", "swin_tiny_patch4_window7_224"),
    _sized("swin_transformer_v2", "swinv2_tiny_window16_256"),
    _sized("swin_transformer_v2_cr", "swinv2_cr_tiny_224"),
    Member("tiny_vit", "tiny_vit_5m_224"),
    _sized("tnt", "tnt_s_legacy_patch16_224"),
    Member("tresnet", "tresnet_m"),
    _sized("twins", "twins_svt_small"),
    Member("vgg", "vgg11"),
    _sized("visformer", "visformer_tiny"),
    _sized("vision_transformer", "test_vit"),
    _sized("vision_transformer", "test_vit2"),
    _sized("vision_transformer", "test_vit3"),
    _sized("vision_transformer_hybrid", "vit_tiny_r_s16_p8_224"),
    _sized("vision_transformer_relpos", "test_vit_relpos"),
    _sized("vision_transformer_sam", "samvit_base_patch16_224"),
    _sized("vitamin", "vitamin_small_224"),
    _sized("volo", "volo_d1_224"),
    Member("vovnet", "ese_vovnet19b_slim_dw"),
    Member("xception", "legacy_xception"),
    Member("xception_aligned", "xception41p"),
    _sized("xcit", "xcit_nano_12_p8_224"),
)


def survey(member: Member) -> str:
    """Compare one architecture with timm's own functions; return its row of the table.

    Raises:
        AssertionError: featx gives other values than timm.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, member.side, member.side, generator=generator)
    backbone = _backbone(member)
    with Engine(backbone, torch.device("cpu"), "float32") as engine:
        stages, grid = _survey_stages(member, engine, x)
        backbone.module.requires_grad_(False)  # as before the first `configure_compute`
        cells = member.file, f"`{member.name}`", _survey_embedding(engine, x), stages, grid
        return f"| {' | '.join(cells)} |"


def _backbone(member: Member) -> Backbone:
    overlay = {"input_size": (3, member.side, member.side)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = timm.create_model(member.name, pretrained_cfg_overlay=overlay, **member.options)
    randomise_constants(module)
    return wrap(module, f"timm/{member.name}", "random")


@torch.no_grad()
def randomise_constants(module: torch.nn.Module) -> None:
    """Make random what an initialisation sets to one value, and statistics of BatchNorm."""
    generator = torch.Generator().manual_seed(2)
    for each in module.modules():
        if isinstance(getattr(each, "running_mean", None), torch.Tensor):
            each.running_mean.normal_(0, 0.2, generator=generator)
            each.running_var.uniform_(0.5, 1.5, generator=generator)
    for parameter in module.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)


def run_captures(
    engine: Engine, chosen: list[Any], x: torch.Tensor
) -> list[tuple[CapturePoint, torch.Tensor]]:
    """The captures, each with the rows that a run stores."""
    engine.attach_captures(chosen)
    engine.configure_compute(Compute("fp32", False, False, len(x)))
    values = engine.run(x)
    engine.without_hooks()
    return [(point, values[point.name]) for point, _ in chosen]


def _survey_embedding(engine: Engine, x: torch.Tensor) -> str:
    module: Any = engine.backbone.module
    try:
        traced = engine.trace(["embedding"])
        chosen = select([("embedding", ReduceConfig())], traced, None, None).chosen
    except LayerError as error:
        return f"refused: {_first_sentence(error)}"
    ((point, found),) = run_captures(engine, chosen, x)
    with torch.no_grad():
        try:
            expected = module.forward_head(module.forward_features(x.clone()), pre_logits=True)
        except NotImplementedError:
            expected = module(x.clone())
    assert is_close(found, expected), f"embedding is not timm's: {point}"
    layer = f"`{point.layer}`" + (f", {point.capture}" if point.capture != "output" else "")
    made = point.module == "pre_logits"
    return f"{'`forward_head` itself' if made else layer} ({found.shape[1]})"


def _survey_stages(member: Member, engine: Engine, x: torch.Tensor) -> tuple[str, str]:
    """What `stages` gives beside timm's features, and which of it `reduce=grid` takes."""
    backbone = engine.backbone
    try:
        traced = engine.trace(["stages"])
        chosen = select([("stages", ReduceConfig())], traced, None, backbone.stages).chosen
    except LayerError as error:
        return f"refused: {_first_sentence(error)}", ""
    found = run_captures(engine, chosen, x)
    features = _timm_features(member, backbone, len(found), x)
    stages = f"{len(found)}, timm's features"
    if features is None:
        stages = f"{len(found)}, from the shapes"
        if backbone.stages is not None:
            stages = f"{len(found)}, as timm names them"
        return stages, _survey_grids(engine, found, None, x)
    assert len(features) == len(found), [point.name for point, _ in found]
    permuted = 0
    for (point, value), feature in zip(found, features, strict=True):
        same = any(is_close(view, feature) for view in _views(value, feature, backbone))
        permuted += not same
        assert same or _same_tokens(value, feature), f"{point.name} is not timm's feature"
    if permuted:
        stages += f" ({permuted} with tokens in another order)"
    return stages, _survey_grids(engine, found, features, x)


def _survey_grids(
    engine: Engine,
    found: list[tuple[CapturePoint, torch.Tensor]],
    features: list[torch.Tensor] | None,
    x: torch.Tensor,
) -> str:
    """Up to four stages, the first and the last among them."""
    numbers = {round(i * (len(found) - 1) / 3) for i in range(4)}
    right, refused = 0, []
    for i in sorted(numbers):
        point, _ = found[i]
        try:
            ((_, grid),) = run_captures(engine, [(point, make_reduce("grid", size=2))], x)
        except ReduceError as error:
            refused.append(_reason(error))
            continue
        right += 1
        if features is not None:
            expected = F.adaptive_avg_pool2d(_as_map(features[i], i, engine.backbone), 2)
            assert is_close(grid, expected), f"reduce=grid scrambles {point.name}"
    reasons = [f"{refused.count(reason)} refused: {reason}" for reason in dict.fromkeys(refused)]
    return "; ".join([f"{right} right"] * bool(right) + reasons)


def _timm_features(
    member: Member, backbone: Backbone, count: int, x: torch.Tensor
) -> list[torch.Tensor] | None:
    """What timm's features_only gives of the same weights; None where timm has no such thing."""
    indices = tuple(range(count))
    options = {"features_only": True, "out_indices": indices, **member.options}
    try:
        model = timm.create_model(member.name, **options).eval()
    except (RuntimeError, AssertionError, ValueError, AttributeError, NotImplementedError):
        return None
    own = {key.replace(".", "_"): value for key, value in backbone.module.state_dict().items()}
    state = {}
    for key, value in model.state_dict().items():
        flat = key.replace(".", "_")
        plain = flat if flat in own else re.sub("^(model|body)_", "", flat)
        state[key] = own.get(plain, value)
    model.load_state_dict(state)
    with torch.no_grad():
        return list(model(x.clone()))


def _views(value: torch.Tensor, feature: torch.Tensor, backbone: Backbone) -> list[torch.Tensor]:
    """A layer's tensor in the layouts in which timm may give it."""
    if value.dim() == 4:
        return [value, value.permute(0, 3, 1, 2)]
    patches = value[:, backbone.num_prefix_tokens :]
    if backbone.num_prefix_tokens == 0:  # coat and crossvit have class tokens and do not say so
        patches = value[:, -feature[0, 0].numel() :]
    views = [value] + [each.transpose(1, 2) for each in (value, patches)]
    return [view.reshape(feature.shape) for view in views if view.numel() == feature.numel()]


def _as_map(feature: torch.Tensor, number: int, backbone: Backbone) -> torch.Tensor:
    """timm's feature as (B, C, H, W); its feature_info tells the channels of each."""
    module: Any = backbone.module
    info = getattr(module.feature_info, "info", module.feature_info)
    if feature.dim() == 4 and feature.shape[1] != info[number]["num_chs"]:
        return feature.permute(0, 3, 1, 2)
    return feature


def _same_tokens(value: torch.Tensor, feature: torch.Tensor) -> bool:
    """Whether the tokens are the same but for their order; each channel is sorted."""
    if value.dim() != 3 or value.numel() != feature.numel():
        return False
    return is_close(value.transpose(1, 2).sort(-1).values, feature.flatten(2).sort(-1).values)


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= CLOSE * expected.abs().max())


def _first_sentence(error: FeatxError) -> str:
    """Why a preset was refused, in a few words."""
    text = str(error).rpartition("cannot be captured: ")[2]
    return re.split(r"(?<=[a-z)\]'])(?:[.;] | \(\[|, so )", text)[0].rstrip(".")


def _reason(error: ReduceError) -> str:
    """Why a grid was refused, without the name of the layer."""
    text = str(error)
    if "not in the row-major order" in text:
        return "positions not proven"
    return "smaller than 2 x 2" if "cells are more than" in text else "no map"


def table() -> str:
    """The table of surveys.md."""
    rows = []
    for member in MEMBERS:
        rows.append(survey(member))
        sys.stderr.write(f"{rows[-1]}\n")
        gc.collect()
    head = "| file | architecture | `embedding` | `stages` | `reduce=grid` of these |\n"
    return head + "|---|---|---|---|---|\n" + "\n".join(rows) + "\n"


def parts_of_tables(library: str) -> tuple[str, str, str]:
    """The text of surveys.md before, in, and behind the table of a library."""
    text = TABLES.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"<!-- survey of {library}: begin -->")
    inside, end, after = rest.partition(f"<!-- survey of {library}: end -->")
    return before + begin, inside, end + after


def documented_rows(library: str) -> list[str]:
    """The rows of a library's table in surveys.md."""
    lines = parts_of_tables(library)[1].splitlines()
    return [line for line in lines if line.startswith("| ")][1:]


def write_table(library: str, make: Callable[[], str]) -> None:
    """Write a library's table in surveys.md anew."""
    with warnings.catch_warnings(action="ignore"):
        made = make()
    before, _, after = parts_of_tables(library)
    TABLES.write_text(f"{before}\n\n{made}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    write_table("timm", table)
