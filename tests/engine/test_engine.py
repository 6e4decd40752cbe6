"""The inference loop: rows are the layers' own, whatever the batch, layout or precision."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import FP32, assert_refused, backbone_of, bound, hooked, noise
from torch import nn
from zoo import ClampedNet, ResidualConvNet

import featx
from featx.config import ReduceConfig, model_options
from featx.engine import Compute
from featx.engine.row_checks import finite_rows, row_cosines
from featx.errors import LayerError, ModelError, RunError
from featx.layers import CapturePoint
from featx.layers.reductions import AlignOptions
from featx.models import build_backbone, state_sha256


class Tokens(nn.Module):
    """Patch tokens behind a class token, changed in place after each layer."""

    num_prefix_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, 6))
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = self.block(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))
        x.mul_(3)
        return self.head(x[:, 0])


class Turned(nn.Module):
    """`permute().contiguous()` copies in NCHW and is a mere view in channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).permute(0, 2, 3, 1).contiguous()
        y += 1
        return self.norm(y)


RESIDUAL_LAYERS = ("conv1", "bn", "conv2", "relu@1", "relu@2", "pool", "fc")


@pytest.mark.parametrize("reduce", ["none", "flatten"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_overwritten_tensors_are_kept_bit_for_bit(reduce: str, channels_last: bool) -> None:
    module, x = ResidualConvNet(), noise()
    with bound(backbone_of(module), *[(name, reduce) for name in RESIDUAL_LAYERS]) as engine:
        engine.configure_compute(Compute("fp32", False, channels_last, 4))
        engine.run(noise(seed=4))
        values = engine.run(x)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    for name in RESIDUAL_LAYERS:
        layer, _, call = name.partition("@")
        expected = hooked(module, layer, x, int(call or 1))
        expected = expected if reduce == "none" else expected.flatten(1)
        assert torch.equal(values[name], expected), name


ALIGN = AlignOptions(size=8)  # the size of the map, which is then not resized


@pytest.mark.parametrize("reduce", ["none", "flatten", "avg", "max", "gem", "grid", ALIGN])
def test_overwritten_maps_are_reduced_as_the_layer_gave_them(reduce: str | ReduceConfig) -> None:
    module, x = ResidualConvNet(), noise()
    with bound(backbone_of(module), ("conv2", reduce), "fc") as engine:
        got = engine.run(x)["conv2"]
    y = hooked(module, "conv2", x)
    expected = {
        "none": y,
        "flatten": y.flatten(1),
        "avg": y.mean((2, 3)),
        "max": y.amax((2, 3)),
        "gem": (y.clamp(min=1e-6) ** 3).mean((2, 3)) ** (1 / 3),
        "grid": F.adaptive_avg_pool2d(y, 2),
        ALIGN: y,
    }[reduce]
    exact = reduce in ("none", "flatten", "max", ALIGN)
    torch.testing.assert_close(got, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7)


@pytest.mark.parametrize("reduce", ["none", "flatten", "cls", "avg", "patch_avg"])
def test_overwritten_tokens_are_reduced_as_the_layer_gave_them(reduce: str) -> None:
    module = Tokens()
    with bound(backbone_of(module, num_prefix_tokens=1), ("block", reduce), "head") as engine:
        got = engine.run(noise())["block"]
    y = hooked(module, "block", noise())
    expected = {
        "none": y,
        "flatten": y.flatten(1),
        "cls": y[:, 0],
        "avg": y.mean(1),
        "patch_avg": y[:, 1:].mean(1),
    }[reduce]
    exact = reduce in ("none", "flatten", "cls")
    torch.testing.assert_close(got, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7)


@pytest.mark.slow
def test_resnets_last_batchnorm_is_no_block_output() -> None:
    """pytorch#95617: `out += identity` and the in-place ReLU turn bn2 into the block's output."""
    config = model_options(name="resnet18", library="torchvision", weights=None)
    backbone = build_backbone(config, seed=0)
    x = noise(2, 224)
    with bound(backbone, "layer4.1.bn2", "layer4") as engine:
        values = engine.run(x)
    assert torch.equal(values["layer4.1.bn2"], hooked(backbone.module, "layer4.1.bn2", x))
    assert torch.equal(values["layer4"], hooked(backbone.module, "layer4", x))
    assert (values["layer4.1.bn2"] < 0).any()
    assert not torch.equal(values["layer4.1.bn2"], values["layer4"])


def test_an_overwriting_that_only_images_show_is_found() -> None:
    module = ClampedNet()
    x = 100 * noise().abs()
    with bound(backbone_of(module), "layer", "clamp") as engine:
        engine.run(noise())
        values = engine.run(x)
        again = engine.run(x)
    assert torch.equal(values["layer"], x)
    assert torch.equal(again["layer"], x)
    assert values["clamp"].max() == 6


def test_an_overwriting_in_channels_last_only_is_found() -> None:
    module = Turned()
    with bound(backbone_of(module), "conv", "norm") as engine:
        engine.configure_compute(Compute("fp32", False, True, 4))
        got = engine.run(noise())["conv"]
    expected = hooked(module, "conv", noise().contiguous(memory_format=torch.channels_last))
    assert torch.equal(got, expected)


def test_inference_tensors_are_copied() -> None:
    """A model under torch.inference_mode keeps no count of writes."""

    class Inference(ClampedNet):
        @torch.inference_mode()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    x = 100 * noise().abs()
    with bound(backbone_of(Inference()), "layer", "clamp") as engine:
        assert torch.equal(engine.run(x)["layer"], x)


def test_a_model_that_writes_to_its_input_does_not_change_the_callers_images() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x -= 0.5
            return self.conv(x)

    with bound(backbone_of(Greedy()), "conv") as engine:
        x = noise()
        first = engine.run(x)["conv"]
        assert torch.equal(x, noise())
        assert torch.equal(engine.run(x)["conv"], first)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_shapes_and_dtypes(dtype: str) -> None:
    layers = ("conv1", ("conv2", "avg"), ("relu@2", "flatten"), ("pool", "grid"), "fc", "embedding")
    with bound(backbone_of(ResidualConvNet()), *layers, dtype=dtype) as engine:
        values = engine.run(noise())
        specs = {spec.name: spec for spec in engine.specs(engine.chosen)}  # type: ignore[attr-defined]
    shapes = {name: tuple(value.shape[1:]) for name, value in values.items()}
    assert shapes == {
        "conv1": (3, 8, 8),
        "conv2": (3,),
        "relu@2": (192,),
        "pool": (3, 2, 2),
        "fc": (5,),
        "embedding": (12,),
    }
    assert {name: spec.shape for name, spec in specs.items()} == shapes
    assert {value.dtype for value in values.values()} == {getattr(torch, dtype)}
    assert {spec.dtype for spec in specs.values()} == {dtype}
    assert (specs["embedding"].layer, specs["embedding"].capture) == ("fc", "input")
    assert (specs["conv2"].reduce, specs["relu@2"].reduce) == ("avg", "flatten")
    assert specs["fc"].row_bytes == 5 * (2 if dtype == "float16" else 4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_row_does_not_depend_on_the_padding_or_on_failed_neighbours(channels_last: bool) -> None:
    with bound(backbone_of(ResidualConvNet()), "conv2", "fc") as engine:
        engine.configure_compute(Compute("fp32", False, channels_last, 4))
        x = noise()
        full = engine.run(x)
        padded = x.clone()
        padded[1:] = 0
        alone = engine.run(padded)
    assert all(torch.equal(full[name][0], alone[name][0]) for name in full)


def test_other_batch_sizes_give_the_same_rows() -> None:
    """Within 1e-5 of a row's largest value: kernels differ by batch size, formulas do not."""
    x = noise(8)
    rows = {}
    for size in (1, 2, 8):
        with bound(backbone_of(ResidualConvNet()), "conv2", "fc") as engine:
            engine.configure_compute(Compute("fp32", False, True, size))
            parts = [engine.run(x[i : i + size]) for i in range(0, 8, size)]
        rows[size] = {k: torch.cat([p[k] for p in parts]).flatten(1) for k in parts[0]}
    for size in (1, 2):
        for name, expected in rows[8].items():
            error = (rows[size][name] - expected).abs().amax(1) / expected.abs().amax(1)
            assert error.max() <= 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precisions_run_on_the_cpu(precision: str) -> None:
    with bound(backbone_of(ResidualConvNet()), "bn", "conv2", "fc") as engine:
        exact = engine.run(noise())
        engine.configure_compute(Compute(precision, False, True, 4))
        half = engine.run(noise())
        specs = {spec.name: spec for spec in engine.specs(engine.chosen)}  # type: ignore[attr-defined]
    assert row_cosines(half, exact) > 0.99
    assert not torch.equal(half["fc"], exact["fc"])
    assert specs["fc"].compute_dtype == {"bf16": "bfloat16", "fp16": "float16"}[precision]
    assert {value.dtype for value in half.values()} == {torch.float32}


def test_overwritten_tensors_in_half_precision_stored_as_they_are() -> None:
    """fp16 stored as float16 needs no cast, and so no copy comes about by chance."""
    module = ResidualConvNet()
    with bound(backbone_of(module), "conv2", dtype="float16") as engine:
        engine.configure_compute(Compute("fp16", False, False, 4))
        got = engine.run(noise())["conv2"]
    with torch.autocast("cpu", torch.float16):
        expected = hooked(module, "conv2", noise())
    assert expected.dtype == torch.float16
    assert torch.equal(got, expected)


def test_a_view_inside_keeps_the_model_out_of_channels_last() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(144, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.conv(x).view(len(x), -1))

    module = Viewed()
    with bound(backbone_of(module), "conv", "fc") as engine:
        assert not engine.formats(noise()).channels_last
        engine.configure_compute(FP32)
        got = engine.run(noise())["fc"]
    assert torch.equal(got, hooked(module, "fc", noise()))
    with bound(backbone_of(ResidualConvNet()), "fc") as engine:
        assert engine.formats(noise()).channels_last
    with bound(backbone_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 2))), "1") as engine:
        assert not engine.formats(noise()).channels_last


