"""The same values under torch.compile, through the engine as a run compiles it.

The graphs are traced and functionalised (aot_eager) but not made into C++, which takes minutes;
tests/engine/test_engine.py has the slow tests with the compiler. Tolerance: none: same kernels.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import slow_except
from tiny_engine import backbone_of, bound, noise
from torch import nn
from zoo import ClampedNet, PatchTransformer, ResidualConvNet, vision_transformer

from featx.engine import Compute
from featx.errors import RunError

pytestmark = pytest.mark.usefixtures("without_compiler")


class Repeated(nn.Module):
    """One in-place ReLU behind two layers, and a layer in between that is written to again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True)
        self.norm, self.fc = nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm(self.relu(self.conv(x))))
        y *= 2
        return self.fc(y.mean((2, 3)))


class Pairs(nn.Module):
    """A tuple, twice."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return x + 1, {"twice": x * 2}

    def __init__(self) -> None:
        super().__init__()
        self.two = self.Two()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.two(x)
        return self.two(a - b["twice"])[0]


COMPILE = torch.compile


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(function: Any, dynamic: bool, options: Any) -> Any:
        return COMPILE(function, dynamic=dynamic, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", traced)


@pytest.mark.slow
def test_every_engine_of_a_process_is_compiled() -> None:
    """PyTorch keeps a few graphs of a function and runs it uncompiled from then on."""
    for channels in range(3, 6):
        module = nn.Sequential(nn.Conv2d(3, channels, 1))
        with bound(backbone_of(module), "0") as engine:
            engine.run(noise())
            engine.configure_compute(Compute("fp32", True, False, 4))
            with torch._dynamo.config.patch(recompile_limit=1):
                engine.run(noise())  # fullgraph raises where it would be run uncompiled


CASES = {
    "in_place": (
        ResidualConvNet,
        8,
        ["conv1", "bn", "relu@1", "conv2", "relu@2", "fc", "fc:input"],
    ),
    "repeated": (Repeated, 8, ["conv", "relu@1", "norm", "relu@2", "relu@2:input", "fc"]),
    "elements": (Pairs, 8, ["two@1[1].twice", "two@2[0]"]),
    "multihead": (
        PatchTransformer,
        16,
        ["layer.self_attn:attention", "layer.self_attn[0]", "layer"],
    ),
    "timm": (
        vision_transformer,
        16,
        ["blocks.0.attn:attention", "blocks.0.attn", "blocks.1", "norm"],
    ),
}


@pytest.mark.parametrize("case", slow_except(CASES, "in_place", "repeated"))
def test_compiled_values_are_the_eager_ones(case: str) -> None:
    make, side, layers = CASES[case]
    with bound(backbone_of(make(), side), *layers) as engine:
        x = noise(4, side)
        eager = {name: value.clone() for name, value in engine.run(x).items()}
        engine.configure_compute(Compute("fp32", True, False, 4))
        engine.run(noise(4, side, seed=9))
        compiled = engine.run(x)
    assert list(compiled) == list(eager)
    for name, value in eager.items():
        assert torch.equal(compiled[name], value), name


@pytest.mark.slow
def test_a_write_that_only_images_show_is_found_when_compiled() -> None:
    x = 100 * noise().abs()
    with bound(backbone_of(ClampedNet()), "layer", "clamp") as engine:
        engine.configure_compute(Compute("fp32", True, False, 4))
        values = engine.run(x)
    assert torch.equal(values["layer"], x)
    assert values["clamp"].max() == 6


def test_a_compiled_pass_may_run_in_another_thread_than_the_first() -> None:
    x = noise()
    with bound(backbone_of(ResidualConvNet()), "conv1", "fc") as engine:
        engine.configure_compute(Compute("fp32", True, False, 4))
        first = {name: value.clone() for name, value in engine.run(x).items()}
        with ThreadPoolExecutor(1) as other:
            second = other.submit(engine.run, x).result()
    assert list(second) == ["conv1", "fc"]
    assert all(torch.equal(second[name], value) for name, value in first.items())


def test_captures_in_another_order_are_an_error_when_compiled() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.swap = nn.ReLU(), nn.Sigmoid(), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(self.b(x)) if self.swap else self.b(self.a(x))

    module = Counted()
    with bound(backbone_of(module), "a", "b") as engine:
        engine.configure_compute(Compute("fp32", True, False, 4))
        engine.run(noise())
        module.swap = True
        with pytest.raises((RunError, torch._dynamo.exc.Unsupported), match=r"expected|RunError"):
            engine.run(noise())
