"""Modules that are not what is expected: they work, or one message says why not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import slow_except
from tiny_engine import backbone_of, bound, hooked, noise
from tiny_model import KEYS, extract, run_job
from torch import nn
from torch.utils._pytree import tree_map
from zoo import LIVING

import featx
from featx.engine import Compute
from featx.errors import ConfigError, FeatxError, LayerError, ModelError, RunError
from featx.models import state_sha256

pytestmark = pytest.mark.usefixtures("in_tmp_path")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 8, stride=8)
        self.bn = nn.BatchNorm2d(8)
        self.inner = nn.Identity()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.bn(self.conv(x))).mean((2, 3)))


def rows_of(module: nn.Module, photos: Path, layer: str = "head", **keys: Any) -> Any:
    """(21, ...) of a layer."""
    LIVING[:] = [module]
    model = {**KEYS["model"], "factory": "zoo:living", "weights": "default"}
    settings = {"dtype": "float32", "part_rows": 32}
    keys = {**KEYS, "model": model, "layers": [layer], **settings, **keys}
    return np.asarray(extract(photos, **keys)[layer])


def ids(module: nn.Module) -> list[int]:
    return [id(x) for x in module.state_dict(keep_vars=True).values()]


def test_other_defaults_of_torch_are_refused(photos: Path) -> None:
    module = Net()
    expected = rows_of(module, photos, out="expected")
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            with pytest.raises(ConfigError, match=rf"default_dtype\(\) is {dtype}; expected"):
                rows_of(module, photos, out="refused")
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu"), pytest.raises(ConfigError, match=r"autocast\('cpu'\) is enabled"):
        rows_of(module, photos, out="refused")
    with torch.device("meta"):
        with pytest.raises(ConfigError, match=r"default_device\(\) is meta; expected the CPU"):
            rows_of(module, photos, out="refused")
        with torch.device("cpu"):
            assert np.array_equal(rows_of(module, photos, out="again"), expected)
    assert not Path("refused").exists()


@pytest.mark.parametrize("dtype", slow_except([torch.float16, torch.float64], torch.float16))
def test_a_module_of_another_type_is_computed_in_float32_and_given_back(
    dtype: torch.dtype, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Net().to(dtype)
    expected = rows_of(copy.deepcopy(module).float(), photos, out="float32")
    before, objects = state_sha256(module), ids(module)
    capsys.readouterr()
    np.testing.assert_allclose(rows_of(module, photos), expected, rtol=1e-5, atol=1e-6)
    name = str(dtype).removeprefix("torch.")
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    expected_line = f"parameters {name} in the module, float32 in the run".split()
    assert expected_line in lines
    assert state_sha256(module) == before
    assert ids(module) == objects
    assert {x.dtype for x in module.parameters()} == {dtype}
    assert all(x.requires_grad for x in module.parameters())


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        return torch.jit.script(Net())


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        return torch.jit.trace(Net().eval(), torch.zeros(1, 3, 32, 32))


def with_part(part: Callable[[], nn.Module], name: str = "inner") -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Net()
        setattr(module, name, part())
        return module

    return make


class Fails(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask


class Outputs(nn.Module):
    """Gives one kind of tensor, which the model makes plain again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.give = Give(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.give(x)
        y = y.to_dense() if y.layout != torch.strided else y
        return x + (y.real if y.is_complex() else y).sum(1, keepdim=True)


def outputs(kind: str) -> Callable[[], nn.Module]:
    return with_part(lambda: Outputs(kind))


class Give(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "sparse":
            return x.to_sparse()
        if self.kind == "complex":
            return torch.complex(x, x)
        return x[:, :0] if self.kind == "empty" else x > 0


class NeedsMemory(nn.Module):
    """As torch fails on a CPU under a limit (ulimit -v)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 by")


def test_a_lack_of_memory_is_no_fault_of_the_model(photos: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator: can't allocate memory"):
        rows_of(with_part(NeedsMemory)(), photos, "head")


class LosesDevice(nn.Module):
    """As torch fails on a GPU, where the call before it may be the cause."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
)
def test_an_error_of_the_device_is_no_fault_of_the_model(error: Exception, photos: Path) -> None:
    said = rf"fails with {type(error).__name__}: cu.* is an error of cpu, .*same command resumes"
    with pytest.raises(RunError, match=rf"(?i){said}") as caught:
        rows_of(with_part(lambda: LosesDevice(error))(), photos, "head")
    assert "as its only argument" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "layer", "error", "message"),
    [
        (scripted, "head", ModelError, "the model is TorchScript"),
        (traced, "head", ModelError, "the model is TorchScript"),
        (with_part(scripted), "head", ModelError, "'inner' is TorchScript"),
        (
            with_part(lambda: nn.LazyLinear(4), "head"),
            "head",
            ModelError,
            r"head.weight, head.bias have no values yet",
        ),
        (
            with_part(lambda: nn.Linear(8, 4, device="meta"), "head"),
            "head",
            ModelError,
            r"head.weight, head.bias are on the meta device",
        ),
        (
            with_part(Fails),
            "head",
            ModelError,
            r"a forward pass over a batch of images \(2, 3, 32, 32\) float32 fails with TypeError",
        ),
        (outputs("bool"), "inner.give", LayerError, "gives true and false"),
        (outputs("sparse"), "inner.give", LayerError, "of layout torch.sparse_coo"),
        (outputs("complex"), "inner.give", LayerError, "gives complex numbers"),
        (outputs("empty"), "inner.give", LayerError, "gives no numbers, a tensor of shape"),
    ],
)
def test_one_message(
    make: Callable[[], nn.Module],
    layer: str,
    error: type[FeatxError],
    message: str,
    photos: Path,
) -> None:
    module = make().train()
    with pytest.raises(error, match=message):
        rows_of(module, photos, layer)
    assert not Path("store").exists()
    assert module.training


