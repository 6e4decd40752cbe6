"""featx.watch: passes logged call by call, up to the call that fails, and back."""

from __future__ import annotations

import gc
import re
import threading
import time
import warnings
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from zoo import ZeroDivisionBetween

import featx
from featx.config import ReduceConfig
from featx.layers import select, trace_forward


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.relu(self.conv(x)))
        return self.fc(x.mean((2, 3)))


def watched(module: nn.Module, x: torch.Tensor) -> list[str]:
    lines: list[str] = []
    with torch.no_grad(), featx.watch(module, lines.append):
        module(x)
    return lines


def plain(lines: list[str]) -> list[str]:
    """Indentation kept, other spaces and the times taken out."""
    return [
        re.sub(r"(?<=\S) +", " ", re.sub(r" +\d+\.\d\d ms", "", line)).rstrip() for line in lines
    ]


PASS = [
    "(the model) Sequential 2x3x8x8 -> ...",
    "0 Block 2x3x8x8 -> ...",
    "  0.conv Conv2d 2x3x8x8 -> 2x4x6x6 float32",
    "  0.relu ReLU 2x4x6x6 -> 2x4x6x6 float32",
    "  0.relu@2 ReLU 2x4x6x6 -> 2x4x6x6 float32",
    "  0.fc Linear 2x4 -> 2x2 float32",
    "0 Block 2x3x8x8 -> 2x2 float32",
    "(the model) Sequential 2x3x8x8 -> 2x2 float32",
]


def test_every_call_in_order_as_a_hook_sees_it() -> None:
    model = nn.Sequential(Block())
    lines = watched(model, torch.ones(2, 3, 8, 8))
    assert plain(lines) == PASS
    assert all(line.endswith(" ms") for line in lines if not line.endswith("..."))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_pass_that_fails_has_told_every_line_before() -> None:
    """What a broken layer gets is what people look for."""
    model = nn.Sequential(Block(width=5))
    output: list[str] = []
    with pytest.raises(RuntimeError), featx.watch(model, output.append) as log:
        model(torch.ones(2, 3, 8, 8))
    message = r"failed in 0\.fc \(Linear\), inside 0, \(the model\): RuntimeError: .*test_call_log"
    assert re.search(message, log.failure)
    assert plain(output) == [*PASS[:5], "  0.fc Linear 2x4 -> RuntimeError"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class DivideByZero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0


def test_values_that_are_not_finite_are_marked_and_the_first_is_reported() -> None:
    lines = watched(nn.Sequential(nn.ReLU(), DivideByZero(), nn.ReLU()), torch.ones(1, 3))
    marks = [line.partition(" ms")[2] for line in lines[1:]]
    assert marks == ["", "  3 NOT FINITE, the first", "  3 NOT FINITE", "  3 NOT FINITE"]

    lines = watched(ZeroDivisionBetween(nn.ReLU(), nn.ReLU()), torch.ones(1, 3))
    assert lines[2].endswith("  3 NOT FINITE, as some of its input")


def test_several_tensors_and_none() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor, scale: float = 2.0) -> object:
            return {"a": x, "b": [x, x.sum().long()], "c": None}

    class Nothing(nn.Module):
        def forward(self, x: object) -> None:
            return None

    lines = plain(watched(nn.Sequential(Odd(), Nothing()), torch.ones(1, 3)))
    assert lines[1] == "0 Odd 1x3 -> 2 of 1x3, scalar float32, int64"
    assert lines[2] == "1 Nothing 2 of 1x3, scalar -> no tensor -"


def test_rows_of_a_training_step_are_those_of_hooks_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(4, 2)), nn.Flatten()
    )
    x = torch.randn(2, 5, 3, requires_grad=True)
    plain = [torch.autograd.grad(model(x).square().sum(), list(model.parameters()))]
    with featx.watch(model) as log:
        for _ in range(2):
            model(x).square().sum().backward()
    forward = [row for row in log.rows if not row.is_backward]
    order = ["0", "1", "2.0", "2", "3", ""]
    assert [row.layer for row in forward] == 2 * order
    assert [row.depth for row in forward] == 2 * [1, 1, 2, 1, 1, 0]
    assert [(row.inputs, row.outputs) for row in forward[:3]] == [
        ("2x5x3", "2x5x4"),
        ("2x5x4", "2x5x4"),
        ("2x5x4", "2x5x2"),
    ]
    assert all(row.dtypes == "float32" and row.devices == "cpu" for row in log.rows)
    assert [row.num_bytes for row in forward[:3]] == [160, 160, 80]
    assert all(row.milliseconds is not None and row.milliseconds > 0 for row in forward)
    backward = [row for row in log.rows if row.is_backward]
    assert len(backward) == 2 * len(order)
    assert {row.layer for row in backward} == set(order)
    assert [row.layer for row in backward if row.depth == 1][:4] == ["3", "2", "1", "0"]
    assert {row.layer: row.outputs for row in backward}["0"] == "2x5x4"
    times = {row.layer: row.milliseconds for row in backward}
    assert times["0"] is not None
    assert times["2.0"] is not None
    for parameter, expected in zip(model.parameters(), plain[0], strict=True):
        torch.testing.assert_close(parameter.grad, 2 * expected)
    lines = str(log).splitlines()
    assert len(lines) == 1 + len(log.rows)
    assert lines[0].split()[:5] == ["layer", "type", "pass", "input", "output"]


