"""Attention weights: by hand, by PyTorch's own need_weights, and everything else as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from tiny_engine import CPU, assert_refused, backbone_of, bound, noise
from tiny_model import KEYS, extract, run_job
from torch import nn
from zoo import PatchTransformer, vision_transformer

import featx
from featx.config import ReduceConfig
from featx.engine import Engine
from featx.errors import LayerError, ReduceError
from featx.layers import Selection, plain_attention, select

SIDE = 16


def torchvision_vit() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.VisionTransformer(SIDE, 4, 2, 2, 8, 16, num_classes=3).eval()


MHA = "encoder.layers.encoder_layer_{}.self_attention"


def choose(module: nn.Module, *requests: str) -> Selection:
    with Engine(backbone_of(module, SIDE), CPU, "float32") as engine:
        pairs = [(request, ReduceConfig()) for request in requests]
        return select(pairs, engine.trace(requests), None, None)


def run(
    module: nn.Module, x: torch.Tensor, requests: Sequence[str]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    with bound(backbone_of(module, SIDE), *requests) as engine:
        return engine.run(x), engine.unfused_modules


def by_hand(attn: Any, x: torch.Tensor) -> torch.Tensor:
    """softmax(q k / sqrt(d)), from the module's own qkv."""
    b, t, c = x.shape
    q, k, _ = attn.qkv(x).reshape(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
    return torch.einsum("bhtd,bhsd->bhts", q, k).div((c // 2) ** 0.5).softmax(-1)


def test_timms_weights_are_those_by_hand_and_the_model_is_as_it_was() -> None:
    model, x = vision_transformer(), noise(4, SIDE)
    name = "blocks.1.attn:attention"
    values, plain = run(model, x, [name, "blocks.1.norm1", "blocks.1"])
    with torch.no_grad():
        expected = by_hand(model.blocks[1].attn, values["blocks.1.norm1"])
    assert values[name].shape == (4, 2, 17, 17)
    torch.testing.assert_close(values[name], expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(values[name].sum(-1), torch.ones(4, 2, 17))
    assert values[name].amax(-1).mean() > 0.3  # not uniform, which 1/17 would be
    assert plain == ["blocks.1.attn"]
    assert [block.attn.fused_attn for block in model.blocks] == [True, True]
    without, _ = run(model, x, ["blocks.1"])
    torch.testing.assert_close(values["blocks.1"], without["blocks.1"], rtol=1e-5, atol=1e-6)


def test_of_two_blocks_the_last_to_end_switches_the_fused_kernel_on() -> None:
    model, x = vision_transformer(), noise(2, SIDE)
    name, first, second = "blocks.0.attn:attention", contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(featx.capture(model, name))
    features = second.enter_context(featx.capture(model, name))
    first.close()
    model(x)
    assert features[name].shape == (2, 2, 17, 17)
    second.close()
    assert model.blocks[0].attn.fused_attn


@pytest.mark.parametrize(
    "make", [torchvision_vit, PatchTransformer, lambda: PatchTransformer(batch_first=False)]
)
def test_multihead_weights_are_pytorchs_own(make: Any) -> None:
    model, x = make(), noise(4, SIDE)
    names = [name for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    seen: dict[str, Any] = {}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda m, args, kwargs, name=name: seen.__setitem__(name, (args, kwargs)),
            with_kwargs=True,
        )
    values, plain = run(model, x, [f"{name}:attention" for name in names])
    assert plain == names
    with torch.no_grad():
        model(x)
        for name in names:
            args, kwargs = seen[name]
            kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
            expected = model.get_submodule(name)(*args, **kwargs)[1]
            got = values[f"{name}:attention"]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(got.sum(-1), torch.ones(got.shape[:-1]))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"need_weights": False}),
        ((), {"need_weights": True, "average_attn_weights": False}),
        ((None, True, None, False), {}),
    ],
)
def test_the_layers_around_get_what_they_asked_for(args: Any, kwargs: Any) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = nn.ModuleDict({"a": attention})
    x = torch.randn(3, 5, 8)
    expected = attention(x, x, x, *args, **kwargs)
    model.forward = lambda x: attention(x, x, x, *args, **kwargs)  # type: ignore[method-assign]
    with featx.capture(model, ["a:attention", "a[0]"]) as features:
        value, weights = model(x)
    torch.testing.assert_close(value, expected[0])
    if expected[1] is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights, expected[1])
    torch.testing.assert_close(features["a[0]"], expected[0])
    assert features["a:attention"].shape == (3, 2, 5, 5)
    assert not attention._forward_hooks
    assert not attention._forward_pre_hooks


