"""featx.edit: against models of plain PyTorch that compute the edited values themselves."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Thread
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_engine import num_hooks
from torch import nn
from torch.utils.checkpoint import checkpoint

import featx
from featx.errors import LayerError

Edit = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.head = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.first(x)) + 1

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"logits": self.head(self.act(self.encode(x))), "hidden": [x, None]}


def keep(x: torch.Tensor) -> torch.Tensor:
    return x


def by_hand(model: Net, x: torch.Tensor, **edits: Edit) -> torch.Tensor:
    """The same model with the functions written into it."""
    step = edits.get
    x = step("first_in", keep)(x)
    x = step("first", keep)(F.linear(x, model.first.weight, model.first.bias))
    x = step("act1", keep)(x.relu())
    x = step("act2", keep)(step("add", keep)(x + 1).relu())
    return step("logits", keep)(F.linear(x, model.head.weight, model.head.bias))


def scale(x: torch.Tensor) -> torch.Tensor:
    return 2 * x - 0.5


def write(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x[:, 0] = 0
    return x


def images() -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


CASES = {
    "first": {"first": scale},
    "first:input": {"first_in": scale},
    "act@1": {"act1": scale},
    "act@2": {"act2": torch.zeros_like},
    "add": {"add": scale},
    ".logits": {"logits": scale},
    "head:input": {"act2": scale},
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_edited_model(name: str) -> None:
    model, x = Net(), images()
    (function,) = CASES[name].values()
    plain = model(x)["logits"]
    with featx.edit(model, {name: function}):
        output = model(x)
    expected = by_hand(model, x, **CASES[name])
    assert torch.equal(output["logits"], expected)
    assert output["hidden"][0] is x
    parameters = list(model.parameters())
    got, wanted = (
        torch.autograd.grad(y.square().sum(), parameters, allow_unused=True, materialize_grads=True)
        for y in (output["logits"], expected)
    )
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert num_hooks(model) == 0
    assert torch.equal(model(x)["logits"], plain)


def test_a_function_may_change_its_tensor_in_place() -> None:
    model, x = Net(), images()
    with torch.no_grad(), featx.edit(model, {"first": write}):
        output = model(x)["logits"]
    assert torch.equal(output, by_hand(model, x, first=write).detach())


@pytest.mark.parametrize("outer", ["edit", "capture"])
def test_capture_sees_the_edited_values_and_their_gradients(outer: str) -> None:
    model, x = Net(), images()
    edit = featx.edit(model, {"first": scale, "head:input": scale})
    capture = featx.capture(model, ["first", "first:grad_output", "head:input", ".logits"])
    with edit if outer == "edit" else capture as a, capture if outer == "edit" else edit as b:
        output = model(x)["logits"]
        output.square().sum().backward()
    features = b if outer == "edit" else a
    first = F.linear(x, model.first.weight, model.first.bias)
    edited = scale(first).detach().requires_grad_()
    assert torch.equal(features["first"], edited)
    before = scale((edited.relu() + 1).relu())
    assert torch.equal(features["head:input"], before)
    assert features[".logits"] is output
    (expected,) = torch.autograd.grad(model.head(before).square().sum(), edited)
    torch.testing.assert_close(features["first:grad_output"], expected)


def test_operations_are_captured_as_edited_if_the_edit_is_outside() -> None:
    model, x = Net(), images()
    with featx.edit(model, {"add": scale}), featx.capture(model, "add") as features:
        model(x)
    assert torch.equal(features["add"], scale(model.encode(x)))
    with (
        pytest.raises(LayerError, match=r"'add'.*featx.edit outside of featx.capture"),
        featx.capture(model, "add"),
        featx.edit(model, {"add": scale}),
    ):
        pass
    assert num_hooks(model) == 0


def test_a_gradient_is_replaced() -> None:
    model, x = Net(), images()
    with featx.edit(model, {"act@2:grad_output": torch.zeros_like, "first:grad_output": scale}):
        model(x)["logits"].sum().backward()
    assert torch.equal(model.first.bias.grad, torch.full((4,), -0.5 * 5))
    assert torch.equal(model.head.bias.grad, torch.full((2,), 5.0))


def test_two_edits_of_one_layer_compose_the_inner_block_first() -> None:
    model, x = Net(), images()
    with featx.edit(model, {"first": torch.relu}), featx.edit(model, {"first": scale}):
        output = model(x)["logits"]
    assert torch.equal(output, by_hand(model, x, first=lambda y: scale(y).relu()))


def test_any_call_is_edited_and_calls_have_numbers_in_a_call_of_the_model_only() -> None:
    model, x = Net(), images()
    with featx.edit(model, {"first": scale}):
        got = model.encode(x)
    assert torch.equal(got, scale(F.linear(x, model.first.weight, model.first.bias)).relu() + 1)
    with (
        pytest.raises(LayerError, match="Name 'act' without a number"),
        featx.edit(model, {"act@1": scale}),
    ):
        model.encode(x)
    assert num_hooks(model) == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_a_checkpoint_computes_again_are_edited_again(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.encode, x, use_reentrant=reentrant))

    model, x = Checkpointed(), images().requires_grad_()
    with featx.edit(model, {"first": scale}):
        model(x).square().sum().backward()
    first = scale(F.linear(x, model.first.weight, model.first.bias))
    expected = torch.autograd.grad(
        model.head(first.relu() + 1).square().sum(), [x, *model.parameters()]
    )
    got = [x.grad, *(p.grad for p in model.parameters())]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x


class Sums(nn.Module):
    def __init__(self, run: Callable[..., torch.Tensor] = lambda module, x: module(x)) -> None:
        super().__init__()
        self.a, self.b, self.run = Sum(), Sum(), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.b, self.run(self.a, x)).sin()


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss, model: loss.backward(),
        lambda loss, model: torch.autograd.backward(loss, inputs=list(model.parameters())[:2]),
        lambda loss, model: Thread(target=loss.backward),
    ],
)
def test_operations_that_a_checkpoint_computes_again_are_edited_again(
    backward: Callable[[torch.Tensor, nn.Module], Thread | None],
) -> None:
    gradients = []
    for run in (lambda module, x: checkpoint(module, x, use_reentrant=False), lambda m, x: m(x)):
        model = Sums(run)
        with featx.edit(model, {"a.add": torch.sin, "b.add": scale}):
            thread = backward(model(images()).sum(), model)
            if thread is not None:
                thread.start()
                thread.join()
        assert torch._C._len_torch_function_stack() == num_hooks(model) == 0
        gradients.append([p.grad for p in model.a.inner.parameters()])
    assert all(map(torch.equal, *gradients))


def test_operations_are_edited_and_captured_in_every_thread() -> None:
    model, x = Sums(), images()
    with torch.no_grad(), featx.edit(model, {"a.add": scale}):
        expected = model(x)
        with featx.capture(model, "a.add") as features, ThreadPoolExecutor(1) as pool:
            got, read = pool.submit(lambda: (model(x), features["a.add"])).result()
    assert torch.equal(got, expected)
    assert torch.equal(read, scale(model.a(x)))


def test_a_function_computes_on_the_default_device_of_the_user() -> None:
    devices = []

    def function(x: torch.Tensor) -> torch.Tensor:
        devices.append(torch.zeros(()).device.type)
        return x

    model, x = Sums(), images()
    with torch.device("meta"), featx.edit(model, {"a": function, "a.add": function}):
        model(x)
    assert devices == ["meta", "meta"]


def test_operations_of_a_new_module_are_not_taken_for_those_around_it() -> None:
    model = Sums()
    with featx.edit(model, {"a.add": torch.zeros_like}):
        model(images())
        model.b.inner = Sum()  # type: ignore[assignment]
        model(images())
        model.a.inner = Sum()  # type: ignore[assignment]
        with pytest.raises(LayerError, match=r"the module 'a\.inner' is new since the block began"):
            model(images())


def test_a_block_of_operations_that_ends_first_leaves_the_others() -> None:
    model, x = Sums(), images()
    edited, captured = contextlib.ExitStack(), contextlib.ExitStack()
    edited.enter_context(featx.edit(model, {"a.add": scale}))
    features = captured.enter_context(featx.capture(model, "b.add"))
    with pytest.raises(LayerError, match="in one block"), featx.edit(model, {"b.add": scale}):
        pass
    model(x)
    edited.close()
    model(x)
    assert torch.equal(features["b.add"], model.b(model.a(x)))
    captured.close()
    assert torch._C._len_torch_function_stack() == num_hooks(model) == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_edited() -> None:
    parts = [images(), images()[:2]]
    tensor = torch.nested.as_nested_tensor(parts)
    model = nn.Sequential(nn.Identity())
    with torch.no_grad(), featx.edit(model, {"0": lambda x: x * 2}):
        got = model(tensor)
    assert all(torch.equal(a, 2 * b) for a, b in zip(got.unbind(), parts, strict=True))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[:1], r"first: its function returned a tensor of shape \(1, 4\)"),
        (torch.Tensor.double, r"first: .* of dtype torch.float64, expected torch.float32"),
        (lambda x: x.to("meta"), "first: .* of device meta, expected cpu"),
        (lambda x: None, "first: its function returned NoneType"),
    ],
)
def test_what_does_not_fit_names_the_layer(function: Any, message: str) -> None:
    model = Net()
    with pytest.raises(LayerError, match=message), featx.edit(model, {"first": function}):
        model(images())
    assert num_hooks(model) == 0


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"first": 0}, r"first: expected a function .* lambda tensor: replacement"),
        ({"first": torch.zeros(2, 4)}, r"first: expected a function"),
        (["first"], "edits is a list; expected a mapping from names to functions"),
        (dict.fromkeys(["first", "first:output"], torch.relu), "name one tensor; give one"),
    ],
)
def test_what_is_no_function_is_refused_before_the_model_runs(edits: Any, message: str) -> None:
    with pytest.raises(LayerError, match=message), featx.edit(Net(), edits):
        pass


def test_the_output_may_be_named_as_such() -> None:
    model = Net()
    with torch.no_grad(), featx.edit(model, {"first": torch.zeros_like}):
        expected = model(images())
    with torch.no_grad(), featx.edit(model, {"first:output": torch.zeros_like}):
        assert torch.equal(model(images())["logits"], expected["logits"])


def test_an_edit_without_effect_is_an_error() -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(1, 1)

    model = Unused()
    if "torch._dynamo" in sys.modules:  # compiled code may have run unseen
        torch._dynamo.utils.counters.clear()
    with featx.edit(model, {"other": scale}):
        pass
    with (
        pytest.raises(LayerError, match="'other' was not called"),
        featx.edit(model, {"other": scale, "first": scale}),
    ):
        model(images())
    with (
        pytest.raises(LayerError, match="'other:grad_output' was not called"),
        featx.edit(model, {"other:grad_output": scale}),
    ):
        model(images())
    with pytest.raises(RuntimeError, match="shapes"), featx.edit(model, {"other": scale}):
        model(torch.ones(2, 7))
    with pytest.raises(LayerError, match="no layer 'othr'"), featx.edit(model, {"othr": scale}):
        pass
    assert num_hooks(model) == 0


@dataclass(frozen=True)
class Fields:
    kept: torch.Tensor
    x: torch.Tensor


class Pair(tuple[torch.Tensor, torch.Tensor]):
    def __new__(cls, kept: torch.Tensor, x: torch.Tensor) -> Pair:
        return super().__new__(cls, (kept, x))


class Keyed(dict[Any, torch.Tensor]):
    note = ""


def keyed(kept: torch.Tensor, x: torch.Tensor) -> Keyed:
    result = Keyed({"kept": kept, "x-1.2": x})
    result.note = "stays"
    return result


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Fields, ".x"),
        (Pair, "[1]"),
        (keyed, ".x-1.2"),
        (lambda kept, x: defaultdict(list, kept=kept, x=x), ".x"),
        (lambda kept, x: MappingProxyType({"kept": kept, "x": x}), ".x"),
        (lambda kept, x: torch.sort(kept), "[0]"),
        (lambda kept, x: nn.utils.rnn.pack_sequence([x], enforce_sorted=False), "[0]"),
    ],
)
@pytest.mark.parametrize("capture", ["", ":grad_output"])
def test_containers_of_any_type_are_edited_and_captured(
    make: Callable[..., Any], name: str, capture: str
) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return make(x, x.sort().values)

    layer, x = Layer(), images().requires_grad_()
    plain = layer(x)
    with featx.edit(layer, {name + capture: scale}), featx.capture(layer, name) as features:
        edited = layer(x)
        features[name].sum().backward()
    expected = x.detach().sort().values
    assert type(edited) is type(plain)
    torch.testing.assert_close(features[name], expected if capture else scale(expected))
    assert getattr(edited, "note", "stays") == "stays"
    torch.testing.assert_close(x.grad, torch.full_like(x, 1.5 if capture else 2))


@pytest.mark.parametrize("call", [featx.capture, lambda m, n: featx.edit(m, {n: scale})])
def test_a_module_that_is_replaced_inside_the_block_is_an_error(call: Callable[..., Any]) -> None:
    model = Net()
    with call(model, "head"):
        model(images())
        model.head = nn.Sequential(model.head, nn.Linear(2, 2))  # type: ignore[assignment]
        with pytest.raises(LayerError, match="another module has taken the place of 'head'"):
            model(images())
    assert num_hooks(model) == 0
