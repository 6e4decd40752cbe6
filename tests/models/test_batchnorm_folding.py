"""BatchNorm folded into convolutions: the same values, whatever the model does around them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import slow_except
from timm.layers import BatchNormAct2d
from tiny_engine import backbone_of, bound
from tiny_model import KEYS, extract
from torch import nn
from torch.nn.utils import prune
from zoo import LIVING, ConvBatchNorm, with_statistics

from featx.engine import Compute
from featx.errors import LayerError, StoreMismatchError
from featx.models import fold_pairs, foldable_pairs, state_sha256

NONE = torch.zeros(0, 3, 16, 16)
X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "module",
    [
        ConvBatchNorm(),
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8, affine=False)),
        nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), BatchNormAct2d(6, act_layer=nn.SiLU)),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)),
    ],
    ids=["in-place", "not affine", "with activation", "two"],
)
def test_the_same_values_and_the_module_comes_back(module: nn.Module) -> None:
    with_statistics(module)
    before, objects = state_sha256(module), [id(p) for p in module.parameters()]
    num_norms = sum(isinstance(part, nn.BatchNorm2d) for part in module.modules())
    expected = module(X.clone())
    pairs = foldable_pairs(module, X, captured=())
    assert len(pairs) == num_norms
    with fold_pairs(pairs):
        found = module(X.clone())
        assert torch.allclose(found, expected, atol=1e-5)
        assert not torch.equal(found, expected), "nothing was folded"
    assert torch.equal(module(X.clone()), expected)
    assert [id(p) for p in module.parameters()] == objects
    assert state_sha256(module) == before
    assert not any("forward" in part.__dict__ for part in module.modules())


@pytest.mark.parametrize("kept", ["conv", "bn"])
def test_what_somebody_looks_at_stays(kept: str) -> None:
    assert foldable_pairs(with_statistics(ConvBatchNorm()), X, captured=[kept]) == []


class ReadsBefore(ConvBatchNorm):
    """Reads the output of the convolution before its BatchNorm does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        mean = y.mean()
        return self.relu(self.bn(y)) + mean


def standardised() -> nn.Module:
    """A convolution that computes its weights in each pass."""
    block = ConvBatchNorm()
    block.conv.__class__ = type("ScaledStdConv2d", (nn.Conv2d,), {})
    return block


@pytest.mark.parametrize(
    "make",
    [
        lambda: ConvBatchNorm(called_twice=True),
        ReadsBefore,
        lambda: nn.Sequential(ConvBatchNorm(read_twice=True), nn.Flatten()),
        standardised,
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
    ],
    ids=["called twice", "read before", "read after", "standardised", "no statistics"],
)
def test_a_convolution_that_is_more_than_the_norms_is_not_folded(
    make: Callable[[], nn.Module],
) -> None:
    assert foldable_pairs(with_statistics(make().eval()), X, captured=()) == []


HOOKED: dict[str, Callable[[ConvBatchNorm], object]] = {
    "prune": lambda block: prune.l1_unstructured(block.conv, "weight", 0.3),
    "prune the norm": lambda block: prune.l1_unstructured(block.bn, "weight", 0.3),
    "old weight_norm": lambda block: nn.utils.weight_norm(block.conv),
    "old spectral_norm": lambda block: nn.utils.spectral_norm(block.conv),
    "weight_norm": lambda block: nn.utils.parametrizations.weight_norm(block.conv),
    "spectral_norm": lambda block: nn.utils.parametrizations.spectral_norm(block.conv),
    "a user's hook": lambda block: block.conv.register_forward_hook(lambda m, args, out: 2 * out),
}
"""What makes the weights, or the output, of a layer anew in each pass."""


class Hooked(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.block = with_statistics(ConvBatchNorm())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm
            HOOKED[name](self.block)
        self.last = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(x))


def facts(module: nn.Module) -> object:
    """Names and hooks of all that a module consists of, and its values."""
    parts = [
        (
            [*part._parameters],
            [*part._buffers],
            sorted({*part.__dict__} - {"weight"}),
            list(part._forward_pre_hooks.values()),
            list(part._forward_hooks.values()),
            part.training,
        )
        for part in module.modules()
    ]
    return parts, state_sha256(module), [(id(x), x.requires_grad) for x in module.parameters()]


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("name", slow_except(HOOKED, "weight_norm"))
def test_weights_that_a_hook_makes_are_computed_as_they_stand(name: str, photos: Path) -> None:
    """And the module comes back as it was, also from a run that fails on its way."""
    module = Hooked(name).train()
    LIVING[:] = [module]
    before = facts(module)
    model = {**KEYS["model"], "factory": "zoo:living", "weights": "default"}
    keys = {**KEYS, "model": model, "layers": ["last"], "dtype": "float32"}
    store = extract(photos, **keys)
    assert facts(module) == before
    with pytest.raises(LayerError):
        extract(photos, **{**keys, "layers": ["last@3"], "out": "other"})
    assert facts(module) == before
    plain = extract(photos, **{**keys, "fold_batchnorm": False, "out": "plain"})
    np.testing.assert_allclose(store["last"][:], plain["last"][:], atol=1e-5)


