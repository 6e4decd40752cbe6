"""Gradients are clipped as torch clips them, alarms name the right module, and no hook stays."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch.utils.checkpoint import checkpoint

import featx
from featx.errors import ConfigError, LayerError, ModelError, RunError
from featx.gradients import Alarm, GradientAlarm, GradientLog, Limits, watch
from featx.layers import OpenCall

pytestmark = pytest.mark.usefixtures("seeded")


def hooks_of(model: nn.Module) -> int:
    """Every hook that a watch could leave: of modules, of parameters, of all optimizers."""
    tables = [
        table
        for module in model.modules()
        for table in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
        )
    ]
    tables += [p._backward_hooks or {} for p in model.parameters()]
    tables += [torch_optimizer._global_optimizer_pre_hooks]
    tables += [torch_optimizer._global_optimizer_post_hooks]
    return sum(len(table) for table in tables)


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_optimizer_hook_stays() -> Iterator[None]:
    yield
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def loss_of(model: nn.Module, seed: int = 0, scale: float = 100.0) -> torch.Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    return scale * model(x).square().mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def seen_by_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[torch.Tensor]:
    """The gradients that the step of an optimizer works on; filled when it steps."""
    seen: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda *_: seen.extend(gradients(model)))
    return seen


class FunctionModule(nn.Module):
    """A named place for one function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


# --- clipping


def test_clip_value_is_torchs_to_the_bit_right_after_backward() -> None:
    model = net()
    loss_of(model).backward()
    unclipped = max(g.abs().max() for g in gradients(model))
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    expected = gradients(model)
    assert unclipped > 1

    model.zero_grad()
    with watch(model, clip_value=0.01):
        loss_of(model).backward()
        assert_same(gradients(model), expected)


@pytest.mark.parametrize("passes", [1, 3])
def test_clip_norm_is_torchs_to_the_bit_on_the_sum_of_all_passes(passes: int) -> None:
    model = net()
    for seed in range(passes):
        loss_of(model, seed).backward()
    raw = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    expected = gradients(model)
    model.zero_grad()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = seen_by_optimizer(optimizer, model)
    with watch(model, clip_norm=0.5) as log:
        for seed in range(passes):
            loss_of(model, seed).backward()
        optimizer.step()
    assert_same(seen, expected)
    assert [step.norm for step in log.steps] == [pytest.approx(float(raw), rel=1e-6)]


def test_each_pass_is_clamped_before_it_is_added() -> None:
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    expected = None
    for seed in range(3):
        twin.zero_grad()
        loss_of(twin, seed).backward()
        nn.utils.clip_grad_value_(twin.parameters(), 0.01)
        now = gradients(twin)
        expected = now if expected is None else [a + b for a, b in zip(expected, now, strict=True)]
    with watch(model, clip_value=0.01) as log:
        for seed in range(3):
            loss_of(model, seed).backward()
    assert expected is not None
    assert_same(gradients(model), expected)
    assert len(log.steps) == 1
    assert log.steps[0].norm > 1


def test_clip_norm_acts_inside_a_closure_whose_gradients_come_after_the_step_began() -> None:
    trained = []
    for clip in (False, True):
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure(model: nn.Module = model, clip: bool = clip) -> torch.Tensor:
            model.zero_grad()
            loss = loss_of(model)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        if clip:
            optimizer.step(closure)
        else:
            with watch(model, clip_norm=0.5) as log:
                optimizer.step(closure)
        trained.append([p.detach().clone() for p in model.parameters()])
    assert_same(trained[0], trained[1])
    assert len(log.steps) == 3


def test_shared_weights_are_clamped_on_the_sum_of_their_uses() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    loss_of(model).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    expected = gradients(model)
    model.zero_grad()
    with watch(model, clip_value=0.05) as log:
        loss_of(model).backward()
        assert_same(gradients(model), expected)
    assert set(log.steps[0].parameters) == {"0.weight", "0.bias", "2.bias"}


def test_frozen_and_unused_parameters_stay_without_a_gradient() -> None:
    model = nn.ModuleDict({"used": net(), "unused": nn.Linear(2, 2)})
    model["used"][0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, clip_norm=0.1, clip_value=0.01) as log:
        loss_of(model["used"]).backward()
        optimizer.step()
    assert not any(p.requires_grad for p in model["used"][0].parameters())
    assert all(p.grad is None for p in model["unused"].parameters())
    assert set(log.steps[0].parameters) == {
        f"used.{i}.{n}" for i in "24" for n in ("weight", "bias")
    }


