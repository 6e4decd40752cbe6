"""Every reduction against numbers worked out by hand on tiny tensors, and by the contract."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_engine import backbone_of, bound
from torch import nn

from featx.config import ReduceConfig, make_reduce, reduction_of_args
from featx.errors import ConfigError, LayerError, ReduceError
from featx.layers import (
    Reduction,
    RowLayout,
    channels_last,
    reduction,
    token_geometries,
    trace_forward,
)
from featx.testing import ReductionContract
from featx.types import LayerSpec

SQUARE = (224, 224)


def reduced(
    x: torch.Tensor,
    name: str,
    prefix: int = 0,
    input_size: tuple[int, int] = SQUARE,
    **args: float,
) -> torch.Tensor:
    """The reduction `name` of (B, ...)."""
    rows = RowLayout("layer", tuple(x.shape[1:]), input_size, prefix)
    return reduction(make_reduce(name, **args), rows)(x)


def nchw() -> torch.Tensor:
    """(2, 3, 2, 2): channel c of image b holds 100 b + 10 c + (0, 1, 2, 3)."""
    b = 100 * torch.arange(2.0).view(2, 1, 1, 1)
    c = 10 * torch.arange(3.0).view(1, 3, 1, 1)
    return b + c + torch.arange(4.0).view(1, 1, 2, 2)


def tokens(prefix: int) -> torch.Tensor:
    """(2, prefix + 4, 3): prefix tokens of 1000s, then the patches of `nchw` in row-major order."""
    patches = nchw().flatten(2).transpose(1, 2)
    front = 1000 * torch.arange(1.0, prefix + 1).view(1, prefix, 1).expand(2, prefix, 3)
    return torch.cat([front, patches], 1)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_flatten_is_in_logical_order_whatever_the_memory_format(
    memory_format: torch.memory_format,
) -> None:
    x = nchw().contiguous(memory_format=memory_format)
    flat = reduced(x, "flatten")
    assert flat[1].tolist() == [100, 101, 102, 103, 110, 111, 112, 113, 120, 121, 122, 123]
    assert reduced(torch.zeros(2, 5), "flatten").shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "first_channel"),
    [("avg", 1.5), ("max", 3.0), ("gem", ((1e-18 + 1 + 8 + 27) / 4) ** (1 / 3))],
)
def test_pooling_of_maps_and_tokens(name: str, first_channel: float) -> None:
    for x in (nchw(), nchw().permute(0, 2, 3, 1), tokens(0)):
        y = reduced(x, name)
        assert y.shape == (2, 3)
        assert y[0, 0].item() == pytest.approx(first_channel)
    if name != "gem":
        expected = [100 + first_channel, 110 + first_channel, 120 + first_channel]
        assert reduced(nchw(), name)[1].tolist() == expected


def test_gem_with_its_exponent() -> None:
    """p = 1 is the mean of what is above the floor; a large p goes to the largest."""
    x = nchw()[:1] + 1
    assert torch.allclose(reduced(x, "gem", p=1), reduced(x, "avg"))
    powers = sum(v**2 for v in (1, 2, 3, 4)) / 4
    assert reduced(x, "gem", p=2)[0, 0].item() == pytest.approx(math.sqrt(powers))
    assert reduced(-x, "gem").max().item() == pytest.approx(1e-6, rel=1e-3)
    for p in (0.01, 20, 100, 1e6):  # powers of x below and above the range of float32
        y = torch.rand(2, 50, 4, dtype=torch.float64) * torch.tensor([1e-3, 1, 30, 1e4])
        expected = torch.logsumexp(y.clamp(min=1e-6).log() * p, 1) - math.log(50)
        torch.testing.assert_close(
            reduced(y.float(), "gem", p=p).double(), (expected / p).exp(), rtol=2e-5, atol=0
        )


@pytest.mark.parametrize("prefix", [1, 2, 5])
def test_cls_is_the_first_token(prefix: int) -> None:
    assert reduced(tokens(prefix), "cls", prefix).tolist() == [[1000] * 3] * 2


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_patch_avg_counts_no_prefix_token(prefix: int) -> None:
    """With 4 register tokens as with none."""
    y = reduced(tokens(prefix), "patch_avg", prefix)
    assert y.tolist() == [[1.5, 11.5, 21.5], [101.5, 111.5, 121.5]]


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_grid_of_tokens_is_the_grid_of_the_map(prefix: int) -> None:
    y = reduced(tokens(prefix), "grid", prefix, size=2)
    assert torch.equal(y, nchw())
    y = reduced(tokens(prefix), "grid", prefix, size=1)
    assert y[:, :, 0, 0].tolist() == [[1.5, 11.5, 21.5], [101.5, 111.5, 121.5]]


def test_grid_of_maps() -> None:
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert reduced(x, "grid")[0, 0].tolist() == [[2.5, 4.5], [10.5, 12.5]]
    last = torch.cat([x, x + 100], 1).permute(0, 2, 3, 1)
    assert reduced(last, "grid")[0, 1].tolist() == [[102.5, 104.5], [110.5, 112.5]]


def test_grid_of_rows_and_columns() -> None:
    x = torch.arange(16.0).view(1, 1, 4, 4)
    y = reduced(x, "grid", rows=1, columns=4)
    assert y[0, 0].tolist() == [[6, 7, 8, 9]]
    with pytest.raises(ReduceError, match=r"4 x 5 cells are more.* smaller reduce\.rows and"):
        reduced(x, "grid", rows=4, columns=5)
    with pytest.raises(ReduceError, match=r"5 x 5 cells are more.* Give a smaller reduce\.size"):
        reduced(x, "grid", size=5)
    for name in ("grid", "align"):
        with pytest.raises(ConfigError, match=rf"reduce={name}: give both of reduce\.rows and red"):
            make_reduce(name, rows=4)
        with pytest.raises(ConfigError, match=r"reduce\.size=3 has no effect with reduce\.rows"):
            make_reduce(name, size=3, rows=4, columns=4)
    for value in ([4], 0, "4"):
        with pytest.raises(ConfigError, match=r"reduce\.columns=.*expected a whole number"):
            make_reduce("grid", rows=4, columns=value)
    with pytest.raises(ConfigError, match=r"reduce\.pool=2: expected an odd number"):
        make_reduce("align", pool=2)


@pytest.mark.parametrize(
    "asked",
    [
        make_reduce("grid", size=3),
        make_reduce("grid", rows=3, columns=4),
        make_reduce("align", rows=5, columns=6, pool=3),
        make_reduce("align"),
        make_reduce("sample", k=3),
    ],
)
def test_parameters_in_a_store_make_the_same_reduction(asked: ReduceConfig) -> None:
    assert reduction_of_args(asked.name, {**asked.args, "other": 1}).args == asked.args


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_map_of_tokens_is_the_map(prefix: int) -> None:
    assert torch.equal(reduced(tokens(prefix), "map", prefix), nchw())
    assert torch.equal(reduced(nchw(), "map"), nchw())
    assert torch.equal(reduced(nchw().permute(0, 2, 3, 1), "map"), nchw())


def test_sums_are_taken_in_float32() -> None:
    """4096 ones in half precision would stop at 2048."""
    x = torch.ones(1, 1, 64, 64, dtype=torch.float16)
    assert reduced(x * 60000, "avg").item() == 60000
    assert reduced(x, "avg").dtype == torch.float32
    assert reduced(torch.full((1, 4, 2), 60000.0, dtype=torch.float16), "patch_avg").max() == 60000
    assert torch.isfinite(reduced(x * 1000, "gem")).all()


@pytest.mark.parametrize(
    ("row_shape", "input_size", "expected"),
    [
        ((512, 7, 7), SQUARE, False),
        ((7, 7, 512), SQUARE, True),
        ((8, 6, 3), (256, 192), True),
        ((3, 8, 6), (256, 192), False),
        ((7, 7, 512), (224, 224), True),
        # Strides that do not divide the input round its sides.
        ((512, 7, 10), (200, 300), False),
        ((7, 10, 768), (200, 300), True),
        ((192, 35, 48), (299, 400), False),
        ((512, 1, 1), (30, 50), False),
        ((56, 84, 128), (224, 336), True),
    ],
)
def test_channels_last_follows_the_inputs_proportions(
    row_shape: tuple[int, int, int], input_size: tuple[int, int], expected: bool
) -> None:
    assert channels_last("avg", RowLayout("layer", row_shape, input_size)) is expected


@pytest.mark.parametrize(
    ("row_shape", "message"),
    [
        ((64, 97, 147), r"could be \(C, H, W\) or \(H, W, C\)"),
        ((66, 99, 149), r"could be \(C, H, W\) or \(H, W, C\)"),
        ((512, 7, 13), "no map of the input's proportions"),
        ((12, 197, 64), "no map of the input's proportions"),
    ],
)
def test_sides_that_rounding_does_not_explain_are_refused(
    row_shape: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ReduceError, match=message):
        channels_last("avg", RowLayout("layer", row_shape, (200, 300)))


@pytest.mark.parametrize(
    ("size", "conv", "shape"),
    [
        ((62, 42), nn.Conv2d(3, 29, 3, stride=3), (29, 20, 14)),
        ((120, 150), nn.Conv2d(3, 24, 4, stride=4), (24, 30, 37)),
    ],
    ids=["could be both", "channels of the input's proportions"],
)
def test_a_map_of_the_shape_of_a_convolution_has_its_channels_first(
    size: tuple[int, int], conv: nn.Module, shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    backbone = backbone_of(model)
    backbone.preprocess = replace(backbone.preprocess, crop=size)
    x = torch.randn(4, 3, *size)
    with bound(backbone, ("0", "avg"), ("1", "max")) as engine, torch.no_grad():
        rows, expected = engine.run(x), conv(x)
        assert expected.shape[1:] == shape
        torch.testing.assert_close(rows["0"], expected.mean((2, 3)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rows["1"], expected.relu().amax((2, 3)), rtol=1e-4, atol=1e-5)
        spec = LayerSpec("1", "1", "output", "none", {}, shape, "float16", "float32")
        assert token_geometries([spec], backbone, engine.traced)["1"].grid == shape[1:]


class Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).contiguous()


def test_the_shape_of_a_linear_layer_is_no_known_map() -> None:
    """Maps (16, 8, 4) and (4, 16, 8) of one model have the proportions of 64 x 32 pixels."""
    first = nn.Conv2d(3, 16, 8, stride=8)  # (16, 8, 4)
    model = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), Turned(), nn.Linear(4, 4)).eval()
    both = nn.ModuleDict({"map": first, "last": model})
    both.forward = lambda x: (first(x), model(x))  # type: ignore[method-assign]
    trace = trace_forward(both, torch.randn(2, 3, 64, 32))
    assert trace.map_shapes == {(4, 16, 8)}


def test_a_cube_may_have_its_channels_last_beside_a_convolution_of_its_shape() -> None:
    """As ConvNeXt-T at 384 pixels, whose blocks turn maps (96, 96, 96) over."""

    model = nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), Turned(), nn.Flatten()).eval()
    backbone = backbone_of(model)
    backbone.preprocess = replace(backbone.preprocess, crop=(8, 8))
    with (
        pytest.raises(ReduceError, match="could be"),
        bound(backbone, ("1", "avg")) as engine,
        torch.no_grad(),
    ):
        engine.run(torch.randn(4, 3, 8, 8))


@pytest.mark.parametrize("side", [8, 64])
def test_a_cube_is_a_map_if_another_size_of_the_input_keeps_its_channels(side: int) -> None:
    """As (64, 64, 64) of ResNet-18 at 256 pixels, also of modules around its convolutions."""
    stage = nn.Sequential(nn.Conv2d(3, side, 4, stride=4), nn.ReLU(inplace=True))
    model = nn.Sequential(stage, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    backbone, size = backbone_of(model), (4 * side, 4 * side)
    backbone.preprocess = replace(backbone.preprocess, crop=size)
    x = torch.randn(4, 3, *size)
    with bound(backbone, ("0", "avg")) as engine, torch.no_grad():
        rows, expected = engine.run(x), stage(x).mean((2, 3))
        torch.testing.assert_close(rows["0"], expected, rtol=1e-4, atol=1e-5)
        spec = LayerSpec("0", "0", "output", "none", {}, (side,) * 3, "float16", "float32")
        assert token_geometries([spec], backbone, engine.traced)["0"].grid == (side, side)


class OfOneSize(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-2:] == (32, 32), "as ViT"
        return super().forward(x)


class Grouped(nn.Module):
    """(B, C, H, W) to tokens in groups, (B, 8, num groups, 8)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).unflatten(2, (-1, 8)).transpose(1, 3)


