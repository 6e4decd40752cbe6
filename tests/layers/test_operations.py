"""Operations that no module owns: named as torch.fx names them, captured bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from conftest import slow_except
from tiny_engine import backbone_of, bound, hooked, noise, num_hooks
from tiny_model import KEYS, extract, run_job
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names
from zoo import ResidualConvNet

import featx
from featx.config import ReduceConfig
from featx.engine import Compute
from featx.errors import ConfigError, LayerError, RunError
from featx.layers import CaptureHooks, CapturePoint, select, trace_forward
from featx.layers.operations import OperationRecorder, plain_name
from featx.layers.profiling import measure_values


class Plain(nn.Module):
    """Operations of every spelling in a block, a tuple, and a module named as an operation is."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.mul = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            left, right = torch.chunk(y, 2, 1)
            y = torch.cat([1 - left, right / 2], 1)
            y = self.mul(y) * 3
            y += 1
            return torch.sigmoid(y)

    def __init__(self) -> None:
        super().__init__()
        self.block = self.Block()
        self.act = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        y = self.act(y + y.shape[0])
        return self.fc(y.mean((2, 3)))


class Mapped(nn.Module):
    """Gives a key that is called as an operation of its own is."""

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"mean": x + 1, "deviation": x.mean((2, 3))}

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)["mean"] * 2


def names_of(model: nn.Module, x: torch.Tensor) -> list[str]:
    return [operation.name for operation in trace_forward(model.eval(), x).operations]


def chosen(module: nn.Module, *requests: str, side: int = 8) -> list[str]:
    found = trace_forward(module.eval(), noise(2, side))
    return [
        point.name
        for point, _ in select([(r, ReduceConfig()) for r in requests], found, None, None).chosen
    ]


def test_every_spelling_has_its_plain_name() -> None:
    assert names_of(Plain(), noise()) == [
        "block.chunk",
        "block.sub",
        "block.truediv",
        "block.cat",
        "block.mul_1",  # block.mul is a module
        "block.add",
        "block.sigmoid",
        "add",
        "mean",
    ]
    for function, name in [
        (torch.Tensor.__rpow__, "pow"),
        (torch.Tensor.__floordiv__, "floordiv"),
        (torch.Tensor.__and__, "and_"),
        (torch.Tensor.__rlshift__, "lshift"),
        (torch.Tensor.__irshift__, "rshift"),
        (torch.Tensor.__rshift__, "rshift"),
        (torch.Tensor.__invert__, "invert"),
        (torch.Tensor.add_, "add"),
        (torch.div, "div"),
        (torch.Tensor.div, "truediv"),
        (torch.relu_, "relu"),
        (torch.Tensor.mT.__get__, "mT"),  # type: ignore[attr-defined]
        (torch.ops.aten.relu_.default, "relu"),
        (torch.ops.aten.add_.Tensor, "add"),
    ]:
        assert plain_name(function) == name


def test_a_parametrised_module_has_operations() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + 1

    model = nn.Sequential(Weighted())
    nn.utils.parametrizations.weight_norm(model[0])
    assert names_of(model, noise()) == ["0.matmul", "0.add"]


TORCHVISION = ["resnet18", "mobilenet_v3_small", "densenet121", "googlenet", "convnext_tiny"]


def without_in_place(name: str) -> nn.Module:
    """A model of torchvision without in-place modules, which overwrite what fx hands out."""
    options: dict[str, Any] = {"init_weights": False} if name == "googlenet" else {}
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, **options).eval()
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return model.requires_grad_(False)


def in_torchvisions_ops(model: nn.Module, operation: str) -> bool:
    """Whether an operation runs inside one of torchvision.ops, which its tracer does not enter."""
    parts = operation.split(".")
    above = [model.get_submodule(".".join(parts[:i])) for i in range(1, len(parts))]
    return any(type(module).__module__.startswith("torchvision.ops") for module in above)


