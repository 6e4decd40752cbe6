"""model.init=reset: the untrained twin of a model, its preprocessing, and what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import MODEL, extract
from torch import nn
from zoo import TwoStageConvNet

from featx.config import model_options
from featx.errors import ConfigError, ModelError, StoreMismatchError
from featx.models import Backbone, build_backbone, random_id
from featx.models.base import reset_weights
from featx.store import load_manifest


def build(seed: int = 0, **keys: Any) -> Backbone:
    return build_backbone(model_options(**keys), seed)


def is_constant(x: torch.Tensor) -> bool:
    return bool((x == x.flatten()[0]).all())


def assert_untrained(loaded: Backbone, reset: Backbone) -> None:
    """Every tensor differs from the loaded one, or is constant by its own initialisation."""
    before, now = loaded.module.state_dict(), reset.module.state_dict()
    assert list(before) == list(now)
    same = [name for name in before if torch.equal(before[name], now[name])]
    assert [name for name in same if not is_constant(now[name])] == []
    assert sum(name in same for name in before) < len(before)
    assert loaded.weights_sha256 != reset.weights_sha256
    assert reset.preprocess.describe() == loaded.preprocess.describe()
    assert not any(p.requires_grad for p in reset.module.parameters())
    assert not any(m.training for m in reset.module.modules())


def made_up(module: nn.Module, path: Path) -> str:
    """A weights file in which nothing is constant, and BatchNorm has seen 7 batches."""
    generator = torch.Generator().manual_seed(3)
    state = {
        name: torch.rand(x.shape, generator=generator) + 0.1 if x.is_floating_point() else x + 7
        for name, x in module.state_dict().items()
    }
    torch.save(state, path)
    return str(path)


@pytest.mark.slow
def test_resnet18_with_a_file_of_weights(tmp_path: Path) -> None:
    untrained = build(name="resnet18", weights=None)
    file = made_up(untrained.module, tmp_path / "w.pth")
    global_state = torch.random.get_rng_state()
    loaded = build(name="resnet18", weights=file)
    reset = build(name="resnet18", weights=file, init="reset")
    assert torch.equal(torch.random.get_rng_state(), global_state)
    assert_untrained(loaded, reset)
    now = reset.module.state_dict()
    assert not any(torch.equal(x, now[name]) for name, x in loaded.module.state_dict().items())
    assert reset.module.bn1.num_batches_tracked == 0
    assert reset.module.bn1.running_var.eq(1).all()
    assert reset.weights == f"random (seed 0), reset from {file}"
    assert reset.weights_sha256 == untrained.weights_sha256
    other = build(1, name="resnet18", weights=file, init="reset")
    assert other.weights_sha256 != reset.weights_sha256


def test_class_tokens_and_positions_of_timm(tmp_path: Path) -> None:
    model = {"library": "timm", "name": "test_vit"}
    file = made_up(build(**model, weights=None).module, tmp_path / "w.pth")
    loaded = build(**model, weights=file)
    reset = build(**model, weights=file, init="reset")
    assert_untrained(loaded, reset)
    assert not torch.equal(loaded.module.pos_embed, reset.module.pos_embed)
    assert not torch.equal(loaded.module.cls_token, reset.module.cls_token)


class Trained(nn.Module):
    """What a factory may make: random, with or without a constant, or always the same."""

    def __init__(self, how: str = "random") -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 8, stride=8)
        self.scale = nn.Parameter(1e-5 * torch.ones(4))
        self.register_buffer("table", torch.arange(4))
        if how == "loaded":
            with torch.no_grad():
                self.conv.weight.copy_(torch.arange(768).view_as(self.conv.weight))
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3)) * self.scale


ONE = Trained()


def one() -> nn.Module:
    return ONE


CUSTOM = {"library": "custom", "factory": "test_reset:Trained"}


def test_a_custom_model_is_built_again_by_its_factory(tmp_path: Path) -> None:
    state = {name: x + 1 for name, x in Trained().state_dict().items()}
    state["table"] -= 1
    torch.save(state, tmp_path / "w.pth")
    loaded = build(**CUSTOM, weights=str(tmp_path / "w.pth"))
    reset = build(**CUSTOM, weights=str(tmp_path / "w.pth"), init="reset")
    assert not torch.equal(loaded.module.conv.weight, reset.module.conv.weight)
    assert torch.equal(reset.module.scale, 1e-5 * torch.ones(4))
    assert reset.module.table.tolist() == [0, 1, 2, 3]
    assert reset.module.table.dtype == torch.int64
    assert reset.weights_sha256 == build(**CUSTOM, weights=None).weights_sha256


def test_a_factory_that_loads_weights_itself_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Trained gives .*conv\.weight.* the same values"):
        build(**CUSTOM, args={"how": "loaded"}, init="reset")
    with pytest.raises(ModelError, match=r"one gives 2 .* the same values whatever the seed"):
        build(library="custom", factory="test_reset:one", init="reset")


def test_where_it_has_no_effect_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no effect with model\.weights=null"):
        model_options(weights=None, init="reset")
    with pytest.raises(ConfigError, match=r"model\.init=rest: expected one of loaded, reset"):
        model_options(init="rest")
    with pytest.raises(ModelError, match=r"has no effect: .* are its own random ones"):
        build(**CUSTOM, init="reset")
    torch.save(build(2, **CUSTOM, weights=None).module.state_dict(), tmp_path / "w.pth")
    build(3, **CUSTOM, weights=str(tmp_path / "w.pth"), init="reset")


def test_tensors_that_the_untrained_model_lacks_are_named() -> None:
    backbone = build(**CUSTOM)
    fresh = nn.Module()
    fresh.conv = nn.Conv2d(3, 4, 3)
    with pytest.raises(ModelError, match=r"without any: scale, table, conv\.weight"):
        reset_weights(backbone, fresh, 0)


@pytest.mark.slow
def test_it_is_part_of_the_stores_identity(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = made_up(TwoStageConvNet(), tmp_path / "w.pth")
    trained = {**MODEL, "weights": file}
    reset = {**trained, "init": "reset"}
    first = extract(photos, model=trained)
    second = extract(photos, model=reset, out="untrained")
    plain = extract(photos, out="random")
    assert (second["conv"][:] == plain["conv"][:]).all()
    assert not (second["conv"][:] == first["conv"][:]).any()
    fingerprints = [
        load_manifest(tmp_path / out)[0].runs[0].header.fingerprint
        for out in ("store", "untrained")
    ]
    assert fingerprints[0]["model.init"] == "loaded"
    assert fingerprints[1]["model.init"] == "reset"
    assert fingerprints[1]["weights"] == f"{random_id(0)}, reset from {file}"
    with pytest.raises(StoreMismatchError, match=r"weights_sha256"):
        extract(photos, model=reset)
    assert extract(photos, model=reset, out="untrained").complete