def test_a_layer_unfrozen_or_added_inside_the_block_is_clamped_from_its_first_step_on() -> None:
    model = net()
    model[0].requires_grad_(False)
    with watch(model, clip_value=0.01):
        model[0].requires_grad_(True)
        model[4] = nn.Linear(16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            seen = seen_by_optimizer(optimizer, model)
            model.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            assert max(g.abs().max() for g in seen) <= 0.01
        model.zero_grad()
        loss_of(model).backward()
        assert max(g.abs().max() for g in gradients(model)) <= 0.01
    assert hooks_of(model) == 0


def test_a_layer_added_in_front_between_two_passes_of_a_step_is_no_update() -> None:
    model = nn.Sequential(*net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model) as log:
        loss_of(model).backward()
        optimizer.step()
        loss_of(model).backward()
        model.insert(0, nn.Linear(6, 6))
        loss_of(model).backward()
        optimizer.step()
    assert len(log.steps) == 2


def test_of_two_optimizers_each_has_the_norm_of_its_own_parameters() -> None:
    model = net()
    first = torch.optim.SGD(model[:2].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    loss_of(model).backward()
    before = gradients(model)
    with watch(model, clip_norm=0.5) as log:
        model.zero_grad()
        loss_of(model).backward()
        first.step()
        assert_same(gradients(model)[2:], before[2:])
        second.step()
    norms = [float(nn.utils.get_total_norm(part)) for part in (before[:2], before[2:])]
    assert [s.norm for s in log.steps] == pytest.approx(norms)
    assert float(nn.utils.get_total_norm(gradients(model)[2:])) == pytest.approx(0.5, rel=1e-5)


def test_parameters_of_a_lazy_layer_are_clamped_from_the_first_step_on() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3))
    with watch(model, clip_value=1e-3) as log:
        loss_of(model).backward()
        log.step()
        loss_of(model).backward()
    assert all(0 < float(p.grad.abs().max()) <= 2.001e-3 for p in model.parameters())  # type: ignore[union-attr]


def test_passes_with_tensors_of_functional_call_are_no_update() -> None:
    """The inner steps of MAML."""
    model = net()
    with watch(model) as log:
        fast: dict[str, torch.Tensor] = dict(model.named_parameters())
        for _ in range(3):
            x = torch.randn(8, 6)
            loss = torch.func.functional_call(model, fast, (x,)).square().mean()
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), grads, strict=True)}
        torch.func.functional_call(model, fast, (x,)).square().mean().backward()
        log.step()
        model.zero_grad()
    assert list(log.steps[0].parameters) == [name for name, _ in model.named_parameters()]


def test_a_manual_update_that_no_step_announced_is_refused() -> None:
    model = net()

    def train(announce: Callable[[], None]) -> None:
        for _ in range(2):
            model.zero_grad()
            loss_of(model).backward()
            announce()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.001 * p.grad

    with watch(model, clip_norm=0.5) as log:
        train(log.step)
        assert float(nn.utils.get_total_norm(gradients(model))) == pytest.approx(0.5, rel=1e-5)
    assert len(log.steps) == 2
    with pytest.raises(RunError, match=r"log\.step"), watch(model, clip_norm=0.5):
        train(lambda: None)


def test_gradients_left_at_the_end_of_the_block_are_judged_and_clipped_there() -> None:
    model = net()
    with watch(model, clip_norm=0.5) as log:
        loss_of(model).backward()
    assert float(nn.utils.get_total_norm(gradients(model))) == pytest.approx(0.5, rel=1e-5)
    assert len(log.steps) == 1