@pytest.mark.parametrize("kind", ["of one size", "of a fixed size", "in groups"])
def test_a_cube_that_no_other_size_of_the_input_explains_is_refused(kind: str) -> None:
    first = nn.Conv2d(3, 8, 4, stride=4)
    if kind == "of one size":
        model: nn.Module = OfOneSize(first, nn.Flatten())
    else:
        last = nn.AdaptiveAvgPool2d(8) if kind == "of a fixed size" else Grouped()
        model = nn.Sequential(nn.Sequential(first, last), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone = backbone_of(model.eval())
    backbone.preprocess = replace(backbone.preprocess, crop=(32, 32))
    with pytest.raises(ReduceError, match="could be"), bound(backbone, ("0", "avg")):
        pass


def test_a_model_that_keeps_what_it_computes_for_a_size_is_left_as_it_is() -> None:
    class Keeps(nn.Sequential):
        weights = torch.ones(0, 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.weights.shape != x.shape[-2:]:
                self.weights = torch.ones(x.shape[-2:])
            return super().forward(x * self.weights)

    model = Keeps(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten()).eval()
    backbone = backbone_of(model)
    backbone.preprocess = replace(backbone.preprocess, crop=(32, 32))
    with bound(backbone, ("1", "none")):
        assert model.weights.shape == (32, 32)


class Shares(nn.Parameter):
    """A parameter whose copies share a tensor, which `to` moves, as Params4bit of bitsandbytes."""

    shared = torch.ones(1)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        Shares.shared = Shares.shared.to(*args, **kwargs)
        return super().to(*args, **kwargs)


@pytest.mark.parametrize("error", [None, LayerError, MemoryError])
def test_the_copy_without_memory_leaves_the_model_and_the_run_as_they_are(
    error: type[Exception] | None,
) -> None:
    class Refuses(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if error is not None and x.is_meta:
                raise error("in the copy only")
            return super().forward(x)

    model = Refuses(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten()).eval()
    model[0].weight = Shares(model[0].weight.detach())
    backbone = backbone_of(model)
    backbone.preprocess = replace(backbone.preprocess, crop=(32, 32))
    with bound(backbone, ("1", "none")) as engine:
        assert engine.traced is not None
        assert engine.traced.known_cubes == ({(8, 8, 8)} if error is None else set())
    assert Shares.shared.device.type == "cpu"


@pytest.mark.slow  # torch compiles
def test_the_copy_without_memory_is_not_compiled() -> None:
    graphs = []

    def backend(graph: Any, example: object) -> Any:
        graphs.append(graph)
        return graph.forward

    stage = torch.compile(nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU()), backend=backend)
    backbone = backbone_of(nn.Sequential(stage, nn.Flatten()).eval())
    backbone.preprocess = replace(backbone.preprocess, crop=(32, 32))
    with bound(backbone, ("0", "none")) as engine:
        assert engine.traced is not None
        assert engine.traced.known_cubes == {(8, 8, 8)}
    assert not graphs


NO_GRID = "4 tokens are not 1 prefix tokens and a grid"
EITHER_WAY = (
    r"could be \(C, H, W\) or \(H, W, C\), so its channels are unknown\. Use none or flatten for "
    r"this layer, for example 'layers=\{layer: none\}'\.$"
)


@pytest.mark.parametrize(
    ("shape", "name", "options", "message"),
    [
        *(
            ((8,), name, {}, f"{name} does not fit layer")
            for name in ("cls", "patch_avg", "grid", "align")
        ),
        ((3, 2, 2), "grid", {"size": 4}, "4 x 4 cells are more than its 2 x 2 positions"),
        ((4, 3), "cls", {}, "no class token"),
        ((3, 2, 2), "cls", {"prefix": 1}, r"expected tokens \(T, C\)"),
        # CaiT's blocks hold patches only, though the model has a class token: row 0 is no class.
        *(((4, 3), name, {"prefix": 1}, NO_GRID) for name in ("cls", "patch_avg", "grid")),
        ((197, 2), "patch_avg", {"prefix": 5}, "197 tokens are not 5 prefix"),
        *((shape, "avg", {}, EITHER_WAY) for shape in ((7, 7, 7), (1, 1, 1))),
        # (heads, tokens, channels) is no map.
        ((12, 197, 64), "avg", {}, "no map of the input's proportions"),
        ((8, 1, 2, 3), "avg", {}, r"layer.*\(8, 1, 2, 3\).*layers=\{layer: none\}"),
    ],
)
def test_what_does_not_fit_is_refused(
    shape: tuple[int, ...], name: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ReduceError, match=message):
        reduced(torch.zeros(2, *shape), name, **options)


def patchcore_embedding(maps: list[torch.Tensor]) -> torch.Tensor:
    """The formula of anomalib's PatchcoreModel.generate_embedding: (B, sum of C, H, W)."""
    pooled = [nn.AvgPool2d(3, 1, 1)(x) for x in maps]
    size = pooled[0].shape[-2:]
    resized = [F.interpolate(x, size=size, mode="bilinear") for x in pooled[1:]]
    return torch.cat([pooled[0], *resized], 1)


def test_concatenated_layers_of_align_are_patchcores() -> None:
    maps = [torch.randn(3, 6, 8, 8), torch.randn(3, 10, 4, 4), torch.randn(3, 5, 2, 2)]
    asked = make_reduce("align", size=8, pool=3)
    found = [reduction(asked, RowLayout("x", tuple(x.shape[1:]), (32, 32)))(x) for x in maps]
    torch.testing.assert_close(torch.cat(found, 1), patchcore_embedding(maps), rtol=0, atol=1e-5)


def test_tokens_and_channels_last_maps_are_the_same_map() -> None:
    x = torch.randn(2, 6, 4, 4)
    asked = make_reduce("align", rows=7, columns=5)
    expected = F.interpolate(x, (7, 5), mode="bilinear")
    tokens = torch.cat([torch.randn(2, 1, 6), x.flatten(2).transpose(1, 2)], 1)
    for given in (x, x.movedim(1, -1), tokens):
        rows = RowLayout("x", tuple(given.shape[1:]), (32, 32), num_prefix_tokens=1)
        found = reduction(asked, rows)(given)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


MAP, TOKENS = (6, 8, 8), (1 + 16, 6)
"""Rows of an input of 32 by 32 pixels: 6 channels, and a class token before 4 x 4 patches."""

CASES = {
    "none": (ReduceConfig("none"), MAP),
    "flatten": (ReduceConfig("flatten"), MAP),
    "avg of a map": (ReduceConfig("avg"), MAP),
    "avg of tokens": (ReduceConfig("avg"), TOKENS),
    "max of a map": (ReduceConfig("max"), MAP),
    "max of tokens": (ReduceConfig("max"), TOKENS),
    "gem of a map": (make_reduce("gem", p=3.0), MAP),
    "gem of tokens": (make_reduce("gem", p=3.0), TOKENS),
    "cls": (ReduceConfig("cls"), TOKENS),
    "patch_avg": (ReduceConfig("patch_avg"), TOKENS),
    "grid of a map": (make_reduce("grid", size=2), MAP),
    "align of a map": (make_reduce("align", size=5, pool=3), MAP),
    "align of tokens": (make_reduce("align", size=5), TOKENS),
    "sample of a map": (make_reduce("sample", k=5), MAP),
    "sample of tokens": (make_reduce("sample", k=5), TOKENS),
    "grid of tokens": (make_reduce("grid", size=2), TOKENS),
    "grid of rows and columns": (make_reduce("grid", rows=3, columns=5), MAP),
    "map of a map": (make_reduce("map"), MAP),
    "map of tokens": (make_reduce("map"), TOKENS),
}


@pytest.mark.parametrize("case", CASES)
class TestReductions(ReductionContract):
    @pytest.fixture
    def row_shape(self, case: str) -> tuple[int, ...]:
        return CASES[case][1]

    @pytest.fixture
    def reduction(self, case: str, row_shape: tuple[int, ...]) -> Reduction:
        return reduction(CASES[case][0], RowLayout("layer", row_shape, (32, 32), 1))
