"""Gradients at layers that return the memory of their input, which the model then changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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
    with pytest.raises(LayerError, match=r"may read the input again, .* model\(x\)"):
        edited(model, capture, model.features)


def edited(model: nn.Module, capture: str, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)
    with featx.edit(model, {f"view:{capture}": lambda gradient: gradient * 2}):
        call(x).sum().backward()