# --- mixed precision


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [{"clip_value": 0.01}, {"clip_norm": 0.5}])
def test_a_scaled_loss_is_clipped_and_measured_unscaled(
    fused: bool, clip: dict[str, float]
) -> None:
    trained, norms = [], []
    for scale in (None, 1024.0):
        torch.manual_seed(0)
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, fused=fused)
        with watch(model, scaler=scaler, **clip) as log:
            for _ in range(4):
                optimizer.zero_grad()
                scaler.scale(loss_of(model)).backward()
                scaler.step(optimizer)
                scaler.update()
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        norms.append([(step.norm, step.layers["0"]) for step in log.steps])
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_step_that_the_scaler_skips_is_no_alarm(fused: bool, set_to_none: bool) -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1e37, growth_interval=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    before = copy.deepcopy(model.state_dict())
    with watch(model, clip_value=0.01, scaler=scaler) as log:
        for i in range(12):
            optimizer.zero_grad(set_to_none=set_to_none)
            scaler.scale(loss_of(model, scale=1e4)).backward()
            scaler.step(optimizer)
            scaler.update(1024.0 if i == 3 else None)
            if i == 0:
                assert torch.equal(model[0].weight, before["0.weight"])  # really skipped
    assert not log.alarms
    assert 0 < len(log.steps) < 12
    assert all(math.isfinite(step.norm) for step in log.steps)


# --- vanishing and exploding


def sigmoid_net(depth: int = 24) -> nn.Sequential:
    layers = [m for _ in range(depth) for m in (nn.Linear(6, 6), nn.Sigmoid())]
    return nn.Sequential(*layers)


def test_a_deep_sigmoid_net_really_vanishes_and_the_early_layers_are_named() -> None:
    model = sigmoid_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model) as log:
        for step in range(1, 11):
            optimizer.zero_grad()
            loss_of(model, scale=1.0).backward()
            if step < 10:
                optimizer.step()
        with pytest.raises(GradientAlarm) as caught:
            optimizer.step()
    alarm = caught.value.alarm
    assert (alarm.kind, alarm.step) == ("vanishing", 10)
    assert alarm.layers[:4] == ("0", "2", "4", "6")
    assert "46" not in alarm.layers
    assert "44" not in alarm.layers
    assert "0.weight" in str(alarm.parameters)
    assert 0 < alarm.norm < 1e-12
    # The norm, where float32 would say 0, against float64 all the way.
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()
    exact(x).square().mean().backward()
    assert exact[0].weight.grad is not None
    assert log.steps[-1].parameters["0.weight"] == pytest.approx(
        float(exact[0].weight.grad.norm()), rel=1e-3
    )


def test_a_relu_net_of_the_same_depth_raises_nothing() -> None:
    layers = [m for _ in range(24) for m in (nn.Linear(32, 32), nn.ReLU(inplace=True))]
    model = nn.Sequential(nn.Linear(6, 32), *layers)
    for m in model:
        if isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with watch(model) as log:
        for _ in range(15):
            optimizer.zero_grad()
            loss_of(model, scale=1.0).backward()
            optimizer.step()
    assert len(log.steps) == 15
    assert not log.alarms


def test_vanishing_needs_consecutive_steps_and_is_told_once() -> None:
    model = sigmoid_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    output: list[Alarm] = []
    with watch(model, on_alarm=output.append, limits=Limits(vanishing_steps=4)) as log:
        for i in range(12):
            optimizer.zero_grad()
            if i == 2:  # a healthy step in between
                sum(100 * p.sum() for p in model.parameters()).backward()
            else:
                loss_of(model).backward()
            optimizer.step()
    assert [alarm.step for alarm in output] == [7]
    assert list(log.alarms) == output