def test_an_exception_in_the_midst_of_folding_leaves_the_module() -> None:
    module = with_statistics(nn.Sequential(ConvBatchNorm(), ConvBatchNorm()))
    pairs = foldable_pairs(module, X, captured=())
    before = facts(module)
    module[1].bn.running_mean = torch.zeros(7)  # of another size: its weights cannot be fused
    with pytest.raises(RuntimeError), fold_pairs(pairs):
        pass
    module[1].bn.running_mean = pairs[1][1].running_var * 0
    assert facts(module)[0] == before[0]  # type: ignore[index]
    assert not any("forward" in part.__dict__ for part in module.modules())


@pytest.mark.parametrize(("read_twice", "folds"), [(False, True), (True, False)])
def test_an_output_that_is_read_twice_shows_in_the_values(read_twice: bool, folds: bool) -> None:
    module = with_statistics(nn.Sequential(ConvBatchNorm(read_twice), nn.MaxPool2d(2)))
    with bound(backbone_of(module, side=16), "1") as engine:
        assert engine.formats(NONE).fold_batchnorm == folds


def test_rounding_to_float16_does_not_keep_a_model_from_being_folded() -> None:
    """Two neighbours of float16 lie further apart than folding moves a value."""
    module = with_statistics(nn.Sequential(ConvBatchNorm(), nn.Conv2d(3, 64, 1)))
    with bound(backbone_of(module, side=64), "1", dtype="float16") as engine:
        x = engine.noise(3)
        values = []
        for fold in (False, True):
            engine.configure_compute(Compute("fp32", False, False, 3, fold))
            values.append(engine.run(x)["1"])
        assert not torch.equal(*values)
        assert engine.formats(NONE).fold_batchnorm


def test_gradients_are_taken_of_the_model_as_it_stands() -> None:
    module = nn.Sequential(ConvBatchNorm(), nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    with bound(backbone_of(with_statistics(module), side=16), "0.relu:grad_output") as engine:
        assert not engine.formats(NONE).fold_batchnorm


@pytest.mark.parametrize(
    ("compiled", "channels_last"),
    [
        (False, False),
        (False, True),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_the_engine_folds_in_every_way_of_computing(compiled: bool, channels_last: bool) -> None:
    module = with_statistics(ConvBatchNorm())
    before = state_sha256(module)
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    with bound(backbone_of(module, side=16), "relu") as engine:
        plain = engine.run(images)["relu"]
        engine.configure_compute(Compute("fp32", compiled, channels_last, 4, fold_batchnorm=True))
        assert "forward" in module.bn.__dict__
        assert torch.allclose(engine.run(images)["relu"], plain, atol=1e-5)
        engine.configure_compute(Compute("fp32", False, False, 4))
        assert torch.equal(engine.run(images)["relu"], plain)
    assert state_sha256(module) == before


OWN = {
    **KEYS,
    "model": {**KEYS["model"], "factory": "test_batchnorm_folding:Classifier"},
    "layers": ["relu"],
}


class Classifier(ConvBatchNorm):
    """With statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        with_statistics(self)


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_folds_says_so_and_does_not_resume_otherwise(photos: Path) -> None:
    plain = extract(photos, **{**OWN, "out": "plain", "fold_batchnorm": False})
    store = extract(photos, **OWN)
    assert store.attrs["config"] != plain.attrs["config"]
    np.testing.assert_allclose(store["relu"][:], plain["relu"][:], atol=2e-3)  # float16
    resolved = json.loads(Path("store/featx.json").read_text())["resolved"]
    assert resolved["fold_batchnorm"] is True
    assert json.loads(Path("plain/featx.json").read_text())["resolved"]["fold_batchnorm"] is False
    with pytest.raises(StoreMismatchError, match="fold_batchnorm"):
        extract(photos, **{**OWN, "fold_batchnorm": False})
    assert extract(photos, **OWN).complete


class Twice(nn.Module):
    """Behind `first.relu`, the output of a convolution is read beside its BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = with_statistics(ConvBatchNorm(read_twice=True))
        self.last = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_layers_that_are_added_later_are_right_too(photos: Path) -> None:
    keys = {
        **OWN,
        "model": {**OWN["model"], "factory": "test_batchnorm_folding:Twice"},
        "dtype": "float32",
    }
    extract(photos, **{**keys, "layers": ["first.relu"]})
    added = extract(photos, **{**keys, "layers": ["first.relu", "last"]})
    plain = extract(photos, **{**keys, "layers": ["last"], "fold_batchnorm": False, "out": "plain"})
    np.testing.assert_allclose(added["last"][:], plain["last"][:], atol=1e-5)


@pytest.mark.parametrize(
    "name", slow_except(["resnet18", "tf_efficientnet_lite0", "mobilenetv3_small_100"], "resnet18")
)
def test_library_models(name: str) -> None:
    import timm

    module = with_statistics(timm.create_model(name).eval())
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected = module(x)
    pairs = foldable_pairs(module, x, captured=())
    assert len(pairs) == sum(isinstance(part, nn.BatchNorm2d) for part in module.modules())
    with fold_pairs(pairs):
        found = module(x)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