def test_uint8_images_are_normalised() -> None:
    module = nn.Sequential(nn.Identity(), nn.Conv2d(3, 2, 1))
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    with bound(backbone_of(module), "0") as engine:
        got = engine.run(images)["0"]
    torch.testing.assert_close(got, (images / 255 - 0.5) / 0.5, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "dtype", "expected"),
    [
        (lambda x: x * float("inf"), "float32", "inf in fp32"),
        (lambda x: x * 0 + float("nan"), "float32", "nan in fp32"),
        (lambda x: x * 0 + 1e5, "float16", "100000, over 65504, the largest float16"),
        (lambda x: x * 0 - 1e5, "float16", "100000, over 65504, the largest float16"),
    ],
)
def test_a_value_that_is_not_finite_is_found_and_explained(
    change: Callable[[torch.Tensor], torch.Tensor], dtype: str, expected: str
) -> None:
    class Wild(nn.Module):
        """Row 2 only, and only for images brighter than noise ever is."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.fine = nn.Identity(), nn.Conv2d(3, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bright = x.amax((1, 2, 3), keepdim=True) > 50
            self.fine(x)
            return self.layer(torch.where(bright, change(x), x))

    x = noise()
    x[2, 0, 0, 0] = 99
    with bound(backbone_of(Wild()), "fine", "layer", dtype=dtype) as engine:
        rows = engine.rows(x)
        assert rows.finite["layer"].tolist() == [True, True, False, True]
        assert rows.finite["fine"].all()
        assert engine.explain(x, None, 2, "layer") == expected
        again = engine.run(x)["layer"]
    assert again.dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("largest", "dtype", "expected"),
    [
        (2048, "float16", None),
        (2049, "float16", "2049, and float16 .* up to 2048 only. Give dtype=float32"),
        (100_000, "float16", "100000, and float16"),
        (2**24, "float32", None),
        (2**24 + 1, "float32", "16777217, and float32 .* Choose another layer"),
    ],
)
def test_whole_numbers_are_stored_as_they_are_or_refused(
    largest: int, dtype: str, expected: str | None
) -> None:
    """Codes of a vocabulary: one beside the right one means something else."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.conv = nn.Identity(), nn.Conv2d(3, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.codes((x[:, 0, 0] > 0) * largest)
            return self.conv(x)

    refused = pytest.raises(LayerError, match=expected) if expected else contextlib.nullcontext()
    x = noise()
    with bound(backbone_of(Codes()), "codes", dtype=dtype) as engine, refused:
        assert engine.run(x)["codes"].long().equal((x[:, 0, 0] > 0) * largest)


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.lists(
        st.lists(st.floats(width=16, allow_nan=True, allow_infinity=True), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    ),
)
def test_finite_rows_are_those_without_nan_and_infinity(
    dtype: torch.dtype, rows: list[list[float]]
) -> None:
    values = torch.tensor(rows, dtype=torch.float32).to(dtype).reshape(-1, 3, 1)
    found = finite_rows({"x": values})["x"]
    assert found.tolist() == torch.isfinite(values).flatten(1).all(1).tolist()