class Recurrent(nn.Module):
    """A linear-ish RNN whose recurrent weights stretch what passes: 80 steps of about 1.6."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 8, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(1.6 * torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def train_recurrent(model: nn.Module, num_steps: int = 12) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(16, 80, 4, generator=torch.Generator().manual_seed(2))
    for _ in range(num_steps):
        optimizer.zero_grad()
        F.l1_loss(model(x), x.sum((1, 2))[:, None]).backward()
        optimizer.step()


def is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def test_an_rnn_really_explodes_is_stopped_in_time_and_is_tamed_by_clipping() -> None:
    model = Recurrent()
    train_recurrent(model)
    assert not is_finite(model)

    torch.manual_seed(0)
    model = Recurrent()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GradientAlarm) as caught, watch(model):
        train_recurrent(model)
    assert caught.value.alarm.kind == "exploding"
    assert caught.value.alarm.step == 1
    assert caught.value.alarm.norm > 1e6
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    for clip in ({"clip_norm": 1.0}, {"clip_value": 0.01}):
        torch.manual_seed(0)
        model = Recurrent()
        with watch(model, **clip) as log:
            train_recurrent(model)
        assert is_finite(model)
        assert len(log.steps) == 12
        assert log.alarms[0].kind == "exploding"


def test_a_jump_over_the_median_is_an_explosion() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with watch(model) as log:
        for _ in range(14):
            optimizer.zero_grad()
            loss_of(model, scale=1.0).backward()
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, scale=1e4).backward()
        with pytest.raises(GradientAlarm, match="times the median"):
            optimizer.step()
    assert log.steps[-1].number == 15
    assert log.steps[-1].norm > 1000 * log.steps[-2].norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
@pytest.mark.parametrize("value", [1e-25, 1e25, 3e-20, 1.0])
def test_norms_are_right_where_float32_squares_are_not(value: float, dtype: torch.dtype) -> None:
    value = 6e4 if dtype is torch.float16 else value
    parameter = nn.Parameter(torch.ones(9, dtype=dtype))
    model = nn.ParameterList([parameter])
    with watch(model, limits=Limits(exploding_norm=None)) as log:
        parameter.grad = torch.full((9,), value, dtype=dtype)
        log.step()
    assert log.steps[0].norm == pytest.approx(3 * value, rel=1e-3)


# --- NaN and Inf


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: torch.sqrt(x * 0), "nan"),  # 1 / 0, times 0
        (lambda x: torch.sqrt(x - x.detach()), "inf"),  # 1 / 0
        (lambda x: torch.log(x * 0).exp(), "nan"),  # log(0): 0 / 0
    ],
)
def test_nan_is_located_where_it_arose(
    function: Callable[[torch.Tensor], torch.Tensor], kind: str, inside: bool
) -> None:
    model = net()
    if inside:
        model[2] = nn.Sequential(nn.Linear(16, 16), FunctionModule(function), nn.Tanh())
        place = "2.1"
    else:
        model[3] = FunctionModule(function)
        place = "3"
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model) as log:
        loss_of(model).backward()
        with pytest.raises(GradientAlarm) as caught:
            optimizer.step()
    alarm = caught.value.alarm
    assert (alarm.kind, alarm.layers, alarm.step) == (kind, (place,), 1)
    assert alarm.parameters[0] == "0.weight"
    assert not any(name.startswith("4") for name in alarm.parameters)
    assert list(log.alarms) == [alarm]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Residual(nn.Module):
    """x + f(x), twice with one shared activation, and a square root that no module owns."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.relu = nn.ReLU()
        self.branch = FunctionModule(lambda x: torch.sqrt(x * 0))
        self.functional = functional

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.a(x))
        x = x + (torch.sqrt(x * 0) if self.functional else self.branch(x))
        return self.relu(self.b(x))


@pytest.mark.parametrize(("functional", "place"), [(False, "block.branch"), (True, "block")])
def test_nan_in_a_residual_branch_is_not_blamed_on_a_shared_relu(
    functional: bool, place: str
) -> None:
    model = nn.Sequential()
    model.add_module("block", Residual(functional))
    model.add_module("head", nn.Linear(6, 3))
    with pytest.raises(GradientAlarm) as caught, watch(model):
        loss_of(model).backward()
    assert caught.value.alarm.layers == (place,)


def test_nan_that_comes_from_the_loss_is_said_to() -> None:
    model = net()
    with pytest.raises(GradientAlarm, match="look at the loss") as caught, watch(model):
        torch.log(model(torch.randn(2, 6)) * 0).sum().backward()
    assert caught.value.alarm.layers == ()


def test_nan_is_traced_to_no_module_if_no_flow_is_watched_there() -> None:
    model = net()
    model[3] = FunctionModule(lambda x: torch.sqrt(x * 0))
    for layers, where in (([], "cannot be traced"), (["2"], r"arose in \(model\)")):
        model.zero_grad()
        with pytest.raises(GradientAlarm, match=where), watch(model, layers=layers):
            loss_of(model).backward()


def test_nan_in_a_module_that_was_added_inside_the_block_is_named() -> None:
    model = net()
    with watch(model, layers=[]) as log:
        model.extend([nn.Tanh(), nn.Linear(3, 2)])
        model[6].weight.register_hook(lambda grad: grad * math.nan)
        model[6].bias.register_hook(lambda grad: grad * math.nan)
        loss_of(model).backward()
        with pytest.raises(GradientAlarm, match=r"6\.weight, 6\.bias got it"):
            log.step()


