"""The recorded forward pass: floating-point operations as torch counts them."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from conftest import slow_except
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from featx.layers import trace_forward
from featx.layers.tracer import FlopCounter


class Decomposed(nn.Module):
    """Operations that have formulas only after torch has decomposed them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mean((2, 3))
        y = torch.einsum("bc,cd->bd", x, x.new_ones(3, 12)) @ self.weight
        attention = nn.functional.scaled_dot_product_attention(*(y.reshape(-1, 1, 5, 1),) * 3)
        return (
            torch.nn.functional.linear(y, self.weight)
            + attention.sum()
            + torch.linalg.multi_dot([y.T, y]).sum()
        )


MODELS = {
    "decomposed": Decomposed,
    "resnet18": torchvision.models.resnet18,
    "mobilenet": torchvision.models.mobilenet_v3_small,
    "test_vit": lambda: timm.create_model("test_vit"),
    "test_convnext": lambda: timm.create_model("test_convnext"),
}


@pytest.mark.parametrize("name", slow_except(MODELS, "decomposed", "mobilenet", "test_vit"))
def test_operations_are_counted_as_torch_counts_them(name: str) -> None:
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    x = torch.randn(2, 3, 160, 160) if name.startswith("test_") else torch.randn(2, 3, 64, 64)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        expected = FlopCounterMode(display=False)
        with expected:
            values = module(x)
        counter = FlopCounter()
        with counter:
            assert torch.equal(module(x), values)
    assert counter.total == expected.get_total_flops() > 0
    root = trace_forward(module, x).calls[-1]
    assert root.module == ""
    assert root.mflops == pytest.approx(counter.total / 2 / 1e6)