@pytest.mark.parametrize("on_device", [False, True])
def test_checks_of_rows_belong_to_the_batch_and_the_precision_of_the_pass(on_device: bool) -> None:
    """precision=auto computes in fp32 first; autocast then gives float16, which is not cast."""
    module = nn.Sequential(nn.Conv2d(3, 2, 3))
    nn.init.constant_(module[0].weight, 1e-6)
    nn.init.zeros_(module[0].bias)
    with bound(backbone_of(module), "0", dtype="float16") as engine:
        rows = engine.rows(noise(), on_device=on_device)
        assert rows.underflow["0"].tolist() == [True] * 4
        assert set(rows.features) == set(rows.finite) == {"0"}
        engine.configure_compute(Compute("fp16", False, False, 6))
        more = torch.cat([noise(), noise()])[:6]
        rows = engine.rows(more, on_device=on_device)
        assert rows.finite["0"].tolist() == [True] * 6
        assert rows.underflow == {}


def test_the_model_is_frozen_and_left_as_it_was() -> None:
    """No parameter or buffer changes, no hook stays, whatever happens inside the block."""
    module = ResidualConvNet().train()
    backbone = backbone_of(module)
    assert not any(m.training for m in module.modules())
    assert not any(p.requires_grad for p in module.parameters())
    before = backbone.weights_sha256
    with bound(backbone, "bn", "fc") as engine:
        for channels_last in (True, False):
            for precision in ("bf16", "fp32"):
                engine.configure_compute(Compute(precision, False, channels_last, 4))
                engine.run(noise())
        with pytest.raises(ModelError, match="channels"):
            engine.run(torch.zeros(2, 5, 8, 8))
        engine.run(noise())
    assert state_sha256(module) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_transformer_layers_without_their_fused_kernel() -> None:
    """pytorch#128413: the fused path calls no sub-module, and no hook."""
    module = nn.Sequential(
        nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 32, batch_first=True, dropout=0.1)
    )
    with bound(backbone_of(module), "1.linear1", "1") as engine:
        values = engine.run(noise())
    assert values["1.linear1"].shape == (4, 3, 32)
    assert torch.isfinite(values["1"]).all()


