"""Random models that work in place, against hooks by hand on the same models that do not."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import slow_except
from torch import nn

import featx

WIDTH, CLASSES = 4, 3
WEIGHTS = torch.arange(1, 1 + CLASSES, dtype=torch.float64)

ACTIVATIONS: list[Callable[[bool], nn.Module]] = [
    nn.ReLU,
    nn.SiLU,
    lambda inplace: nn.Hardtanh(inplace=inplace),
    lambda inplace: nn.Dropout(0.0, inplace),
    lambda inplace: nn.Identity(),
]
OF_MAPS: list[Callable[[], nn.Module]] = [
    lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
    lambda: nn.BatchNorm2d(WIDTH),
    lambda: nn.GroupNorm(2, WIDTH),
]
OF_TOKENS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.LayerNorm(WIDTH),
]
KINDS = ("chain", "residual", "written residual", "repeated", "branch", "view", "written view")


class Block(nn.Module):
    """Two layers and activations, and a block inside, connected in one of `KINDS`."""

    def __init__(self, rng: random.Random, inplace: bool, depth: int, tokens: bool) -> None:
        super().__init__()
        self.kind, self.inplace = rng.choice(KINDS), inplace
        layers = OF_TOKENS if tokens else OF_MAPS
        self.a, self.b = rng.choice(layers)(), rng.choice(layers)()
        self.act1, self.act2 = (rng.choice(ACTIVATIONS)(inplace) for _ in range(2))
        self.flat = nn.Flatten(1 if tokens else 2)
        self.unflat = nn.Unflatten(1, (3, WIDTH)) if tokens else nn.Unflatten(2, (4, 4))
        self.inner = Block(rng, inplace, depth - 1, tokens) if depth else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "chain":
            y = self.b(self.inner(self.act1(self.a(x))))
        elif self.kind == "residual":
            y = self.b(self.act1(self.a(x))) + self.inner(x)
        elif self.kind == "repeated":
            y = self.a(self.act1(self.a(self.inner(x))))
        elif self.kind == "branch":
            y = self.a(x)
            z = self.act1(self.b(y))
            y = self.inner(y) * z
        elif self.kind == "view":
            y = self.unflat(self.act1(self.flat(self.a(self.inner(x)))))
        elif self.kind == "written residual":
            y = self.sum(self.b(x), self.inner(x))
        else:
            y = self.flat(self.b(x))
            y = self.unflat(self.sum(y, torch.full_like(y, 0.5)))
        result: torch.Tensor = self.act2(y)
        return result

    def sum(self, y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return y.add_(other) if self.inplace else y + other


class Model(nn.Module):
    """One to three blocks and a classifier."""

    def __init__(self, seed: int, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.tokens = rng.random() < 0.4
        depths = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        self.blocks = nn.Sequential(*(Block(rng, inplace, depth, self.tokens) for depth in depths))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double().train(bool(seed % 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x)
        logits: torch.Tensor = self.head(x.mean(1) if self.tokens else x.mean((2, 3)))
        return logits


@dataclass
class ByHand:
    """Tensors and gradients of one model, by hooks that give each call copies of its tensors.

    Attributes:
        output: of the model.
        tensors: name of a call with ':input', ':grad_input', ':grad_output' or nothing -> tensor.
        parameters: gradients of the parameters.
        modules: name of a module -> norm of the gradients of its outputs over its calls.
    """

    output: torch.Tensor
    tensors: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    modules: dict[str, float]


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    output: torch.Tensor = model(x.clone())
    (output * WEIGHTS).sum().backward()
    return output.detach()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_hand(model: Model, x: torch.Tensor) -> ByHand:
    calls: dict[str, list[dict[str, torch.Tensor]]] = {}

    def before(name: str, module: nn.Module, args: Any) -> Any:
        copy = args[0].clone()
        if copy.requires_grad:
            copy.retain_grad()
        calls.setdefault(name, []).append({":input": copy})
        return (copy,)

    def after(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        copy = output.clone()
        if copy.requires_grad:
            copy.retain_grad()
        calls[name][-1][""] = copy
        return copy

    for name, module in list(model.named_modules())[1:]:
        module.register_forward_pre_hook(functools.partial(before, name))
        module.register_forward_hook(functools.partial(after, name))
    output = run(model, x)
    tensors = {}
    for name, of_module in calls.items():
        for number, call in enumerate(of_module, 1):
            named = f"{name}@{number}" if of_module[1:] else name
            for capture, gradient in ((":input", ":grad_input"), ("", ":grad_output")):
                tensors[named + capture] = call[capture].detach()
                if (grad := call[capture].grad) is not None:
                    tensors[named + gradient] = grad
    norms = {}
    for name, of_module in calls.items():
        grads = [call[""].grad for call in of_module if call[""].grad is not None]
        if grads:
            norms[name] = float(torch.cat([grad.flatten() for grad in grads]).norm())
    return ByHand(output, tensors, gradients_of(model), norms)


@pytest.fixture(params=slow_except(range(60), *range(10)))
def made(request: pytest.FixtureRequest) -> tuple[Model, torch.Tensor, ByHand]:
    """A model that works in place, its input, and what hooks by hand see without that."""
    for seed in itertools.count(request.param, 1000):
        model, plain = (Model(seed, inplace) for inplace in (True, False))
        shape = (2, 3, WIDTH) if plain.tokens else (2, WIDTH, 4, 4)
        x = torch.randn(shape, dtype=torch.float64, requires_grad=bool(seed % 3))
        # Autograd refuses what some models write in place.
        with contextlib.suppress(RuntimeError):
            run(model, x)
            break
    model.load_state_dict(plain.state_dict())
    return model, x, by_hand(plain, x)


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    "captures", [("",), (":input",), (":grad_output",), (":grad_input",), None]
)
def test_captures(
    made: tuple[Model, torch.Tensor, ByHand], captures: tuple[str, ...] | None
) -> None:
    """None for all together."""
    model, x, expected = made
    kinds = captures or ("", ":input", ":grad_output", ":grad_input")
    names = [n for n in expected.tensors if n[len(n.partition(":")[0]) :] in kinds]
    with featx.capture(model, names) as features:
        torch.testing.assert_close(run(model, x), expected.output)
        assert_equal(features, {name: expected.tensors[name] for name in names})
    assert_equal(gradients_of(model), expected.parameters)


def test_watched_gradients(made: tuple[Model, torch.Tensor, ByHand]) -> None:
    """All but modules that may return their input, whose gradient is the sum over its readers."""
    model, x, expected = made
    with featx.gradients.watch(model, on_alarm="record") as log:
        torch.testing.assert_close(run(model, x), expected.output)
        log.step()
    modules = dict(model.named_modules())
    for name, norm in expected.modules.items():
        if not isinstance(modules[name], nn.Identity | nn.Dropout | Block | nn.Sequential):
            assert log.steps[-1].layers[name] == pytest.approx(norm), name
    assert_equal(gradients_of(model), expected.parameters)
