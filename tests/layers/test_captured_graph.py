"""featx.capture: a tensor is the layer's own, part of the graph, unless it was changed in place."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featx
from featx.errors import LayerError

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)


def net(inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace), nn.Flatten(), nn.Linear(144, 5), nn.Softmax(1)
    )


def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def by_hand(model: nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
    """Gradient of the first output with respect to the output of a layer, by a hook of torch."""
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, a, out: seen.append(out))
    output = model(x)[:, 0].sum()
    handle.remove()
    return torch.autograd.grad(output, seen[0])[0]


def returned(model: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    """The output objects of layers, by hooks of torch on a further pass in the same block."""
    found: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda m, args, out, name=name: found.__setitem__(name, out)
        )
        for name in names
    ]
    model(images())
    for handle in handles:
        handle.remove()
    return found


NAMES = ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_read_is_the_object_that_the_layer_returned(grad: bool) -> None:
    model = net()
    with torch.set_grad_enabled(grad), featx.capture(model, [*NAMES, "1:input"]) as features:
        own = returned(model, NAMES)
        for name in NAMES:
            assert features[name] is own[name]
        assert features["1:input"] is own["0"]


@pytest.mark.parametrize("name", NAMES)
def test_retain_grad_hooks_and_autograd_work_on_a_captured_tensor(name: str) -> None:
    model, x = net(), images()
    expected = by_hand(model, name, x)
    arrived: list[torch.Tensor] = []
    with featx.capture(model, [name]) as features:
        output = model(x)[:, 0].sum()
        (grad,) = torch.autograd.grad(output, features[name], retain_graph=True)
        features[name].retain_grad()
        features[name].register_hook(arrived.append)
        output.backward()
    assert torch.equal(grad, expected)
    assert torch.equal(features[name].grad, expected)
    assert torch.equal(arrived[-1], expected)


def allocated(model: nn.Module, layers: list[str]) -> int:
    """Bytes that a forward pass allocates while layers are captured, and read at its end."""
    with featx.capture(model, layers) as features:
        model(images())
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=activities, profile_memory=True, acc_events=True
        ) as profile:
            model(images())
            for layer in layers:
                _ = features[layer]
    memory = [event.self_cpu_memory_usage for event in profile.events()]
    return sum(size for size in memory if size > 0)


def test_nothing_is_copied_but_what_is_changed_in_place() -> None:
    assert allocated(net(), NAMES) == allocated(net(), [])
    conv = 4 * 2 * 4 * 6 * 6
    assert allocated(net(inplace=True), NAMES) - allocated(net(inplace=True), []) == conv


def test_a_copy_of_an_output_that_was_changed_in_place_refuses_to_do_nothing() -> None:
    model, x = net(inplace=True), images()
    conv = F.conv2d(x, model[0].weight, model[0].bias)
    with featx.capture(model, ["0", "1"]) as features:
        output = model(x)
    changed, kept = features["0"], features["1"]
    assert torch.equal(changed, conv)
    assert torch.equal(kept, conv.relu())
    for use in (changed.retain_grad, lambda: changed.register_hook(print)):
        with pytest.raises(LayerError, match=r"0: \w+ has no effect here.*'0:grad_output'"):
            use()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(output.sum(), changed, retain_graph=True)
    assert features["0"] is changed
    # It is a tensor like any other, and part of the graph of the layer.
    assert type(changed * 2) is torch.Tensor
    changed.square().sum().backward()
    expected = torch.autograd.grad(
        F.conv2d(x, model[0].weight, model[0].bias).square().sum(), model[0].weight
    )[0]
    assert torch.equal(model[0].weight.grad, expected)
    file = io.BytesIO()
    torch.save({"0": changed.detach(), "1": kept.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["0"]) is torch.Tensor
    assert torch.equal(loaded["0"], conv)
    with torch.no_grad(), featx.capture(model, "0") as features:
        model(x)
    copied = copy.deepcopy(dict(features))["0"]
    assert type(copied) is torch.Tensor
    assert torch.equal(copied, conv)


def write(how: str, x: torch.Tensor) -> None:
    with torch.no_grad():
        {
            "in place": lambda: x.mul_(2),
            "through a view": lambda: x[0].fill_(7),
            "behind the version counter": lambda: x.data.add_(1),
            "through numpy": lambda: np.add(x.numpy(), 1, out=x.numpy()),
            "out=": lambda: torch.neg(x, out=x),
        }[how]()


WAYS = [
    "in place",
    "through a view",
    "behind the version counter",
    "through numpy",
    "out=",
]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_writes_after_the_pass_do_not_change_what_is_read(
    how: str, mode: Callable[[], Any]
) -> None:
    model, x = net(), images()
    expected = F.conv2d(x, model[0].weight, model[0].bias).detach()
    with featx.capture(model, "0") as features, mode():
        model(x)
        own = returned(model, ["0"])["0"]
        if how == "through numpy" and own.requires_grad:
            own = own.detach()
        write(how, own)
        assert not torch.equal(own, expected)
        assert torch.equal(features["0"], expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(np.ones((2, 3), np.float32)),
        lambda: torch.ones(2, 3).share_memory_(),
        lambda: nn.Parameter(torch.ones(2, 3)),
        lambda: torch.ones(2, 3).to_sparse(),
        lambda: torch.ones(2, 3) > 0,
    ],
)
def test_tensors_of_any_memory_are_captured(make: Callable[[], torch.Tensor]) -> None:
    class Returns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    x = make()
    model = nn.Sequential(Returns())
    with featx.capture(model, "0") as features:
        assert model(x) is features["0"] is x


def test_no_tensor_lives_on_after_the_block() -> None:
    model, x = net(inplace=True), images()
    asked = ["0", "1", "0:grad_output", "2:grad_output", "3:grad_input", "3:input", "4"]
    living: list[weakref.ref[torch.Tensor]] = []
    gc.disable()
    try:
        with featx.capture(model, asked) as features:
            for _ in range(3):
                output = model(x)
                output[:, 0].sum().backward()
                living += [weakref.ref(features[name]) for name in asked]
                assert sum(each() is not None for each in living) == len(asked)
        own = features["4"]
        del features, output
        assert [each() for each in living if each() is not None] == [own]
        del own
        assert all(each() is None for each in living)
    finally:
        gc.enable()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