def test_a_layer_whose_first_dimension_is_the_batch_by_chance_is_refused() -> None:
    class Pair(nn.Module):
        """Always two rows, as many as the trace has images."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((0, 1))[:2]

    module = nn.Sequential(Pair())
    assert_refused(LayerError, "0 has shape", backbone_of(module), "0")


def test_a_model_that_does_other_things_each_time_is_refused() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.passes = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            return self.a(x) if self.passes == 1 else self.b(x)

    assert_refused(RunError, "runs different layers", backbone_of(Fickle()), "a")


def test_a_shape_that_changes_between_batches_is_an_error() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[..., :4] if x.max() > 50 else x)

    with bound(backbone_of(Growing()), "layer") as engine:
        engine.run(noise())
        with pytest.raises(
            RunError,
            match=r"layer gave rows of shape \(3, 8, 4\), but the trial pass gave",
        ):
            engine.run(noise() + 99)


def test_row_cosines() -> None:
    a = {"x": torch.tensor([[1.0, 0.0], [0.0, 2.0]])}
    assert row_cosines(a, a) == 1.0
    turned = {"x": torch.tensor([[1.0, 0.0], [2.0, 2.0]])}
    assert row_cosines(turned, a) == pytest.approx(0.5**0.5)
    zero = {"x": torch.zeros(2, 2)}
    assert row_cosines(zero, zero) == 1.0
    assert row_cosines(a, zero) == 0.0
    broken = {"x": torch.tensor([[1.0, 0.0], [float("nan"), 2.0]])}
    assert row_cosines(broken, a) == row_cosines(a, broken) == row_cosines(broken, broken) == -1.0


def test_captures_are_told_apart_by_call_and_element() -> None:
    class Pairs(nn.Module):
        class Two(nn.Module):
            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return x + 1, x * 2

        def __init__(self) -> None:
            super().__init__()
            self.two = self.Two()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.two(x)
            return self.two(a - b)[0]

    x = noise()
    with bound(backbone_of(Pairs()), "two@2[1]", "two@1[0]", "two@1[1]", "two@2[0]") as engine:
        values = engine.run(x)
        first, _ = engine.chosen[0]  # type: ignore[attr-defined]
    assert first == CapturePoint("two@2[1]", "two", "output", 2, (1,))
    assert torch.equal(values["two@1[0]"], x + 1)
    assert torch.equal(values["two@1[1]"], x * 2)
    assert torch.equal(values["two@2[0]"], (x + 1 - x * 2) + 1)
    assert torch.equal(values["two@2[1]"], (x + 1 - x * 2) * 2)


@pytest.mark.slow  # the C++ compiler takes half a minute
def test_compiled_values_are_the_eager_ones() -> None:
    with bound(
        backbone_of(ResidualConvNet()), "bn", "conv2", ("relu@2", "flatten"), "fc"
    ) as engine:
        eager = engine.run(noise())
        engine.configure_compute(Compute("fp32", True, False, 4))
        compiled = engine.run(noise())
        engine.run(noise(seed=5))
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_cuda_gives_what_the_cpu_gives(photo_folder: Path, tmp_path: Path) -> None:
    """fp32 to 1e-4 of each row's largest value, and the same bits in a second run."""
    keys = {"model": {"name": "resnet18", "weights": None}, "data": photo_folder, "seed": 3}
    keys |= {"layers": ["layer4", "avgpool"], "precision": "fp32", "dtype": "float32"}
    stores = {
        name: featx.extract(**keys, device=device, out=tmp_path / name)
        for name, device in (("cpu", "cpu"), ("cuda", "cuda"), ("again", "cuda"))
    }
    for layer in ("layer4", "avgpool"):
        cpu, cuda, again = (store[layer][:].reshape(21, -1) for store in stores.values())
        assert (abs(cuda - cpu).max(1) / abs(cpu).max(1)).max() < 1e-4
        assert cuda.tobytes() == again.tobytes()


