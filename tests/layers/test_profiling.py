"""Values, times and memory of every call, on models small enough to know them by hand."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_engine import num_hooks
from torch import nn
from zoo import ZeroDivisionBetween

from featx.layers import every_call, first_nonfinite, profile
from featx.layers.profiling import measure_memory, measure_times, measure_values, summarise


class Block(nn.Module):
    """One ReLU called twice, in place: its second call changes what `twice` gave."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(2, 2, bias=False)
        self.relu = nn.ReLU(inplace=True)
        with torch.no_grad():
            self.twice.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, -2.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.twice(self.relu(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), nn.Flatten())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        return {"y": y, "more": y / 0}


class Sleepy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004)
        return x


MEASURES = [measure_values, measure_times, measure_memory]


def test_values_are_those_of_the_moment_and_of_each_call() -> None:
    found, _ = measure_values(Model(), torch.tensor([[1.0, 3.0]]))
    order = ["body.0.relu", "body.0.twice", "body.0.relu", "body.0", "body.1", "body", ""]
    assert [name for name, _ in found] == order
    given = found["body.0.twice", 1].outputs[()]
    assert (given.minimum, given.mean, given.maximum, given.zeros) == (-6.0, -2.0, 2.0, 0.0)
    (taken,) = found["body.0.twice", 1].inputs.values()
    assert (taken.minimum, taken.mean, taken.maximum, taken.count) == (1.0, 2.0, 3.0, 2)
    rectified = found["body.0.relu", 2].outputs[()]
    assert (rectified.minimum, rectified.maximum, rectified.zeros) == (0.0, 2.0, 0.5)
    whole = found["", 1]
    assert whole.outputs[("more",)].nonfinite == 2  # 2 / 0 and 0 / 0
    assert whole.outputs[("more",)].mean is None
    assert whole.outputs[("y",)].nonfinite == 0


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.tensor([1, 0, 0, 3]), ("int64", 0.0, 1.0, 3.0, 0.5, 0)),
        (torch.tensor([True, False]), ("bool", 0.0, 0.5, 1.0, 0.5, 0)),
        (torch.tensor([1.0, float("nan"), 3.0, float("-inf")]), ("float32", 1.0, 2.0, 3.0, 0, 2)),
        (torch.tensor([1e30, 1e30]).bfloat16(), ("bfloat16", 1e30, 1e30, 1e30, 0.0, 0)),
        (torch.tensor([60000.0] * 64).half(), ("float16", 60000, 60000, 60000, 0.0, 0)),
        (torch.tensor([1 + 2j]), ("complex64", 1.0, 1.5, 2.0, 0.0, 0)),
    ],
)
def test_tensors_of_any_dtype(x: torch.Tensor, expected: tuple[Any, ...]) -> None:
    values = summarise(x)
    assert (values.dtype, values.nonfinite) == (expected[0], expected[-1])
    numbers = (values.minimum, values.mean, values.maximum, values.zeros)
    assert numbers == pytest.approx(expected[1:5], rel=0.01)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_values_of_a_quantised_tensor() -> None:
    values = summarise(torch.quantize_per_tensor(torch.tensor([0, 0.5, 1]), 0.25, 3, torch.quint8))
    assert (values.dtype, values.minimum, values.mean, values.maximum) == ("quint8", 0, 0.5, 1)


class Poison(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(Poison(1), nn.Sequential(Poison(math.nan)), Poison(2)), (("1.0", 1), True)),
        (ZeroDivisionBetween(Poison(1), Poison(2)), (("1", 1), False)),
        (nn.Sequential(Poison(1)), None),
    ],
)
def test_the_first_call_that_is_not_finite(model: nn.Module, expected: object) -> None:
    assert first_nonfinite(measure_values(model, torch.ones(1, 2))[0]) == expected