@pytest.mark.parametrize("name", slow_except(TORCHVISION, "resnet18"))
@pytest.mark.filterwarnings("ignore:NOTE. The nodes obtained by tracing")  # googlenet in training
def test_names_and_values_are_those_of_torchvisions_feature_extraction(name: str) -> None:
    """Names in the same order, values bit for bit; where the names differ, why."""
    model, x = without_in_place(name), noise(2, 64)
    found = trace_forward(model, x)
    ours = list(found.by_operation)
    nodes = get_graph_node_names(model)[1]
    modules = dict(model.named_modules())
    functions = [node for node in nodes if node not in modules and node != "x"]
    common = [node for node in functions if node in found.by_operation]
    assert common == [mine for mine in ours if mine in functions]
    assert len(common) >= 7
    assert all(in_torchvisions_ops(model, mine) for mine in ours if mine not in common)
    for node in set(functions) - set(common):
        second_call = node.removesuffix("_1") in modules
        module, _, last = node.rpartition(".")
        parameter = last.startswith(module.replace(".", "_"))
        assert second_call or parameter, node

    some = common[:: max(1, len(common) // 12)]
    with torch.no_grad():
        expected = create_feature_extractor(model, return_nodes=some)(x)
        with featx.capture(model, some) as features:
            model(x)
    for node in some:
        assert torch.equal(features[node], expected[node]), node


@pytest.mark.parametrize("channels_last", [False, True])
def test_an_operation_is_kept_although_a_relu_writes_to_it(channels_last: bool) -> None:
    module, x = ResidualConvNet(), noise()
    with bound(backbone_of(module), "add", "conv2", "flatten") as engine:
        engine.configure_compute(Compute("fp32", False, channels_last, 4))
        engine.run(noise(seed=4))
        values = engine.run(x)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    conv2 = hooked(module, "conv2", x)
    assert torch.equal(values["conv2"], conv2)
    assert torch.equal(values["add"], conv2 + x)
    assert (values["add"] < 0).any()
    assert torch.equal(values["flatten"], hooked(module, "pool", x).flatten(1))


def test_the_pass_stops_behind_the_last_operation() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sigmoid(self.b(self.a(x) + 1))
            return self.c(x)

    module = Long()
    calls: list[int] = []
    with bound(backbone_of(module), "sigmoid", "add") as engine:
        handle = module.c.register_forward_pre_hook(lambda m, args: calls.append(1))
        values = engine.run(noise())
        handle.remove()
    assert calls == []
    with torch.no_grad():
        assert torch.equal(values["sigmoid"], torch.sigmoid(module.b(module.a(noise()) + 1)))
    assert num_hooks(module) == 0
    assert torch._C._len_torch_function_stack() == 0


def test_other_operations_than_the_probes_are_an_error() -> None:
    """The first `add` of a bright batch is not the one that the probe saw, though its name is."""

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            if x.max() > 100:
                return self.b(x * 0 + 1)
            if x.max() > 50:
                x = x + 5
            x = x * 2
            return self.b(x + 3)

    with bound(backbone_of(Moody()), "a", "add") as engine:
        assert torch.equal(engine.run(noise())["add"], noise() * 2 + 3)
        with pytest.raises(RunError, match=r"differs from the trial pass: add ran, expected mul"):
            engine.run(noise().abs() + 60)
        assert torch.equal(engine.run(noise())["add"], noise() * 2 + 3)
    with (
        bound(backbone_of(Moody()), "add", "b") as engine,
        pytest.raises(RunError, match="the forward pass differs"),
    ):
        engine.run(noise().abs() + 200)


def test_what_featx_does_with_a_layer_is_no_operation_of_the_model() -> None:
    """reduce=avg takes a mean in the forward of the model, which is not the model's own."""

    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).clone().square().mean((2, 3))

    module = Means()
    with bound(backbone_of(module), ("conv", "avg"), "mean", "clone") as engine:
        values = engine.run(noise())
    conv = hooked(module, "conv", noise())
    torch.testing.assert_close(values["conv"], conv.mean((2, 3)))
    assert torch.equal(values["mean"], conv.square().mean((2, 3)))
    assert torch.equal(values["clone"], conv)
    # Neither is what another block around or inside does.
    with (
        torch.no_grad(),
        featx.capture(module, ["clone", "conv"]) as outer,
        featx.capture(module, ["clone", "square"]) as inner,
    ):
        module(noise())
    assert torch.equal(outer["clone"], conv)
    assert torch.equal(inner["clone"], conv)
    assert torch.equal(inner["square"], conv.square())


def test_gradients_at_operations_are_autograds() -> None:
    module, x = ResidualConvNet(), noise()
    with bound(backbone_of(module), "add:grad_output", "flatten:grad_output", target=2) as engine:
        got = engine.run(x)
    out = hooked(module, "conv2", x) + x
    out.requires_grad_()
    flat = module.pool(F.relu(out)).flatten(1)
    flat.retain_grad()
    module.fc(flat)[:, 2].sum().backward()
    torch.testing.assert_close(got["add:grad_output"], out.grad)
    torch.testing.assert_close(got["flatten:grad_output"], flat.grad)
    module.requires_grad_(True)
    with featx.capture(module, ["add:grad_output", "add"]) as features:
        module(x)[:, 2].sum().backward()
    torch.testing.assert_close(features["add:grad_output"], out.grad)


def test_elements_globs_and_modules_of_the_same_name() -> None:
    module = Plain()
    assert chosen(module, "block.chunk[1]", "block.mul", "block.mul_1") == [
        "block.chunk[1]",
        "block.mul",
        "block.mul_1",
    ]
    assert chosen(module, "b*.s*") == ["block.sub", "block.sigmoid"]
    assert chosen(module, "bl*") == ["block"]  # a glob that matches modules means modules
    assert chosen(module, "b*.s*:grad_output") == [
        "block.sub:grad_output",
        "block.sigmoid:grad_output",
    ]
    assert not set(chosen(module, "all")) & set(names_of(module, noise()))
    x = noise()
    with torch.no_grad(), featx.capture(module, ["block.chunk[1]", "block.mul_1"]) as features:
        module(x)
        assert torch.equal(features["block.chunk[1]"], module.block.conv(x)[:, 2:])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("block.chunk", r"block\.chunk gives 2 tensors .*'block\.chunk\[0\]'"),
        ("block.sigmod", r"no layer 'block\.sigmod'.*Nearest: block\.sigmoid"),
        ("block.sigmod:grad_output", r"no layer 'block\.sigmod'.*Nearest: block\.sigmoid"),
        ("meen", r"no layer 'meen'.*Nearest: mean"),
        ("block.add:input", "operation, which has an output and a grad_output but no inp"),
        ("block.add:grad_input", "has an output and a grad_output but no grad_input"),
        ("mean:attention", "has an output and a grad_output but no attention"),
        ("block.add@1", r"no layer 'block\.add@1'"),
        ("z*.add", "matches no layer"),
    ],
)
def test_what_cannot_be_captured_is_reported(request_: str, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        chosen(Plain(), request_)


def test_an_operation_whose_batch_is_not_in_front_is_refused() -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(0, 1).mean((0, 2))

    with pytest.raises(LayerError, match=r"transpose has shape .*first dimension is not the batch"):
        chosen(Turned(), "transpose")


def test_a_key_of_a_result_goes_before_an_operation_of_its_name() -> None:
    """`inner.mean` is what the module gives under that key, not what its x.mean() gave."""
    module, x = Mapped(), noise()
    with bound(backbone_of(module), "inner.mean") as engine:
        assert torch.equal(engine.run(x)["inner.mean"], x + 1)
    with featx.capture(module, ["inner.mean", "inner.add", "mul"]) as features:
        module(x)
    assert torch.equal(features["inner.mean"], x + 1)
    assert torch.equal(features["inner.add"], x + 1)
    assert torch.equal(features["mul"], (x + 1) * 2)


def test_capture_tells_what_did_run() -> None:
    module = Plain()
    with featx.capture(module, ["block.softmax", "mean"]) as features:
        module(noise())
        assert features["mean"].shape == (4, 4)
        with pytest.raises(LayerError, match=r"'block\.softmax' was not called .*block\.sub, "):
            features["block.softmax"]
    with (
        pytest.raises(LayerError, match="no input"),
        featx.capture(module, ["mean:input"]),
    ):
        pass


def test_each_pass_counts_from_zero_also_after_an_interrupted_one() -> None:
    module, x = Plain().eval(), noise()
    with torch.no_grad(), featx.capture(module, ["block.add", "add"]) as features:
        module(x)
        first = features["add"]
        handle = module.act.register_forward_hook(
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            module(x)
        handle.remove()
        with pytest.raises(RuntimeError, match="channels"):
            module(torch.zeros(2, 5, 8, 8))
        module(x)
        assert torch.equal(features["add"], first)
    assert num_hooks(module) == 0
    assert torch._C._len_torch_function_stack() == 0


def test_passes_may_run_in_any_thread() -> None:
    """On CUDA the next batch is computed in a thread of its own, the trial in the main thread."""
    with bound(backbone_of(Plain().eval()), "block.add", "add") as engine:
        expected = engine.run(noise())
        with ThreadPoolExecutor(1) as pool:
            values = pool.submit(engine.run, noise()).result()
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_nothing_is_recorded_if_no_operation_is_requested() -> None:
    module = Plain()
    with CaptureHooks(module, [CapturePoint("fc", "fc")]), featx.capture(module, ["act"]):
        assert num_hooks(module) == 4
        assert torch._C._len_torch_function_stack() == 0


def test_operations_of_hooks_before_a_forward_are_none_of_it() -> None:
    """FSDP2 gathers the parameters of a module in such a hook."""
    module, x = Plain(), noise()
    expected = names_of(module, x)
    module.block.register_forward_pre_hook(lambda module, args: (args[0] + 0,))
    assert names_of(module, x) == expected


def test_what_modules_of_torch_do_inside_is_theirs() -> None:
    """As in fx; a subclass, such as timm's and torchvision's norms, is looked into."""

    class Norm(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    module = nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 8, 0.0), Norm(64))
    assert names_of(module, noise()) == ["2.layer_norm"]
    seen: list[str] = []
    watch = OperationRecorder(module, lambda name, *_: seen.append(name))
    with watch:
        module(noise())
    assert seen == []  # nobody said whose forward runs


def test_operations_of_a_compiled_model_are_those_of_its_original_code() -> None:
    module, x = Plain(), noise()
    with torch.no_grad(), featx.capture(module, "block.add") as features:
        module(x)
    expected = features["block.add"]
    compiled = torch.compile(module, backend="eager")
    module.fc.compile(backend="eager")
    with torch.no_grad(), featx.capture(compiled, ["_orig_mod.block.add", "block.add"]) as features:
        compiled(x)
    assert torch.equal(features["block.add"], expected)
    assert torch.equal(features["_orig_mod.block.add"], expected)
    assert num_hooks(module) == 0


def test_operations_go_into_the_store(photos: Path, tmp_path: Path) -> None:
    store = extract(photos, layers=["conv", "flatten", "pool"], dtype="float32", out=tmp_path / "s")
    assert set(store) == {"conv", "flatten", "pool"}
    assert store["flatten"].attrs["layer"] == "flatten"
    assert store["flatten"].shape == (21, 6)
    assert (store["flatten"][:] == store["pool"][:].reshape(21, 6)).all()
    again = extract(photos, layers=["flatten"], dtype="float32", out=tmp_path / "s")
    assert set(again) == {"conv", "flatten", "pool"}


def test_compiling_is_refused_or_decided_against(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"compile=true is not possible because operations are captured"
    ):
        extract(photos, layers=["flatten"], compile=True, out=tmp_path / "s")
    keys = {**KEYS, "data": str(photos), "layers": ["flatten"], "compile": "auto"}
    assert run_job("plan", **{**keys, "out": str(tmp_path / "s")}) == 0
    assert "not compiled" in capsys.readouterr().out


def test_values_of_operations_are_those_of_their_moment() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            y.mul_(2)
            return y - 3

    _, found = measure_values(Doubled(), torch.tensor([[1.0, -1.0]]))
    assert [(name, v[()].minimum, v[()].maximum) for name, v in found.items()] == [
        ("add", 0, 2),
        ("mul", 0, 4),
        ("sub", -3, 1),
    ]


def test_a_model_that_catches_what_a_layer_raises_keeps_its_names() -> None:
    class Tries(nn.Module):
        class Fails(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise ValueError(x.shape)

        def __init__(self) -> None:
            super().__init__()
            self.fails = self.Fails()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.fails(x)
            except ValueError:
                return x + 1

    assert names_of(Tries(), noise()) == ["add"]