class FailsOnce(Net):
    """Raises what featx never does, in one pass; its course follows the data."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.passes = at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.at or bool(torch.isnan(x).any()):
            raise ZeroDivisionError("a bug of the user's own")
        return super().forward(x)


@pytest.mark.parametrize("layer", ["inner", "inner:grad_output"])
def test_a_bug_in_any_pass_is_one_message(layer: str) -> None:
    images = noise(4, 32)
    messages = []
    for at in range(1, 100):
        module = FailsOnce(at)
        try:
            with bound(backbone_of(module, 32), layer, images=images) as engine:
                engine.formats(images)
                engine.configure_compute(Compute("bf16", False, False, 4))
                engine.specs(engine.chosen)  # type: ignore[attr-defined]
                engine.time_passes(images)
                engine.run(images)
        except ModelError as error:
            messages.append(str(error))
        if module.passes < at:
            break
    assert module.passes < at
    assert len(messages) >= 15
    said = "fails with ZeroDivisionError: a bug of the user's own."
    assert all(said in message for message in messages)


def test_other_layers_of_such_a_model_are_taken(photos: Path) -> None:
    assert rows_of(outputs("sparse")(), photos).shape == (21, 4)


def test_torchscript_in_blocks_of_a_loop() -> None:
    module = with_part(scripted)()
    with pytest.raises(ModelError, match="'inner' is TorchScript"), featx.capture(module, "inner"):
        pass
    whole = scripted()
    with pytest.raises(ModelError, match="the model is"), featx.capture(whole, "head"):
        pass
    with pytest.raises(ModelError, match="the model is"), featx.gradients.watch(whole):
        pass


def test_a_statically_quantised_model(photos: Path) -> None:
    """Its weights are tuples of quantised tensors in the state dict; they count as weights."""

    class Quantised(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.quant = torch.ao.quantization.QuantStub()
            self.conv, self.fc = nn.Conv2d(3, 8, 8, stride=8), nn.Linear(128, 4)
            self.dequant = torch.ao.quantization.DeQuantStub()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dequant(self.fc(self.conv(self.quant(x)).flatten(1)))

    def make(seed: int) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = Quantised(seed).eval()
            module.qconfig = torch.ao.quantization.get_default_qconfig("x86")
            torch.ao.quantization.prepare(module, inplace=True)
            module(torch.randn(4, 3, 32, 32))
            return torch.ao.quantization.convert(module)

    if torch.backends.quantized.engine == "none":
        pytest.skip("this build of torch has no quantised kernels")
    module = make(0)
    assert state_sha256(module) == state_sha256(copy.deepcopy(module))
    assert state_sha256(module) != state_sha256(make(1))
    assert rows_of(module, photos, "dequant").shape == (21, 4)
    with pytest.raises(LayerError, match="fc gives quantised numbers"):
        rows_of(module, photos, "fc", out="other")


class Int8(torch.Tensor):
    """As tensors of torchao are: int8 numbers and a scale, and few operations."""

    data8: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data8: torch.Tensor, scale: torch.Tensor) -> Int8:
        new: Int8 = torch.Tensor._make_wrapper_subclass(cls, data8.shape, dtype=torch.float32)
        new.data8, new.scale = data8, scale
        return new

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> Int8:
        return Int8(inner["data8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8, args[0].scale)
        if func in (torch.ops.aten.t.default, torch.ops.aten.addmm.default):
            plain = tree_map(lambda x: x.data8 * x.scale if isinstance(x, cls) else x, args)
            return func(*plain, **(kwargs or {}))
        raise NotImplementedError(f"Int8 has no {func}")


def test_weights_that_are_tensors_of_tensors(photos: Path) -> None:
    def make(scale: float) -> Net:
        module = Net()
        data8 = torch.arange(-16, 16, dtype=torch.int8).reshape(4, 8)
        weight = Int8(data8, torch.tensor(scale))
        module.head.weight = nn.Parameter(weight, requires_grad=False)
        return module

    plain = Net()
    plain.head.weight.data = torch.arange(-16.0, 16.0).reshape(4, 8) * 0.1
    np.testing.assert_allclose(
        rows_of(make(0.1), photos), rows_of(plain, photos, out="plain"), rtol=1e-4, atol=1e-4
    )
    assert state_sha256(make(0.1)) != state_sha256(make(0.2))


def test_buffers_of_a_refused_model_are_as_they_were(photos: Path) -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros(()))
            self.register_buffer("last", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            self.last = x.mean()
            return super().forward(x)

    module = Counting()
    before, passes = state_sha256(module), module.passes
    with pytest.raises(ModelError, match="its buffer passes, last"):
        rows_of(module, photos)
    assert state_sha256(module) == before
    assert module.passes is passes


def test_a_module_is_given_back_whatever_fails_before_the_first_pass(photos: Path) -> None:
    module = Net().train()
    LIVING[:] = [module]
    before = state_sha256(module)
    model = {**KEYS["model"], "factory": "zoo:living", "weights": "default"}
    keys = {**KEYS, "model": model, "data": str(photos), "layers": None}
    with pytest.raises(ConfigError, match="window=99"):
        run_job("attribute", **keys, attribute={"method": "occlusion", "window": 99})
    assert module.training
    assert all(x.requires_grad for x in module.parameters())
    assert state_sha256(module) == before


@pytest.mark.slow
def test_a_compiled_module_runs_its_original_code() -> None:
    """Compiled code calls no hooks that are added later."""
    module, x, runs = Net().eval(), noise(side=32), []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        return lambda *args: [runs.append(1), graph(*args)][1]

    compiled = torch.compile(module, backend=backend)
    compiled(x)
    with bound(backbone_of(compiled, 32), "_orig_mod.conv", "_orig_mod.inner") as engine:
        values = engine.run(x)
    for layer in ("conv", "inner"):
        assert torch.equal(values[f"_orig_mod.{layer}"], hooked(module, layer, x))
    assert len(runs) == 1
    compiled(x)
    assert len(runs) == 2


def test_a_module_without_modes_is_refused(photos: Path) -> None:
    program = torch.export.export(Net().eval(), (torch.randn(2, 3, 32, 32),))
    with pytest.raises(ModelError, match=r"cannot be put in eval mode.*model=export"):
        rows_of(program.module(), photos)
