"""Attributions against autograd by hand, naive loops, closed forms, and Captum."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tiny_model import run_job
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

from featx.analysis.attribution import Attributor
from featx.analysis.attribution.attributor import DELTA
from featx.analysis.attribution.methods import guided_rectifiers
from featx.config import METHODS, SCALARS, AttributeConfig
from featx.engine import Compute
from featx.errors import ConfigError, LayerError, MissingExtraError, ModelError
from featx.images import Preprocess
from featx.models import Backbone

SIDE = 24


class Net(nn.Module):
    """One in-place ReLU called twice, a layer without influence, and logits of five classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)  # of four images two are of class 4 and two of class 2
        self.one = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.two = nn.Conv2d(6, 8, 3, padding=1)
        self.aside = nn.Conv2d(8, 2, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5, bias=False)  # or a bias decides for every image

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.two(self.relu(self.one(x))))
        self.aside(x)
        return self.fc(self.pool(x).flatten(1))


class Edited(Net):
    """The same with the last activation by `final`."""

    def __init__(self, final: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.final = final

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(self.final(self.two(self.relu(self.one(x))))).flatten(1))


def backbone_of(
    module: nn.Module, side: int = SIDE, prefix: int = 0, channels: int = 3
) -> Backbone:
    preprocess = Preprocess(
        reference=lambda image: torch.zeros(channels, side, side),
        crop=(side, side),
        resize=side,
        interpolation="bilinear",
        mean=(0.4, 0.5, 0.6, 0.7)[:channels],
        std=(0.2, 0.25, 0.3, 0.35)[:channels],
    )
    return Backbone(module, "test", "random", preprocess, prefix)