def test_inf_that_clamping_hides_is_still_an_alarm() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    with watch(model, clip_value=0.01, on_alarm="record") as log:
        (model(torch.full((1, 2), 3e38)) * 10).sum().backward()
        assert model[0].weight.grad is not None
        assert float(model[0].weight.grad.abs().max()) == pytest.approx(0.01)
    assert [alarm.kind for alarm in log.alarms] == ["inf"]
    assert log.alarms[0].layers == ("0",)


def test_gradients_thrown_away_before_a_step_are_in_no_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model) as log:
        (loss_of(model) * math.nan).backward()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert not log.alarms
    assert math.isfinite(log.steps[0].layers[""])


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_gradients_thrown_away_before_a_method_of_the_model_are_in_no_step(
    is_checkpointed: bool,
) -> None:
    head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Identity())
    model, x = nn.ModuleDict({"head": head}), torch.randn(8, 6)  # not called itself
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss() -> torch.Tensor:
        y = checkpoint(head, x, use_reentrant=False) if is_checkpointed else head(x)
        return y.square().mean()

    with watch(model) as log:
        for factor in (1.0, math.nan, 1.0):
            optimizer.zero_grad()
            (loss() * factor).backward()
        optimizer.step()
    assert not log.alarms
    assert math.isfinite(log.steps[0].layers["head"])


def test_a_checkpoint_around_the_whole_model_keeps_its_flow() -> None:
    model, x = net(), torch.randn(8, 6)
    norms = []
    for use in (False, True):
        with watch(model) as log:
            output = checkpoint(model, x, use_reentrant=False) if use else model(x)
            output.square().mean().backward()
        norms.append(log.steps[0].layers[""])
        model.zero_grad()
    assert norms[1] == pytest.approx(norms[0])