def test_masks_and_several_calls() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = nn.ModuleDict({"a": attention})
    x, context = torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return attention(y, context, context, need_weights=False)[0]

    model.forward = forward  # type: ignore[method-assign]
    expected = model(x)
    with featx.capture(model, ["a@1:attention", "a@2:attention"]) as features:
        torch.testing.assert_close(model(x), expected)
    assert features["a@1:attention"].triu(1).abs().max() == 0
    assert features["a@2:attention"].shape == (3, 2, 5, 7)
    with featx.capture(model, ["a:attention"]) as features:
        model(x)
    with pytest.raises(LayerError, match="called 2 times"):
        features["a:attention"]


def test_what_the_fused_kernel_hides_has_names_too() -> None:
    """The softmax of one block: its kernel is off, that of the other stays on."""
    model, x = vision_transformer(), noise(4, SIDE)
    asked = ["blocks.0.attn.softmax", "blocks.0.attn.matmul", "blocks.0.attn:attention"]
    values, plain = run(model, x, asked)
    assert plain == ["blocks.0.attn"]
    assert torch.equal(values[asked[0]], values[asked[2]])
    assert torch.equal(values[asked[1]].softmax(-1), values[asked[0]])
    with torch.no_grad(), featx.capture(model, asked[:1]) as features:
        model(x)
    assert torch.equal(features[asked[0]], values[asked[0]])
    fused = ["blocks.0.attn.scaled_dot_product_attention"]
    values, plain = run(model, x, fused)
    assert (values[fused[0]].shape, plain) == ((4, 2, 17, 4), [])
    with pytest.raises(LayerError, match="no layer"):
        choose(model, *asked, *fused)  # one module runs in one way


@pytest.mark.parametrize("reduce", ["avg", "max", "gem", "map", "grid", "align", "sample"])
@pytest.mark.parametrize("name", [":attention", ".softmax", ".softmax:grad_output", ".matmul"])
def test_weights_are_no_map_however_they_are_named(name: str, reduce: str) -> None:
    """(heads, T, T) has the proportions of a square image; the mean over T is always 1 / T."""
    backbone = backbone_of(vision_transformer(), SIDE, num_prefix_tokens=1)
    said = r"attention weights \(heads, T, S\), no map"
    assert_refused(ReduceError, said, backbone, (f"blocks.0.attn{name}", reduce))


def test_a_softmax_over_the_channels_of_a_map_is_a_map() -> None:
    class Segmentation(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).softmax(1)

    x = noise(4, SIDE)
    model = Segmentation(nn.Conv2d(3, 5, 4, 4)).eval()
    with bound(backbone_of(model, SIDE), ("softmax", "avg")) as engine:
        found = engine.run(x)["softmax"]
    torch.testing.assert_close(found, model(x).mean((2, 3)), rtol=1e-5, atol=1e-6)


def test_gradients_at_the_weights() -> None:
    model, x = vision_transformer(), noise(2, SIDE)
    name = "blocks.1.attn.softmax"
    with featx.capture(model, [name, f"{name}:grad_output", "blocks.1.attn.qkv"]) as features:
        model(x)[:, 0].sum().backward()
    assert features[f"{name}:grad_output"].shape == (2, 2, 17, 17)
    values = features["blocks.1.attn.qkv"].reshape(2, 17, 3, 2, 4)[:, :, 2].transpose(1, 2)
    with featx.capture(model, ["blocks.1.attn.matmul_1:grad_output"]) as at_result:
        model(x)[:, 0].sum().backward()
    expected = at_result["blocks.1.attn.matmul_1:grad_output"] @ values.transpose(-2, -1)
    torch.testing.assert_close(features[f"{name}:grad_output"], expected, rtol=1e-4, atol=1e-7)