def test_times_of_layers_add_up() -> None:
    """Sleep takes at least what it says; what it takes beyond is the machine's."""
    model = nn.Sequential(nn.Sequential(Sleepy(), Sleepy()), Sleepy())
    times = measure_times(model, torch.ones(1, 2))
    assert 3 <= times.runs <= 15
    assert times.pass_ms >= 12
    assert all(times.total[name, 1] >= 4 for name in ("0.0", "0.1", "1"))
    assert times.total["0", 1] >= 8
    assert times.total["", 1] >= 12
    assert times.own["0.0", 1] == times.total["0.0", 1]
    # Of medians over runs, so only nearly the differences of the totals.
    assert times.own["0", 1] < 0.5 * times.total["0", 1]
    leaves = sum(times.total[name, 1] for name in ("0.0", "0.1", "1"))
    assert 0.5 * times.pass_ms < leaves < 2 * times.pass_ms


def test_bytes_of_the_tensors_a_call_gives() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    x = torch.ones(5, 3, 6, 7)
    memory = measure_memory(model, x)
    assert memory["0", 1].output == memory["", 1].output == 5 * 4 * 6 * 7 * 4
    assert memory["0", 1].added is None
    assert memory["0", 1].peak is None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert measure_memory(model, x)["0", 1].output == 5 * 4 * 6 * 7 * 2
        assert measure_values(model, x)[0]["0", 1].outputs[()].dtype == "bfloat16"


@pytest.mark.parametrize("measure", MEASURES)
def test_no_output_is_kept_alive(measure: Callable[..., Any]) -> None:
    """At any time a layer sees at most the tensors that a pass without hooks would hold."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal most
            y = x + 1
            alive.append(weakref.ref(y))
            most = max(most, sum(ref() is not None for ref in alive))
            return y

    with torch.no_grad():
        measure(nn.Sequential(*[nn.Sequential(Counted(), Counted()) for _ in range(10)]), X)
    assert most <= 3
    assert not any(ref() is not None for ref in alive)


X = torch.ones(1, 2)


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("made to fail")


@pytest.mark.parametrize("measure", MEASURES)
def test_the_model_is_left_as_it_was(measure: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval()
    x = torch.randn(2, 3, 8, 8)
    before, image = {k: v.clone() for k, v in model.state_dict().items()}, x.clone()
    handle = model[0].register_forward_hook(lambda *args: None)  # the user's own stays
    measure(model, x)
    assert num_hooks(model) == 1
    handle.remove()
    assert torch.equal(x, image)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model.append(Failing())
    with pytest.raises(ZeroDivisionError):
        measure(model, x)
    assert num_hooks(model) == 0


def test_every_call_survives_an_exception_that_the_model_catches() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tried, self.instead = nn.Sequential(Failing()), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.tried(x)
            except ZeroDivisionError:
                return self.instead(x)

    seen: list[tuple[str, int]] = []
    model = Careful()
    with every_call(
        model,
        lambda call, given: None,
        lambda call, n, output: seen.append((call.name, n)),
    ) as running:
        model(X)
        assert running.opened == []
    assert seen == [("instead", 1), ("", 1)]


@pytest.mark.gpu
def test_memory_and_times_on_cuda() -> None:
    """A convolution that needs a copy of its input: the copy is peak, and only the output stays."""
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)), nn.ReLU(True))
    x = torch.ones(8, 64, 128, 128, device="cuda")
    size = 4 * x.numel()
    model = model.cuda()
    with torch.no_grad():
        found = profile(model, x, ("values", "times", "memory"))
    relu, conv, whole = (found.memory[name, 1] for name in ("0.0", "0.1", ""))
    assert relu.output == relu.added == relu.peak == size
    assert conv.output == size
    assert conv.peak is not None
    assert conv.peak >= size
    assert found.memory["1", 1].added == 0  # in place
    assert whole.peak is not None
    assert whole.peak >= 2 * size
    assert found.times is not None
    assert found.times.total["0", 1] >= found.times.total["0.1", 1] > 0
    assert num_hooks(model) == 0
