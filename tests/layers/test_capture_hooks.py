"""Captured tensors are the layers' own, bit for bit, and the model is left as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from tiny_engine import num_hooks
from torch import nn

import featx
from featx.errors import LayerError, RunError
from featx.layers import CaptureHooks, CapturePoint, Expected, trace_forward
from featx.models import state_sha256


class Block(nn.Module):
    """conv -> bn -> in-place relu -> += identity: everything that overwrites what a hook saw."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.bn = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.plain = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn(self.conv(x)))
        out = self.plain(out)
        out += x
        return self.relu(out)


class Shared(nn.Module):
    """One ReLU called twice, as in ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.last = nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.relu(self.relu(x - 1) - 0.5))


class Nested(nn.Module):
    """A layer that returns a tuple with a dictionary in it."""

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return x + 1, {"hidden": x + 2, "pooled": x.mean((2, 3))}

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Chain(nn.Module):
    """Five layers that count their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(5))
        self.calls = [0] * 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, step in enumerate(self.steps):
            x = step(x)
            self.calls[i] += 1
        return x


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def points(*names: str) -> list[CapturePoint]:
    return [CapturePoint(name, name) for name in names]


@pytest.mark.parametrize("training", [True, False])
def test_capture_leaves_mode_parameters_and_buffers(x: torch.Tensor, training: bool) -> None:
    model = Block()
    model.train(training)
    model.bn.eval()
    before = state_sha256(model)
    flags = [m.training for m in model.modules()]
    with featx.capture(model, ["bn"]):
        model(x)
    assert [m.training for m in model.modules()] == flags
    assert state_sha256(model) == before
    assert all(p.requires_grad for p in model.parameters())


def test_capture_of_a_repeated_module_lists_its_calls(x: torch.Tensor) -> None:
    model = Shared()
    with featx.capture(model, ["relu", "relu@1", "relu@2", "relu@9"]) as features:
        model(x)
    with pytest.raises(LayerError, match=r"called 2 times.*relu@1, relu@2"):
        features["relu"]
    assert torch.equal(features["relu@1"], F.relu(x - 1))
    assert torch.equal(features["relu@2"], F.relu(F.relu(x - 1) - 0.5))
    with pytest.raises(LayerError, match="relu@9"):
        features["relu@9"]


def test_capture_of_nested_outputs(x: torch.Tensor) -> None:
    model = Nested()
    with featx.capture(model, ["inner[0]", "inner[1].hidden"]) as features:
        model(x)
    assert torch.equal(features["inner[0]"], x + 1)
    assert torch.equal(features["inner[1].hidden"], x + 2)
    with (
        pytest.raises(LayerError, match=r"inner gives 3 tensors \(\[0\].*\[1\].hidden"),
        featx.capture(model, ["inner"]),
    ):
        model(x)
    assert num_hooks(model) == 0


def test_only_names_of_the_block_can_be_read() -> None:
    with featx.capture(Block(), ["bn"]) as features, pytest.raises(LayerError, match="captures"):
        features["conv"]


def test_capture_hooks_are_gone_after_success_and_after_an_exception(x: torch.Tensor) -> None:
    model = Block().eval()
    with featx.capture(model, ["bn", "relu@1"]):
        assert num_hooks(model) == 4  # of two layers, and of the model itself
        model(x)
    assert num_hooks(model) == 0
    with pytest.raises(RuntimeError, match="channels"), featx.capture(model, ["bn"]):
        model(torch.zeros(2, 5, 8, 8))
    assert num_hooks(model) == 0
    with pytest.raises(KeyboardInterrupt), featx.capture(model, ["bn"]):
        raise KeyboardInterrupt
    assert num_hooks(model) == 0


def test_the_users_own_hooks_stay(x: torch.Tensor) -> None:
    model = Block().eval()
    seen = []
    handle = model.bn.register_forward_hook(lambda *args: seen.append(1))
    with featx.capture(model, ["bn"]):
        model(x)
    trace_forward(model, x)
    model(x)
    assert (len(seen), num_hooks(model)) == (3, 1)
    handle.remove()


def test_the_pass_stops_after_the_last_executed_layer_not_the_last_listed(x: torch.Tensor) -> None:
    model = Chain().eval()
    expected = Expected(["steps.1", "steps.3"], stop=True)
    with CaptureHooks(model, points("steps.3", "steps.1"), expected=expected) as hooks:
        values = hooks.forward(x)
    # steps.3 ran, but its caller never saw it return.
    assert model.calls == [1, 1, 1, 0, 0]
    assert hooks.record.fired == []
    model.calls = [0] * 5
    with featx.capture(model, ["steps.3", "steps.1"]) as features:
        model(x)
    assert torch.equal(values["steps.3"], features["steps.3"])
    assert torch.equal(values["steps.1"], features["steps.1"])
    assert model.calls == [1] * 5