def test_globs_and_presets_take_every_attention_module() -> None:
    model = vision_transformer()
    every = [f"blocks.{i}.attn:attention" for i in (0, 1)]
    for request in ("blocks.*.attn:attention", "all:attention", "leaves:attention"):
        assert [point.name for point, _ in choose(model, request).chosen] == every
        assert choose(model, request).left_out == []
    several = [MHA.format(i) + ":attention" for i in (0, 1)]
    assert [point.name for point, _ in choose(torchvision_vit(), "all:attention").chosen] == several
    # Whoever asks for something else does not pay for it.
    for request in ("all", "leaves", "blocks.*.attn", "**", "blocks.1.attn", "blocks.1.attn.proj"):
        with plain_attention(model, [request]) as plain:
            assert plain == []
    with plain_attention(model, ["blocks.*.attn.softmax"]) as plain:
        assert plain == ["blocks.0.attn", "blocks.1.attn"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("blocks.1:attention", r"attention weights of a Block\..*below it: blocks\.1\.attn"),
        ("norm:attention", r"attention weights of a LayerNorm\..*elsewhere name the softmax"),
        ("embedding:attention", "does not apply to it. Name a layer"),
        ("blocks.0.attn:weights", "one of output, input, grad_output, grad_input, attention"),
    ],
)
def test_what_shows_no_weights_is_refused(request_: str, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        choose(vision_transformer(), request_, "blocks.1.attn:attention")


def test_functional_attention_is_named_by_its_softmax() -> None:
    """torchvision's Swin; only its last stage has one window, and so the batch in front."""
    torch.manual_seed(0)
    model = torchvision.models.SwinTransformer(
        [4, 4], 8, [1, 1], [2, 2], window_size=[2, 2], num_classes=3
    ).eval()
    with pytest.raises(LayerError, match=r"name the operation 'features\.3\.0\.attn\.softmax'"):
        choose(model, "features.3.0.attn:attention")
    values, plain = run(model, noise(4, SIDE), ["features.3.0.attn.softmax"])
    assert (values["features.3.0.attn.softmax"].shape, plain) == ((4, 2, 4, 4), [])
    with pytest.raises(LayerError, match="first dimension is not the batch"):
        choose(model, "features.1.0.attn.softmax")
    with pytest.raises(LayerError, match=r"\(8, 2, 4, 4\) for a batch of 2: these are windows"):
        choose(model, "features.1.0.attn:attention")
    with (
        pytest.raises(LayerError, match=r"'features\.3\.0\.attn\.softmax'"),
        featx.capture(model, "features.3.0.attn:attention"),
    ):
        pass


def test_weights_that_do_not_add_up_are_refused() -> None:
    """`attn_drop` is only a name: what a module hands to it need not be attention."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_drop = nn.Dropout()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attn_drop(x)

    with pytest.raises(LayerError, match="rows whose sums are not 1"):
        run(nn.Sequential(nn.Identity(), Odd()), noise(4, SIDE), ["1:attention"])


def tiny_model() -> nn.Module:
    """For model=custom."""
    return vision_transformer()


def test_weights_go_into_the_store_and_the_run_says_so(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**KEYS["model"], "factory": "test_attention:tiny_model"}
    model["transform"] = {"resize": SIDE, "crop": SIDE}
    keys = {"model": model, "layers": ["blocks.*.attn"], "capture": "attention"}
    store = extract(photos, **keys, dtype="float32", out=tmp_path / "store")
    assert set(store) == {"blocks.0.attn:attention", "blocks.1.attn:attention"}
    layer = store["blocks.1.attn:attention"]
    assert (layer.shape, layer.attrs["capture"]) == ((21, 2, 17, 17), "attention")
    assert abs(layer[:].sum(-1) - 1).max() < 1e-5
    capsys.readouterr()
    assert run_job("plan", **{**KEYS, **keys, "data": str(photos), "out": str(tmp_path / "p")}) == 0
    said = "fused attention is off for this run in blocks.0.attn, blocks.1.attn (2)"
    assert said in capsys.readouterr().out