def test_watching_leaves_no_hook_and_no_tensor() -> None:
    living = []

    class Note(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            living.append(weakref.ref(x))
            return x + 1

    model = nn.Sequential(nn.Linear(3, 4), Note(), nn.ReLU(inplace=True))
    gc.disable()
    try:
        with featx.watch(model, keep_rows=5) as log:
            for _ in range(3):
                model(torch.randn(2, 3)).sum().backward()
        assert len(log.rows) == 5
        assert len(living) == 3
        assert all(each() is None for each in living)
    finally:
        gc.enable()
    model.append(DivideByZero()).append(nn.Linear(9, 9))
    with pytest.raises(RuntimeError, match="shapes"), featx.watch(model) as log:
        model(torch.randn(2, 3))
    assert "failed in 4 (Linear)" in log.failure
    assert [row.layer for row in log.rows] == ["0", "1", "2", "3"]
    assert log.rows[-1].num_nonfinite > 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_calls_outside_a_call_of_the_model_and_compiled_models_are_watched() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2, 3))
    with torch.no_grad(), featx.watch(model) as log:
        model[0](torch.ones(2, 3))
    assert [row.layer for row in log.rows] == ["0"]
    with torch.no_grad(), featx.watch(compiled) as log:
        compiled(torch.ones(2, 3))
    assert [row.layer for row in log.rows] == ["_orig_mod.0", "_orig_mod.1", "_orig_mod", ""]


class Unreadable(nn.Module):
    """Tensors whose values, and in one case shape, cannot be read as those of others."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.to_sparse(), x.to(torch.float8_e4m3fn), torch.nested.nested_tensor([x, x[:1]])]


def test_tensors_of_any_memory_are_watched() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.full((4, 3), torch.inf)
    with featx.watch(model) as log:
        model(x)
        torch.func.vmap(model)(x)
        model.to("meta")(x.to("meta"))
    assert [(row.outputs, row.num_nonfinite) for row in log.rows if row.layer == "0"] == [
        ("4x2", 8),
        ("2", 0),
        ("4x2", 0),
    ]
    unreadable = Unreadable()
    with warnings.catch_warnings(), featx.watch(unreadable) as log:
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        unreadable(torch.ones(2, 2))
    assert log.rows[0].outputs == "2 of 2x2, nested"


def test_threads_that_share_a_model_are_watched_each_by_itself() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.002)
            return super().forward(x)

    model, x = nn.Sequential(nn.Sequential(Slow(2, 2), Slow(2, 2)), Slow(2, 2)), torch.ones(1, 2)

    def rows(num_passes: int, num_threads: int) -> Counter[tuple[str, int, bool]]:
        with featx.watch(model) as log, ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(lambda _: model(x).sum().backward(), range(num_passes)))
        return Counter((row.layer, row.depth, row.is_backward) for row in log.rows)

    assert rows(8, 4) == Counter({row: 8 * n for row, n in rows(1, 1).items()})


@pytest.mark.parametrize("is_before", [True, False])
def test_a_pass_in_another_thread_outlasts_the_block(is_before: bool) -> None:
    """torch has taken the hooks of the block for this pass, and calls them after their removal."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    expected, has_begun, may_end = model(x), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        has_begun.set()
        may_end.wait(60)

    register = model.register_forward_pre_hook if is_before else model.register_forward_hook
    register(wait)
    with ThreadPoolExecutor(1) as pool:
        with featx.watch(model):
            found = pool.submit(model, x)
            assert has_begun.wait(60)
        may_end.set()
        assert torch.equal(found.result(), expected)


class CallsItself(nn.Module):
    """A model of three passes through one layer, each inside a call of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = self.conv(x)
        return self(x, depth - 1) if depth else x


def test_each_call_of_a_model_that_calls_itself_has_its_number() -> None:
    model, x = CallsItself().eval(), torch.randn(2, 3, 6, 6)
    expected = [model.conv(x), model.conv(model.conv(x)), model(x)]
    assert plain(watched(model, x)) == [
        "(the model) CallsItself 2x3x6x6 -> ...",
        "conv Conv2d 2x3x6x6 -> 2x3x6x6 float32",
        "(the model) CallsItself 2x3x6x6 -> ...",
        "  conv@2 Conv2d 2x3x6x6 -> 2x3x6x6 float32",
        "  (the model) CallsItself 2x3x6x6 -> ...",
        "    conv@3 Conv2d 2x3x6x6 -> 2x3x6x6 float32",
        "  (the model) CallsItself 2x3x6x6 -> 2x3x6x6 float32",
        "@2 CallsItself 2x3x6x6 -> 2x3x6x6 float32",
        "@3 CallsItself 2x3x6x6 -> 2x3x6x6 float32",
    ]
    traced = trace_forward(model, x)
    names = [traced.call_name(call) for call in traced.calls if call.module]
    assert names == ["conv@1", "conv@2", "conv@3"]
    assert traced.calls[-1].mflops == pytest.approx(3 * traced.calls[0].mflops)
    layers = ["conv@1", "conv@2", "conv@3"]
    with torch.no_grad(), featx.capture(model, layers) as features:
        for _ in range(2):
            model(x)
            for name, tensor in zip(layers, expected, strict=True):
                assert torch.equal(features[name], tensor)
    with torch.no_grad(), featx.edit(model, {"conv@2": torch.zeros_like}):
        edited = model(x)
    assert torch.equal(edited, model.conv(torch.zeros_like(x)))
    chosen = select([("output", ReduceConfig())], traced, None, ()).chosen
    assert [(point.module, point.call) for point, _ in chosen] == [("", 3)]


def test_a_pass_of_a_model_that_calls_itself_is_over_after_ctrl_c() -> None:
    model, x = CallsItself().eval(), torch.randn(2, 3, 6, 6)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with torch.no_grad(), featx.capture(model, ["conv@1", "conv@2"]) as features:
        handle = model.conv.register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):  # after which torch calls no hooks
            model(x)
        handle.remove()
        model(2 * x)
        assert torch.equal(features["conv@1"], model.conv(2 * x))