def test_a_model_that_catches_every_exception_still_stops(x: torch.Tensor) -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                x = self.first(x)
            except Exception:  # noqa: BLE001 - what this test is about
                x = x * 0
            self.seen += 1
            return self.second(x)

    model = Stubborn().eval()
    with CaptureHooks(model, points("first"), expected=Expected(["first"], stop=True)) as hooks:
        values = hooks.forward(x)
    assert model.seen == 0
    assert torch.equal(values["first"], model.first(x))


@pytest.mark.parametrize("stop", [True, False])
def test_control_flow_that_differs_between_batches_is_an_error(stop: bool) -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.ReLU(), nn.ReLU(), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            if x.max() > 100:
                return self.a(x)
            if x.max() > 10:
                return self.c(self.b(x))
            return self.b(self.c(x))

    model = Moody()
    x = torch.ones(2, 3, 4, 4)
    expected = Expected(["a", "c", "b"], stop=stop)
    with CaptureHooks(model, points("a", "b", "c"), expected=expected) as hooks:
        assert set(hooks.forward(x)) == {"a", "b", "c"}
        with pytest.raises(RunError, match=r"fired, expected \['a', 'c', 'b'\]"):
            hooks.forward(20 * x)
        with pytest.raises(RunError, match=r"\['c', 'b'\] did not fire"):
            hooks.forward(200 * x)
        assert set(hooks.forward(x)) == {"a", "b", "c"}


class Threaded(nn.Module):
    """One layer is called in a thread that the forward starts, another without."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.plain = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return self.plain(pool.submit(self._call_inside, x).result())

    @torch.no_grad()
    def _call_inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


@torch.no_grad()
def test_a_layer_in_a_thread_of_the_model_is_refused_by_that_name(x: torch.Tensor) -> None:
    model = Threaded()
    expected = Expected(["inside", "plain"], calls={("inside", "output"): 1})
    for expectation in (expected, Expected()):
        with CaptureHooks(model, points("inside", "plain"), expected=expectation) as hooks:
            for _ in range(2):
                with pytest.raises(RunError, match="'inside' is called in another thread than"):
                    hooks.forward(x)
    with CaptureHooks(model, points("plain")) as hooks:
        assert torch.equal(hooks.forward(x)["plain"], model(x))
    for layers in (["plain", "inside"], ["inside"]):
        with featx.capture(model, layers) as features:
            y = model(x)
            assert len(layers) == 1 or torch.equal(features["plain"], y)
            with pytest.raises(LayerError, match="'inside' was called in another thread than the"):
                features["inside"]


def test_keyword_inputs_are_seen(x: torch.Tensor) -> None:
    class Keywords(nn.Module):
        class Inner(nn.Module):
            def forward(self, *, value: torch.Tensor) -> torch.Tensor:
                return value * 2

        def __init__(self) -> None:
            super().__init__()
            self.inner = self.Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(value=x)

    with CaptureHooks(Keywords(), [CapturePoint("in", "inner", "input")]) as hooks:
        assert torch.equal(hooks.forward(x)["in"], x)


def test_a_module_under_two_names_is_one_module(x: torch.Tensor) -> None:
    model = nn.Module()
    model.first = model.second = nn.Conv2d(3, 3, 1)
    model.forward = lambda x: model.first(x)  # type: ignore[method-assign]
    with torch.no_grad(), featx.capture(model, ["first", "second"]) as features:
        model(x)
    assert torch.equal(features["first"], features["second"])


def test_trace_records_shapes_calls_and_operations() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Flatten()).eval()
    model.append(nn.Linear(4 * 6 * 6, 10))
    found = trace_forward(model, torch.zeros(2, 3, 8, 8))
    assert [call.module for call in found.calls] == ["0", "1", "2", "3", ""]
    conv, relu, _, linear, root = found.calls
    assert conv.outputs == {(): (2, 4, 6, 6)}
    assert conv.inputs == {(0,): (2, 3, 8, 8)}
    assert conv.mflops == pytest.approx(2 * 4 * 36 * 27 / 1e6)
    assert linear.mflops == pytest.approx(2 * 144 * 10 / 1e6)
    assert root.mflops == pytest.approx(conv.mflops + linear.mflops)
    assert (conv.num_parameters, linear.num_parameters) == (108, 1450)
    assert (linear.is_linear, relu.is_linear, root.is_leaf, relu.is_leaf) == (
        True,
        False,
        False,
        True,
    )
    assert num_hooks(model) == 0


def test_trace_removes_its_hooks_after_an_exception_inside_forward() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(99, 2)).eval()
    with pytest.raises(RuntimeError, match="shape"):
        trace_forward(model, torch.zeros(2, 3, 8, 8))
    assert num_hooks(model) == 0