def images(count: int = 4, side: int = SIDE, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((count, channels, side, side), generator=generator)


def attributed(
    module: nn.Module,
    x: torch.Tensor,
    *methods: str,
    target: str | int = "predicted",
    labels: torch.Tensor | None = None,
    prefix: int = 0,
    dtype: str = "float32",
    precision: str = "fp32",
    layer: str | None = None,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    options = AttributeConfig(method=list(methods), **settings)
    backbone = backbone_of(module, x.shape[2], prefix, x.shape[1])
    with Attributor(backbone, torch.device("cpu"), dtype, target, options, layer) as attributor:
        chosen = attributor.select(attributor.trace()).chosen
        attributor.attach_captures(chosen)
        attributor.configure_compute(Compute(precision, False, precision != "fp32", len(x)))
        values = attributor.run(x, labels)
        specs = {spec.name: spec for spec in attributor.specs(chosen)}
        for name, value in values.items():
            assert specs[name].shape == value.shape[1:]
            assert specs[name].dtype == str(value.dtype).removeprefix("torch.")
        assert set(values) == set(specs)
        return values


def score(output: torch.Tensor, target: str | int, labels: torch.Tensor) -> torch.Tensor:
    """The number to explain, written down once more."""
    if target == "entropy":
        p = output.softmax(1)
        return -(p * p.log()).sum(1)
    if target == "logsumexp":
        return output.exp().sum(1).log()
    if target == "loss":
        return -output.softmax(1)[torch.arange(len(output)), labels].log()
    if isinstance(target, int):
        return output[:, target]
    chosen = labels if target == "label" else output.argmax(1)
    return output[torch.arange(len(output)), chosen]


@pytest.mark.parametrize("target", [*SCALARS, 2])
def test_gradients_and_grad_cam_are_those_computed_by_hand(target: str | int) -> None:
    x, labels, net = images(), torch.tensor([4, 0, 2, 1]), Net().eval()
    found = attributed(
        net, x, "saliency", "input_x_gradient", "gradcam",
        target=target, labels=labels, layer="two",
    )  # fmt: skip
    leaf = x.clone().requires_grad_()
    act = F.conv2d(F.conv2d(leaf, net.one.weight, net.one.bias, 2, 1).relu(),
                   net.two.weight, net.two.bias, 1, 1)  # fmt: skip
    output = net.fc(act.relu().mean((2, 3)))
    number = score(output, target, labels)
    at_layer, at_input = torch.autograd.grad(number.sum(), [act, leaf])
    cam = sum(at_layer[:, c].mean((1, 2))[:, None, None] * act[:, c] for c in range(8)).relu()
    assert torch.allclose(found["gradcam"], cam, atol=1e-7)
    assert torch.allclose(found["saliency"], at_input.abs().max(1).values, atol=1e-7)
    assert torch.allclose(found["input_x_gradient"], (at_input * x).sum(1), atol=1e-6)
    assert torch.allclose(found["score"], number, atol=1e-6)
    if target in ("entropy", "logsumexp"):
        assert "target" not in found
        assert "probability" not in found
    else:
        classes = {"predicted": output.argmax(1), 2: torch.full((4,), 2)}.get(target, labels)
        assert found["target"].tolist() == classes.tolist()
        assert torch.allclose(
            found["probability"], output.softmax(1)[torch.arange(4), classes], atol=1e-6
        )


def test_each_call_of_a_shared_layer_has_its_own_map() -> None:
    net = Net().eval()
    with pytest.raises(LayerError, match="called 2 times"):
        attributed(net, images(), "gradcam", layer="relu")
    maps = [
        attributed(net, images(), "gradcam", layer=f"relu@{call}")["gradcam"] for call in (1, 2)
    ]
    first = F.conv2d(images(), net.one.weight, net.one.bias, 2, 1).relu().requires_grad_()
    second = net.two(first).relu()
    number = net.fc(second.mean((2, 3))).max(1).values.sum()
    for found, act in zip(maps, (first, second), strict=True):
        gradient = torch.autograd.grad(number, act, retain_graph=True)[0].mean((2, 3))
        cam = torch.einsum("bc,bchw->bhw", gradient, act).relu()
        assert torch.allclose(found, cam, atol=1e-7)
        assert cam.max() > 1e-3


def test_captum_gives_the_same() -> None:
    from captum.attr import GuidedGradCam, InputXGradient, LayerGradCam, Saliency

    x, net = images(), Net().eval()
    found = attributed(
        net, x, "saliency", "input_x_gradient", "gradcam", "guided_gradcam", layer="two"
    )
    alone = attributed(net, x, "gradcam", layer="two")
    assert torch.allclose(alone["gradcam"], found["gradcam"], atol=1e-7)
    classes, leaf = found["target"].long(), x.clone().requires_grad_()
    net.relu.inplace = False  # Captum cannot hook it otherwise
    cam = LayerGradCam(net, net.two).attribute(leaf, classes, relu_attributions=True)
    assert torch.allclose(found["gradcam"], cam[:, 0], atol=1e-6)
    saliency = Saliency(net).attribute(leaf, classes)
    assert torch.allclose(found["saliency"], saliency.amax(1), atol=1e-6)
    product = InputXGradient(net).attribute(leaf, classes)
    assert torch.allclose(found["input_x_gradient"], product.sum(1), atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Captum warns of its hooks
        guided = GuidedGradCam(net, net.two).attribute(leaf, classes, interpolate_mode="bilinear")
    assert torch.allclose(found["guided_gradcam"], guided.sum(1), atol=1e-6)
    assert found["guided_gradcam"].abs().max() > 0


class GuidedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0, 6)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient.clamp(min=0) * ((x > 0) & (x < 6))


class TwoReaders(nn.Module):
    """Rectifiers whose input another layer reads as well, one of them in place; scaled up for 6."""

    def __init__(self, relu: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(3, 4, 3)
        self.skip = nn.Conv2d(4, 4, 1)
        self.relu = relu
        self.last = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 5 * self.conv(x)
        y = self.relu(y) - self.skip(y)
        return self.fc(self.last(y).mean((2, 3)))


@pytest.mark.parametrize("relu", [nn.ReLU6(), nn.ReLU6(inplace=False)])
def test_guided_backpropagation_by_hand(relu: nn.Module) -> None:
    net = TwoReaders(relu).eval()
    x = images().requires_grad_()
    guided = GuidedReLU.apply
    y = 5 * net.conv(x)
    y = guided(y) - net.skip(y)
    by_hand = torch.where(y > 0, y, 0.0)  # the last one's gradient is guided by a hook on it
    by_hand.register_hook(lambda gradient: gradient.clamp(min=0))
    expected = torch.autograd.grad(net.fc(by_hand.mean((2, 3)))[:, 1].sum(), x)[0]
    with guided_rectifiers(net):
        found = torch.autograd.grad(net(x)[:, 1].sum(), x)[0]
    plain = torch.autograd.grad(net(x)[:, 1].sum(), x)[0]
    assert torch.allclose(found, expected, atol=1e-7)
    assert not torch.allclose(found, plain, atol=1e-4)


@pytest.mark.parametrize(
    ("final", "expected"),
    [(torch.relu, "1 of its rectifiers are calls of F.relu"), (F.gelu, "it has Gelu")],
)
def test_guided_backpropagation_refuses_what_it_cannot_guide(final: Any, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        attributed(Edited(final), images(), "guided_gradcam", layer="two")


def test_guided_backpropagation_needs_rectifiers() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ModelError, match="it has none"):
        attributed(net, images(), "guided_gradcam", layer="0")


@pytest.mark.parametrize("baseline", ["black", "mean", "blur"])
def test_integrated_gradients_are_complete(baseline: str) -> None:
    x, net = images(), Net().eval()
    found = attributed(net, x, "integrated_gradients", steps=100, baseline=baseline)
    if baseline == "blur":
        from torchvision.transforms.v2.functional import gaussian_blur

        start = gaussian_blur(x, [9, 9], [1.5, 1.5])
    else:
        black = torch.tensor([-0.4 / 0.2, -0.5 / 0.25, -0.6 / 0.3]).view(1, 3, 1, 1)
        start = (black if baseline == "black" else torch.zeros(1, 3, 1, 1)).expand_as(x)
    rows, classes = torch.arange(len(x)), net(x).argmax(1)
    gain = net(x)[rows, classes] - net(start)[rows, classes]
    total = found["integrated_gradients"].sum((1, 2))
    assert torch.allclose(total - gain, found[DELTA], atol=1e-5)
    assert found[DELTA].abs().max() < 2e-3
    assert gain.abs().min() > 0.01


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_differences_of_a_linear_model_are_known(channels: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(channels * 8 * 8, 4)).eval()
    x = images(3, 8, channels)
    methods, black = ("integrated_gradients", "occlusion"), torch.tensor([-2.0]).view(1, 1, 1, 1)
    settings = {"steps": 3, "window": 1, "baseline": "black"}
    found = attributed(net, x, *methods, target=2, **settings)
    expected = (net[1].weight[2].view(1, channels, 8, 8) * (x - black)).sum(1)
    assert torch.allclose(found["integrated_gradients"], expected, atol=1e-5)
    assert found[DELTA].abs().max() < 1e-5
    assert torch.allclose(found["occlusion"], expected, atol=1e-5), "a pixel at a time"


def test_no_pass_is_larger_than_a_batch() -> None:
    """All steps of all images at once would be 200 times the memory."""
    net, seen = Net(), []
    net.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    attributed(net, images(), "integrated_gradients", "occlusion", steps=5, window=12)
    assert set(seen) <= {2, 3, 4}, "trace, probe, batch"


@pytest.mark.parametrize(("window", "stride"), [(8, 4), (7, 3), (24, 12)])
def test_occlusion_is_that_of_a_naive_loop(window: int, stride: int) -> None:
    x, net = images(), Net().eval()
    found = attributed(net, x, "occlusion", window=window)["occlusion"]
    rows, classes = torch.arange(len(x)), net(x).argmax(1)
    total, covered = torch.zeros(len(x), SIDE, SIDE), torch.zeros(SIDE, SIDE)
    steps = range(0, -(-(SIDE - window) // stride) * stride + 1, stride)
    changed = False
    for top in steps:
        for left in steps:
            hidden = x.clone()
            hidden[:, :, top : top + window, left : left + window] = 0
            changed |= bool((net(hidden).argmax(1) != classes).any())
            fall = net(x)[rows, classes] - net(hidden)[rows, classes]
            total[:, top : top + window, left : left + window] += fall[:, None, None]
            covered[top : top + window, left : left + window] += 1
    assert torch.allclose(found, total / covered, atol=1e-5)
    assert covered.min() > 0
    assert changed, "a hidden square changes the prediction; the class explained must stay"


def test_float16_keeps_numbers_exact() -> None:
    found = attributed(Net(), images(), "gradcam", layer="two", dtype="float16")
    assert found["gradcam"].dtype == torch.float16
    assert found["target"].dtype == found["score"].dtype == torch.float32


def test_half_precision_and_channels_last_stay_near() -> None:
    methods = [method for method in METHODS if method != "saliency"]
    exact = attributed(Net(), images(), *methods, layer="two", steps=3, window=8)
    half = attributed(Net(), images(), *methods, layer="two", steps=3, window=8, precision="bf16")
    assert half["target"].tolist() == exact["target"].tolist()
    for method in methods:
        a, b = exact[method].flatten(), half[method].flatten()
        assert 0.97 < torch.cosine_similarity(a, b, 0) < 1, method


def test_the_model_is_left_as_it_was_found() -> None:
    net = Net().eval()
    before = net(images())
    methods = [method for method in METHODS if method != "occlusion"]
    attributed(net, images(), *methods, layer="two", steps=2)
    assert torch.equal(net(images()), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert net.relu.inplace
    assert not net.training


class Breaks(Net):
    """A Net that fails after its layers have been called, once `after` passes are over."""

    left = 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        output = super().forward(x)
        if not self.left:
            raise RuntimeError("broken")
        return output


class Answer(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Answering(Net):
    """A Net whose logits have a name."""

    def forward(self, x: torch.Tensor) -> Any:
        return Answer(super().forward(x), x)


@pytest.mark.slow
def test_logits_with_a_name_are_explained() -> None:
    methods = ("saliency", "gradcam", "occlusion", "integrated_gradients")
    pytest.importorskip("captum")
    named = attributed(Answering(), images(), *methods, layer="two", steps=3)
    plain = attributed(Net(), images(), *methods, layer="two", steps=3)
    for name, value in plain.items():
        torch.testing.assert_close(named[name], value)


@pytest.mark.parametrize("left", range(1, 9))
def test_no_hook_outlives_an_exception(left: int) -> None:
    net = Breaks()
    net.left = left
    with pytest.raises((RuntimeError, ModelError), match="broken"):
        attributed(net, images(), "gradcam", "guided_gradcam", layer="two")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("pool", "only one position"),
        ("aside", "target=predicted has no gradient at"),
        ("fc", "expected a map"),
        ("twoo", "Nearest: two"),
        (None, r"no stages were found in this model; give 'layers=\[NAME\]'"),
    ],
)
def test_a_layer_that_says_nothing_of_where_is_refused(layer: str | None, expected: str) -> None:
    with pytest.raises(LayerError, match=expected):
        attributed(Net(), images(), "gradcam", layer=layer)


def test_a_row_that_depends_on_its_neighbours_is_refused() -> None:
    norm = nn.BatchNorm2d(6, track_running_stats=False)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ModelError, match="other images of its batch"):
        attributed(net, images(), "gradcam", layer="2")


def test_a_model_without_gradients_is_refused() -> None:
    class Frozen(nn.Sequential):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    net = Frozen(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    with pytest.raises(ModelError, match=r"has no gradient at the images.*method=occlusion"):
        attributed(net, images(), "saliency")


def test_a_model_without_logits_is_refused() -> None:
    with pytest.raises(ModelError, match="returns logits"):
        attributed(nn.Conv2d(3, 4, 3), images(), "saliency")


def test_tokens_of_a_transformer_become_a_map() -> None:
    torch.manual_seed(2)
    net = VisionTransformer(32, 8, 3, 2, 16, 32, num_classes=5).eval()
    nn.init.normal_(net.heads.head.weight)  # it begins as zero
    found = attributed(net, images(side=32), "gradcam", prefix=1)["gradcam"]
    named = attributed(
        net, images(side=32), "gradcam", prefix=1, layer="encoder.layers.encoder_layer_1"
    )["gradcam"]
    assert found.shape == (4, 4, 4)
    assert torch.equal(found, named), "the last block's patches do not count, the one before's do"
    assert found.max() > 0
    with pytest.raises(LayerError, match="only the class token counts"):
        attributed(
            net, images(side=32), "gradcam", prefix=1, layer="encoder.layers.encoder_layer_2"
        )


@pytest.mark.parametrize("method", ["integrated_gradients", "occlusion"])
def test_without_captum_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setitem(sys.modules, "captum", None)
    with pytest.raises(MissingExtraError, match=r'pip install "featx\[attribution\]"'):
        attributed(Net(), images(), method)
    assert attributed(Net(), images(), "saliency")["saliency"].any()


def test_a_window_larger_than_the_image_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attribute.window=25 does not fit into the 24 x 24"):
        attributed(Net(), images(), "occlusion", window=25)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"method": "grad_cam"}, "attribute.method=grad_cam: expected some of saliency"),
        ({"method": ["gradcam", "gradcam"]}, "a value is repeated"),
        ({"method": []}, "attribute.method is empty: expected"),
        ({"steps": 3}, "attribute.steps has an effect with"),
        ({"baseline": "black"}, "attribute.baseline has an effect with"),
        (
            {"method": "occlusion", "window": 0},
            "attribute.window=0: expected a whole number",
        ),
        ({"method": "occlusion", "baseline": "white"}, "expected one of black, mean, blur"),
        ({"per_class": -1}, "attribute.per_class=-1"),
        ({"per_class": 0, "feature_map_layer": "two"}, "attribute.feature_map_layer draws"),
    ],
)
def test_mistaken_settings_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        AttributeConfig(**settings)


def test_a_compiled_model_has_no_gradients() -> None:
    with pytest.raises(ConfigError, match="compile=true does not go with gradients"):
        run_job("attribute", data="photos", compile=True)