class Sequences(nn.Module):
    """A Linear on tokens whose batch is second, as torchvision's attention has it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 5)
        self.last = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2).contiguous()
        return self.last(self.proj(tokens.transpose(0, 1)).transpose(0, 1))


def test_a_weight_is_not_copied_for_each_image() -> None:
    """torch does so, and takes six times as long in bf16, where a weight wants no gradient."""
    profiler = torch.profiler.profile(acc_events=True)
    with bound(backbone_of(Sequences()), "last") as engine, profiler as profile:
        engine.run(noise())
    assert {"aten::mm", "aten::addmm"} & {event.key for event in profile.key_averages()}
    assert "aten::bmm" not in {event.key for event in profile.key_averages()}


def test_a_model_that_was_made_in_inference_mode_is_taken_as_it_is() -> None:
    with torch.inference_mode():
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    with bound(backbone_of(module), "0") as engine:
        assert engine.run(noise())["0"].shape[1] == 4
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("layer", ["fc", "fc:grad_output"])
def test_a_model_is_freed_when_its_engine_is(layer: str) -> None:
    """Not at the next garbage collection: the model of the next run needs the memory."""
    gc.disable()
    try:
        backbone = backbone_of(ResidualConvNet())
        reference = weakref.ref(backbone.module)
        with bound(backbone, layer) as engine:
            engine.run(noise())
        del backbone, engine
        assert reference() is None
    finally:
        gc.enable()


def test_a_model_that_splits_its_batch_is_refused() -> None:
    """As DataParallel does: each call of a layer sees a slice, and a hook keeps one of them."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.conv(part) for part in x.tensor_split(2)]).mean((2, 3))

    for layer, message in (("conv", "called 2 times"), ("conv@1", "is not the batch")):
        assert_refused(LayerError, message, backbone_of(Split()), layer)