class MomentumNet(nn.Module):
    """A model that updates its frozen encoder in each pass, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = net(), net().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mean, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mean.lerp_(new, 0.1)
        return self.online(x) - self.target(x)


def test_a_momentum_encoder_is_updated_between_passes_of_one_step() -> None:
    model = MomentumNet()
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.01)
    with watch(model, clip_norm=0.5) as log:
        for _ in range(2):
            loss_of(model).backward()
        optimizer.step()
    assert len(log.steps) == 1


# --- the flow


def test_flow_is_what_full_backward_hooks_see() -> None:
    model = net()
    expected: dict[str, float] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, grad_input: object, grad_output: tuple[torch.Tensor]) -> None:
            expected[name] = float(grad_output[0].norm())

        return hook

    x = torch.randn(8, 6, requires_grad=True)
    handles = [m.register_full_backward_hook(keep(n)) for n, m in model.named_modules()]
    model(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    with watch(model) as log:
        model(x).square().sum().backward()
    assert log.steps[0].layers == pytest.approx(expected, rel=1e-6)
    lines = log.table().splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "(model)", *"01234"]
    assert len({len(line) for line in lines}) == 1


def test_layers_choose_whose_flow_is_watched() -> None:
    model = net()
    for layers, expected in ((["2"], {"", "2"}), ([], {""})):
        with watch(model, layers=layers) as log:
            loss_of(model).backward()
        assert set(log.steps[0].layers) == expected
        assert len(log.steps[0].parameters) == 6


# --- left as found


def fail(alarm: Alarm) -> None:
    raise ZeroDivisionError


def fail_in_block(model: nn.Module) -> GradientLog:
    with contextlib.suppress(ZeroDivisionError), watch(model, clip_value=0.01) as log:
        loss_of(model).backward()
        raise ZeroDivisionError
    return log


def test_hooks_are_gone_after_success_and_after_an_exception_and_from_living_graphs() -> None:
    model = net().eval()
    model[0].requires_grad_(False)
    state = [(p.requires_grad, p._version) for p in model.parameters()]
    with watch(model, clip_value=0.01, clip_norm=1.0):
        assert hooks_of(model) > 10
        left = loss_of(model)
    assert hooks_of(model) == 0
    with pytest.raises(ZeroDivisionError), watch(model, clip_value=0.01, on_alarm=fail):
        (loss_of(model) * math.nan).backward()
    assert hooks_of(model) == 0
    log = fail_in_block(model)
    assert not log.steps
    assert hooks_of(model) == 0
    assert not model.training
    assert state == [(p.requires_grad, p._version) for p in model.parameters()]
    assert all(m._is_full_backward_hook is None for m in model.modules())
    model.zero_grad()
    left.backward()
    assert max(g.abs().max() for g in gradients(model)) > 0.01
    assert not log.steps


def test_a_forward_that_raises_leaves_the_next_one_right() -> None:
    model = nn.Sequential(nn.Linear(6, 6), FunctionModule(torch.tanh), nn.Linear(6, 2))
    with watch(model) as log:
        model[1].function = lambda x: x.no_such_thing
        with pytest.raises(AttributeError):
            loss_of(model)
        model[1].function = torch.tanh
        loss_of(model).backward()
    assert set(log.steps[0].layers) == {"", "0", "1", "2"}


def test_nested_watches_of_a_model_and_a_part_both_see_and_clip() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = seen_by_optimizer(optimizer, model)
    with watch(model, clip_norm=5.0) as outer:
        with watch(model, clip_norm=0.5) as inner, watch(model[2]) as part:
            loss_of(model).backward()
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert float(nn.utils.get_total_norm(seen[:6])) == pytest.approx(0.5, rel=1e-5)
    assert float(nn.utils.get_total_norm(seen[6:])) == pytest.approx(5.0, rel=1e-5)
    assert [len(log.steps) for log in (outer, inner, part)] == [2, 1, 1]
    assert set(part.steps[0].parameters) == {"weight", "bias"}
    assert hooks_of(model) == 0


def test_a_copy_of_the_model_and_other_optimizers_are_none_of_its_business() -> None:
    model, other = net(), net()
    with watch(model, clip_value=0.01) as log:
        twin = copy.deepcopy(model)
        for stranger in (twin, other):
            loss_of(stranger).backward()
            torch.optim.SGD(stranger.parameters(), lr=0.1).step()
            assert max(g.abs().max() for g in gradients(stranger)) > 0.01
    assert not log.steps


def test_memory_is_bounded_over_many_steps_and_forgotten_passes() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    leaf = torch.randn(2, 6, requires_grad=True)  # lives on, with its hook
    with watch(model, keep_steps=10, on_alarm="record") as log:
        for _ in range(100):
            model(leaf)  # nobody goes back through this one
        for _ in range(20):
            optimizer.zero_grad()
            model(leaf).sum().backward()
            optimizer.step()
        assert len(log.steps) == 10
        assert log.steps[-1].number == 20
        gc.collect()
        num_tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
        for _ in range(300):
            model(leaf)
        assert len(leaf._backward_hooks or {}) == 1
        living = [each for each in gc.get_objects() if isinstance(each, torch.Tensor | OpenCall)]
        assert sum(isinstance(each, torch.Tensor) for each in living) <= num_tensors
        assert sum(isinstance(each, OpenCall) for each in living) < 500
    assert len(leaf._backward_hooks or {}) == 0


def test_a_pass_without_gradients_between_backward_and_step_changes_nothing() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model) as log:
        loss_of(model).backward()
        with torch.no_grad():
            loss_of(model, 1)
        optimizer.step()
    assert len(log.steps[0].layers) == 6


@pytest.mark.slow
def test_a_compiled_model_is_clipped_and_measured_by_parameter() -> None:
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    loss_of(model).backward()
    raw = gradients(model)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(compiled, clip_norm=0.5) as log:
        loss_of(compiled).backward()
        optimizer.step()
    assert log.steps[0].norm == pytest.approx(float(nn.utils.get_total_norm(raw)), rel=1e-5)
    assert float(nn.utils.get_total_norm(gradients(model))) == pytest.approx(0.5, rel=1e-4)
    assert hooks_of(model) == 0
    model.zero_grad()
    loss_of(compiled).backward()
    for ours, theirs in zip(gradients(model), raw, strict=True):
        assert ours.shape == theirs.shape


@contextlib.contextmanager
def refused_synchronisation() -> Iterator[None]:
    """Context in which an operation that waits for the device raises RuntimeError."""
    with warnings.catch_warnings():
        # torch sets the mode and then warns once that it is a prototype, so the mode has to be
        # reset even if that warning is an error.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_nothing_waits_for_the_device_before_the_step(dtype: torch.dtype) -> None:
    model = net().to("cuda", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6, device="cuda", dtype=dtype)
    model(x).square().sum().backward()
    raw = gradients(model)
    model.zero_grad()
    with watch(model, clip_value=10.0, clip_norm=0.5) as log:
        with refused_synchronisation():
            model(x).square().sum().backward()
        optimizer.step()
    expected = float(torch.cat([g.double().flatten() for g in raw]).norm())
    assert log.steps[0].norm == pytest.approx(expected, rel=1e-5)
    total = float(nn.utils.get_total_norm([g.float() for g in gradients(model)]))
    assert total == pytest.approx(0.5, rel=1e-5 if dtype is torch.float32 else 1e-2)
    assert len(log.steps[0].layers) == 6


# --- arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {"clip_value": 0},
        {"clip_value": math.nan},
        {"clip_norm": -1.0},
        {"clip_norm": math.inf},
        {"on_alarm": "ignore"},
        {"keep_steps": 1},
        {"keep_steps": "50"},
        {"limits": {"exploding_norm": 1.0}},
    ],
)
def test_wrong_arguments_are_refused_and_leave_no_hook(arguments: dict[str, object]) -> None:
    model = net()
    with pytest.raises(ConfigError, match=next(iter(arguments))), watch(model, **arguments):  # type: ignore[arg-type]
        pass
    assert hooks_of(model) == 0


@pytest.mark.parametrize("block", [watch, featx.watch])
def test_a_model_that_is_no_module_is_refused(block: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match=r"model is a int; expected a torch\.nn\.Module"), block(5):
        pass


@pytest.mark.parametrize("option", ["clip_value", "clip_norm"])
def test_a_limit_may_be_a_number_of_numpy(option: str) -> None:
    clipped = []
    for limit in (0.125, np.float32(0.125)):
        torch.manual_seed(0)
        model = net()
        with watch(model, **{option: limit}) as log:
            loss_of(model).backward()
            log.step()
        clipped.append(gradients(model))
    assert all(torch.equal(x, y) for x, y in zip(*clipped, strict=True))


def test_wrong_limits_and_layers_are_refused() -> None:
    for wrong in ({"exploding_norm": -1}, {"vanishing_ratio": 2.0}, {"vanishing_steps": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Limits(**wrong)
    model = nn.Sequential()
    model.add_module("encoder", nn.Linear(2, 2))
    with pytest.raises(LayerError, match="Nearest: encoder"), watch(model, layers=["encodr"]):
        pass
    with watch(model, layers="encoder"):
        pass
    assert hooks_of(model) == 0


def test_sparse_gradients_are_refused_before_the_step() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    for clip_value in (None, 0.1):
        with pytest.raises(ConfigError, match="sparse=False"), watch(model, clip_value=clip_value):
            model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_gradients_of_nested_tensors_are_measured(layout: torch.layout) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    parts = [torch.randn(2, 2), torch.randn(4, 2)]
    with watch(model) as log:
        output = model(torch.nested.as_nested_tensor(parts, layout=layout))
        torch.cat(output.unbind()).square().sum().backward()
    nested = log.steps[0]
    model.zero_grad()
    with watch(model) as log:
        model(torch.cat(parts)).square().sum().backward()
    assert nested.layers == pytest.approx(log.steps[0].layers)
    assert nested.norm == pytest.approx(log.steps[0].norm)


def test_an_alarm_survives_pickling() -> None:
    alarm = Alarm("nan", 3, ("a",), ("a.weight",), math.inf, "because.")
    error = pickle.loads(pickle.dumps(GradientAlarm(alarm)))
    assert error.alarm == alarm
    assert str(error) == "nan gradient in step 3: because."
    assert isinstance(error, RunError)


def test_the_page_runs_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "docs" / "gradients.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) >= 6
    assert "vanishing gradient in step 3: for 3 steps, 0.0, 1.0" in capsys.readouterr().out


class Rectified(nn.Module):
    """A linear layer on tokens, whose output is a view, and a function that no module sees."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.inplace = nn.Linear(6, 8), inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (torch.relu_(y) if self.inplace else y.relu()) @ torch.ones(8, 3)


@pytest.mark.parametrize("layers", [None, ["linear"]])
def test_a_layer_whose_output_is_a_view_changed_in_place_is_not_missing(
    layers: list[str] | None,
) -> None:
    steps = []
    for inplace in (False, True):
        model = Rectified(inplace)
        with watch(model, layers=layers) as log:
            model(torch.ones(2, 4, 6)).square().sum().backward()
        steps.append(log.steps[-1])
    assert steps[1].layers == pytest.approx(steps[0].layers)
    assert steps[1].parameters == pytest.approx(steps[0].parameters)
