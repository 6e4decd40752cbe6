"""Gradients at layers that return the memory of their input, which the model then changes.

No capture, edit or log may change the gradients of the model: they are right, or refused.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import slow_except
from torch import nn

import featx
from featx.errors import LayerError

VIEWS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "dropout": lambda: nn.Dropout(0.5).eval(),
    "flatten": nn.Flatten,
    "columns": lambda: nn.Unflatten(1, (2, 4)),
}
WRITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu_,
    "add": lambda x: x.add_(0.25),
    "part": lambda x: x[:, :1].zero_(),
}


class Shared(nn.Module):
    """Writes to what a layer returned over the memory of its input, or to a copy of it."""

    def __init__(self, view: str, write: str, reads: str, is_copied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 8).double(), nn.Linear(8, 3).double()
        self.view, self.write = VIEWS[view](), WRITES[write]
        self.reads, self.is_copied = reads, is_copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.features(x))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.is_copied:
            x = x.clone()
        before = 2 * x if self.reads == "before" else 0
        y = self.view(x.clone() if self.is_copied else x)
        if self.reads != "unwritten":
            self.write(y)
        y = y.flatten(1)
        if self.is_copied and self.reads == "after":
            x = y
        return y + before + (3 * x if self.reads in ("after", "unwritten") else 0)


def gradients_of(model: nn.Module, layers: list[str]) -> dict[str, torch.Tensor]:
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)
    with featx.capture(model, layers) as features:
        model(x).square().sum().backward()
        found = {name: features[name] for name in layers}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("capture", ["grad_output", "grad_input"])
@pytest.mark.parametrize("reads", ["never", "before", "unwritten"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_the_gradient_of_a_layer_that_returns_its_input(
    view: str, write: str, reads: str, capture: str
) -> None:
    layers = [f"view:{capture}"]
    found = gradients_of(Shared(view, write, reads, is_copied=False), layers)
    expected = gradients_of(Shared(view, write, reads, is_copied=True), layers)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("capture", ["grad_output", "grad_input"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_written_input_that_is_read_again_is_refused(view: str, write: str, capture: str) -> None:
    """The gradients of the parameters would be wrong, not only what is captured."""
    model = Shared(view, write, "after", is_copied=False)
    with pytest.raises(LayerError, match=f"^view:{capture}: .* reads the input again"):
        gradients_of(model, [f"view:{capture}"])
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(LayerError, match=f"^view:{capture}: .* reads the input again"):
        edited(model, capture, model)
    with pytest.raises(LayerError, match=r"writes to it in place; .* model\(x\)"):
        edited(model, capture, model.features)


@pytest.mark.parametrize("watched", [featx.watch, featx.gradients.watch])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_training_has_the_same_gradients_while_it_is_watched(
    view: str, write: str, watched: Callable[[nn.Module], Any]
) -> None:
    expected = gradients_of(Shared(view, write, "after", is_copied=True), [])
    model = Shared(view, write, "after", is_copied=False)
    with watched(model):
        found = gradients_of(model, [])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def edited(model: nn.Module, capture: str, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)
    with featx.edit(model, {f"view:{capture}": lambda gradient: gradient * 2}):
        call(x).sum().backward()


class WrittenInput(nn.Module):
    """Changes the input of a layer, which is the memory of its output, and reads the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.view = nn.Linear(5, 8).double(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y: torch.Tensor = self.view(x)
        x.relu_()
        return y


@pytest.mark.parametrize("capture", ["grad_output", "grad_input"])
def test_an_input_that_is_written_after_the_layer_is_refused(capture: str) -> None:
    with pytest.raises(LayerError, match="writes to the input in place later"):
        gradients_of(WrittenInput(), [f"view:{capture}"])


class Wrapped(Shared):
    """Returns an object that is no nested value."""

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(x))


def test_a_written_output_is_refused_if_the_model_returns_no_tensors() -> None:
    model = Wrapped("identity", "relu", "never", is_copied=False)
    x = torch.ones(4, 5, dtype=torch.float64)
    with (
        pytest.raises(LayerError, match="writes to it in place and returns no tensors"),
        featx.capture(model, ["view:grad_output"]),
    ):
        model(x)


class Detaching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.detach_()
        return x


def test_a_layer_that_detaches_its_input_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 8), Detaching())
    with (
        pytest.raises(LayerError, match=r"^1:grad_input: the layer detaches its input"),
        featx.capture(model, ["1:grad_input"]),
    ):
        model(torch.ones(4, 5))


class Parts(nn.Module):
    """Layers with several outputs, of which the model reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk = Chunk()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = self.chunk(x)
        output, _ = self.lstm(first)
        return output


class Chunk(nn.Module):
    def forward(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return x.chunk(2, -1)


@pytest.mark.parametrize(
    "watched",
    [
        featx.watch,
        featx.gradients.watch,
        lambda model: featx.capture(model, ["chunk[0]:grad_output", "chunk[1]:grad_output"]),
        lambda model: featx.edit(model, {"lstm[1][0]:grad_output": lambda gradient: gradient}),
    ],
)
def test_an_output_that_nothing_reads_has_no_gradient(watched: Callable[[nn.Module], Any]) -> None:
    model, x = Parts(), torch.randn(2, 3, 8, requires_grad=True)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with watched(model):
        model(x).square().sum().backward()
    assert all(torch.equal(p.grad, x) for p, x in zip(model.parameters(), expected, strict=True))


class OfTwo(nn.Module):
    def __init__(self, is_written: bool) -> None:
        super().__init__()
        self.is_written = is_written

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(y) if self.is_written else x + 2 * y


class Writes(nn.Module):
    def __init__(self, is_returned: bool) -> None:
        super().__init__()
        self.is_returned = is_returned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(1.5)
        return x if self.is_returned else x + 1


LAYERS: list[Callable[[], nn.Module]] = [
    *(lambda: nn.Linear(4, 4).double(), lambda: nn.LayerNorm(4).double(), nn.ReLU),
    *(nn.Identity, lambda: nn.Dropout(0.5).eval(), lambda: nn.Flatten(1), Chunk),
    *(lambda: nn.ReLU(True), lambda: OfTwo(False), lambda: OfTwo(True)),
    *(lambda: Writes(False), lambda: Writes(True)),
    *(lambda: nn.Sequential(nn.Identity(), nn.ReLU(True)),),
]


class Program(nn.Module):
    """Random layers and writes in place, each of any tensor that there is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        rng = random.Random(seed)
        kinds = ["layer"] * 12 + ["sum", "relu", "scale", "part"]
        self.steps = [
            (rng.choice(kinds), rng.random(), rng.random()) for _ in range(rng.randrange(2, 9))
        ]
        num_layers = [step for step, _, _ in self.steps].count("layer")
        self.layers = nn.ModuleList(rng.choice(LAYERS)() for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensors, layers = [x * 1.0], iter(self.layers)
        for step, first, second in self.steps:
            u = tensors[-1] if first < 0.6 else tensors[int(first * len(tensors))]
            v = tensors[int(second * len(tensors))]
            if step == "layer":
                layer = next(layers)
                y = layer(u, v) if isinstance(layer, OfTwo) else layer(u)
                tensors.append(torch.cat([y[1], y[0]], 1) if isinstance(y, tuple) else y)
            elif step == "sum":
                tensors.append(u + v)
            elif step == "relu":
                u.relu_()
            elif step == "scale":
                u.mul_(1.1)
            else:
                u[:, :1].zero_()
        return torch.stack(tensors[-3:]).sum(0)

    def names(self, kind: str) -> list[str]:
        """Names of all captures of one kind."""
        names = []
        for name, module in self.named_modules():
            of_two = isinstance(module, Chunk if kind == "grad_output" else OfTwo)
            if name not in ("", "layers"):
                names += [f"{name}{part}:{kind}" for part in (("[0]", "[1]") if of_two else ("",))]
        return names


def all_gradients(model: Program, call: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    model.zero_grad()
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
    output = call(x)
    (output * torch.arange(1, 5)).sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("seed", slow_except(range(400), *range(40)))
def test_no_capture_changes_the_gradients_of_a_model(seed: int) -> None:
    model = Program(seed)
    try:
        expected = all_gradients(model, model)
    except RuntimeError:
        return  # autograd refuses what the model writes in place
    of_output, of_input = model.names("grad_output"), model.names("grad_input")
    watched: list[Callable[[], Any]] = [
        lambda: featx.watch(model),
        lambda: featx.gradients.watch(model, on_alarm="record"),
    ]
    for block in watched:
        with block():
            assert_same(all_gradients(model, model), expected)
    for names in (of_output, of_input, of_output + of_input):
        edits = dict.fromkeys(names, torch.clone)
        for block in (featx.capture(model, names), featx.edit(model, edits)):
            assert_same_or_refused(model, model, block, expected)
        for block in (featx.capture(model, names), featx.edit(model, edits)):
            assert_same_or_refused(model, model.forward, block, expected)


def assert_same_or_refused(
    model: Program,
    call: Callable[[torch.Tensor], torch.Tensor],
    block: Any,
    expected: Sequence[Any],
) -> None:
    refusal = ""
    try:
        with block:
            found = all_gradients(model, call)
    except LayerError as error:
        refusal, found = str(error), expected
    assert_same(found, expected)
    assert re.search("^$|returns its input|gets one tensor twice", refusal)


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
