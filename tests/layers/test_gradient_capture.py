"""Gradients at layers: against autograd by hand, full backward hooks, and real backbones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tiny_engine import backbone_of, bound, num_hooks
from tiny_model import extract
from torch import nn

import featx
from featx import jobs
from featx.config import Config
from featx.errors import ConfigError, LayerError, ModelError, StoreMismatchError
from featx.layers import target_values

SIDE = 6


class Residual(nn.Module):
    """One tensor read by two layers, an in-place activation, `+=`, and a layer nobody needs."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inplace = inplace
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace)
        self.left = nn.Conv2d(4, 4, 3, padding=1)
        self.right = nn.Conv2d(4, 4, 1)
        self.aside = nn.Linear(4, 2)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.stem(x))
        y = self.left(x)
        if self.inplace:
            y += self.right(x)
            torch.relu_(y)
        else:
            y = torch.relu(y + self.right(x))
        pooled = y.mean((2, 3))
        self.aside(pooled)
        return self.fc(pooled)


def gradients(
    module: nn.Module,
    x: torch.Tensor,
    *layers: str,
    target: str | int = "predicted",
    labels: torch.Tensor | None = None,
    reduce: str = "none",
) -> dict[str, torch.Tensor]:
    backbone = backbone_of(module.eval().requires_grad_(False), SIDE)
    with bound(backbone, *((layer, reduce) for layer in layers), target=target) as engine:
        return engine.run(x, labels)


def by_full_backward_hooks(
    layers: list[str], x: torch.Tensor, columns: torch.Tensor
) -> dict[str, torch.Tensor]:
    """PyTorch's own hooks, on the model without in-place operations, which they do not allow."""
    module = Residual(inplace=False)
    found: dict[str, torch.Tensor] = {}
    for name in layers:

        def hook(m: nn.Module, gin: tuple, gout: tuple, name: str = name) -> None:
            found[f"{name}:grad_input"] = gin[0].clone()
            found[f"{name}:grad_output"] = gout[0].clone()

        module.get_submodule(name).register_full_backward_hook(hook)
    leaf = x.clone().requires_grad_()
    module(leaf).gather(1, columns[:, None]).sum().backward()
    return found


def test_they_are_those_of_pytorchs_full_backward_hooks() -> None:
    """Also where one tensor is read by two layers, whose own shares are kept apart."""
    model = Residual()
    x = torch.randn(4, 3, SIDE, SIDE)
    layers = ["stem", "relu", "left", "right", "fc"]
    asked = [f"{layer}:{kind}" for layer in layers for kind in ("grad_output", "grad_input")]
    got = gradients(model, x, *asked)
    columns = model(x).argmax(1)
    expected = by_full_backward_hooks(layers, x, columns)
    assert set(got) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-7)
    assert not torch.equal(got["left:grad_input"], got["right:grad_input"])


def test_a_row_is_its_own_images_gradient_whatever_the_batch() -> None:
    model = Residual()
    x = torch.randn(4, 3, SIDE, SIDE)
    together = gradients(model, x, "left:grad_output")["left:grad_output"]
    others = x.clone()
    others[1:] = 0
    again = gradients(model, others, "left:grad_output")["left:grad_output"]
    torch.testing.assert_close(again[0], together[0], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(again[1], together[1])


LOGITS = torch.tensor([[1.0, 3.0, 2.0], [0.5, -1.0, 0.0]])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("predicted", [3.0, 0.5]),
        ("label", [2.0, -1.0]),
        (0, [1.0, 0.5]),
        ("loss", [1.4076059, 2.1041306]),
        ("logsumexp", [3.4076059, 1.1041306]),
        ("entropy", [0.8323955, 0.9110766]),
    ],
)
def test_targets_by_hand(target: str | int, expected: list[float]) -> None:
    found = target_values(LOGITS, target, torch.tensor([2, 1]))
    if target == "entropy":
        p = LOGITS.double().softmax(1)
        expected = (-(p * p.log()).sum(1)).tolist()
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("target", ["label", "loss", "predicted", 3, "entropy", "logsumexp"])
def test_each_targets_gradient_is_autograds(target: str | int) -> None:
    model = Residual()
    x, labels = torch.randn(4, 3, SIDE, SIDE), torch.tensor([4, 0, 2, 2])
    got = gradients(model, x, "stem:grad_input", target=target, labels=labels)
    leaf = x.clone().requires_grad_()
    target_values(model(leaf), target, labels).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(got["stem:grad_input"], leaf.grad, rtol=1e-5, atol=1e-7)


def test_classes_that_are_not_there_are_refused() -> None:
    with pytest.raises(ModelError, match="the model has 3 classes"):
        target_values(LOGITS, 3, None)
    for labels in ([-1, 0], [0, 3]):
        with pytest.raises(ModelError, match="has no label, or one beyond the model's 3 classes"):
            target_values(LOGITS, "label", torch.tensor(labels))


def test_labels_are_checked_without_waiting_for_a_device() -> None:
    """A meta tensor has no values to wait for."""
    logits = torch.empty(2, 4, device="meta")
    assert target_values(logits, "label", torch.tensor([3, 0])).shape == (2,)
    with pytest.raises(ModelError, match="an image has no label"):
        target_values(logits, "label", torch.tensor([3, 4]))


class Named(OrderedDict[str, torch.Tensor]):
    """As a ModelOutput of Hugging Face: a dict whose entries are attributes."""

    @property
    def logits(self) -> torch.Tensor:
        return self["logits"]


@dataclass
class Fields:
    logits: torch.Tensor | None
    hidden: torch.Tensor


class Pair(NamedTuple):
    logits: torch.Tensor
    aux: torch.Tensor


HIDDEN = torch.zeros(2, 4, 4, 4)


@pytest.mark.parametrize(
    "output",
    [
        Named(logits=LOGITS, last_hidden_state=HIDDEN),
        {"logits": LOGITS},
        Fields(LOGITS, HIDDEN),
        Pair(LOGITS, LOGITS + 1),
        (LOGITS, HIDDEN),
        [HIDDEN, LOGITS],
    ],
)
def test_logits_are_found_in_what_a_model_returns(output: object) -> None:
    assert target_values(output, 1, None).tolist() == LOGITS[:, 1].tolist()


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (
            Named(last_hidden_state=HIDDEN, pooler_output=LOGITS),
            r"a Named with last_hidden_state \(2, 4, 4, 4\), pooler_output \(2, 3\)",
        ),
        ({"out": LOGITS}, r"a dict with out \(2, 3\)"),
        (Fields(None, HIDDEN), r"a Fields with logits NoneType, hidden \(2, 4, 4, 4\)"),
        ((LOGITS, LOGITS), r"a tuple of \(2, 3\), \(2, 3\)"),
        (HIDDEN, r"a tensor \(2, 4, 4, 4\)"),
        (None, "a NoneType with nothing"),
    ],
)
def test_a_model_without_logits_is_told_what_it_returns(output: object, found: str) -> None:
    with pytest.raises(ModelError, match=f"this one returns {found}"):
        target_values(output, "predicted", None)


def test_a_layer_that_no_gradient_reaches_is_named() -> None:
    with pytest.raises(
        LayerError, match=r"aside:grad_output: target=predicted has no gradient there"
    ):
        gradients(Residual(), torch.randn(2, 3, SIDE, SIDE), "aside:grad_output")


def test_the_model_is_left_as_it_was() -> None:
    model = Residual()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients(model, torch.randn(4, 3, SIDE, SIDE), "left:grad_input", "left:grad_output")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    assert num_hooks(model) == 0


class WritesToItsInput(nn.Module):
    """Throws the result of an in-place layer away, and continues with what it wrote."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inplace = inplace
        self.conv = nn.Conv2d(3, 4, 1)
        self.relu = nn.ReLU(inplace)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x) * 2
        y = self.relu(x)
        return self.fc((x if self.inplace else y).mean((2, 3)))


def test_what_a_layer_writes_to_its_input_is_read_by_the_model() -> None:
    x, name = torch.randn(2, 3, SIDE, SIDE), "relu:grad_input"
    plain, model = WritesToItsInput(inplace=False), WritesToItsInput(inplace=True)
    given = plain.conv(x) * 2
    expected = plain.fc(given.relu().mean((2, 3)))
    (gradient,) = torch.autograd.grad(expected[:, 1].sum(), given)
    plain(x)[:, 1].sum().backward()
    with featx.capture(model, name) as features:
        output = model(x)
        output[:, 1].sum().backward()
    assert torch.equal(output, expected)
    assert torch.equal(features[name], gradient)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(gradients(model, x, name, target=1)[name], gradient)


def test_capture_fills_gradients_in_at_the_users_backward() -> None:
    model = Residual()
    x = torch.randn(2, 3, SIDE, SIDE)
    asked = ["left", "left:grad_output", "left:grad_input"]
    with featx.capture(model, asked) as features:
        loss = model(x).square().sum()
        with pytest.raises(LayerError, match="no gradient of 'left:grad_output' has arrived"):
            features["left:grad_output"]
        loss.backward()
        assert features["left:grad_output"].shape == features["left"].shape
        assert features["left:grad_input"].abs().sum() > 0
        for without in (torch.no_grad, torch.inference_mode):
            said = rf"no gradient passes there.* under torch.{without.__name__}\(\)"
            with without(), pytest.raises(LayerError, match=said):
                model(x + 0)


def test_the_config_refuses_what_has_no_effect() -> None:
    Config(layers=["a:grad_output"], target=7)
    for wrong in ("best", -1, True, 1.5):
        with pytest.raises(ConfigError, match="target="):
            Config(capture="grad_output", target=wrong)
    with pytest.raises(ConfigError, match="has an effect with capture=grad_output"):
        jobs.check(Config(target="label"))
    with pytest.raises(ConfigError, match="does not go with gradients"):
        jobs.check(Config(capture="grad_input", compile=True))


@pytest.mark.usefixtures("in_tmp_path")
def test_gradients_go_into_the_store_with_the_activations(photos: Path) -> None:
    keys = {"layers": ["deep", "deep:grad_output"], "reduce": "avg", "dtype": "float32"}
    store = extract(photos, **keys, out="predicted")
    assert set(store) == {"deep", "deep:grad_output"}
    assert store["deep:grad_output"].attrs["capture"] == "grad_output"
    other = extract(photos, **keys, target=3, out="three")
    assert np.array_equal(store["deep"][:], other["deep"][:])
    assert not np.allclose(store["deep:grad_output"][:], other["deep:grad_output"][:])
    with pytest.raises(StoreMismatchError, match=r"target 3', now .*target predicted'"):
        extract(photos, **{**keys, "layers": ["conv", *keys["layers"]]}, out="three")


class Embedding(nn.Module):
    """Patches to tokens, as in a ViT: the output is a view of that of the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 8, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class ViewsInPlace(nn.Module):
    """Layers whose outputs are views, each of which is changed in place behind it."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inplace = inplace
        self.embed, self.pos = Embedding(), nn.Parameter(torch.randn(1, 9, 8))
        self.fc1, self.relu = nn.Linear(8, 8), nn.ReLU(inplace)
        self.fc2, self.flat, self.fc = nn.Linear(8, 8), nn.Flatten(), nn.Linear(72, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.inplace:
            x += self.pos
        else:
            x = x + self.pos
        x = self.fc2(self.relu(self.fc1(x)))
        early = x.mean((1, 2))  # reads the memory of the next layer's output before it is changed
        x = self.flat(x)
        return self.fc(torch.relu_(x) if self.inplace else x.relu()) + early[:, None]


VIEWS = ("embed", "fc1", "relu", "fc2", "flat", "fc")


def test_gradients_before_a_change_in_place_of_a_view_are_those_without_the_change() -> None:
    x = torch.randn(2, 3, SIDE, SIDE)
    names = [f"{layer}:grad_output" for layer in VIEWS]
    expected: dict[str, torch.Tensor] = {}
    plain = ViewsInPlace(inplace=False)
    for layer, name in zip(VIEWS, names, strict=True):
        plain.get_submodule(layer).register_full_backward_hook(
            lambda m, gin, gout, name=name: expected.__setitem__(name, gout[0])
        )
    plain(x.clone().requires_grad_())[:, 1].sum().backward()
    model = ViewsInPlace(inplace=True)
    with featx.capture(model, names) as features:
        model(x)[:, 1].sum().backward()
    for name in names:
        torch.testing.assert_close(features[name], expected[name], rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    got = gradients(ViewsInPlace(inplace=True), x, *names, target=1)
    for name in names:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-7)


def test_each_of_several_backward_passes_has_its_gradient() -> None:
    """Grad-CAM of two classes from one forward pass; the latest is read."""
    model, x = Residual(), torch.randn(2, 3, SIDE, SIDE)
    with featx.capture(model, ["left", "left:grad_output", "left:grad_input"]) as features:
        for _ in range(2):
            logits = model(x)
            with pytest.raises(LayerError, match="no gradient of 'left:grad_output'"):
                features.gradients("left")
            for column in range(3):
                logits[:, column].sum().backward(retain_graph=True)
                expected = gradients(Residual(), x, "left:grad_output", target=column)
                torch.testing.assert_close(
                    features["left:grad_output"], expected["left:grad_output"]
                )
                assert len(features.gradients("left")) == column + 1
            assert torch.equal(features.gradients("left")[-1], features["left:grad_output"])
            assert len(features.gradients("left:grad_input")) == 3
    with pytest.raises(LayerError, match="'right:grad_output' is not captured"):
        features.gradients("right")


def test_gradients_of_gradients_are_autograds() -> None:
    """A penalty on the gradient at a layer, whose own backward pass passes the layer again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 4, requires_grad=True)
    hidden = model[0](x)
    (first,) = torch.autograd.grad(model[1:](hidden).sum(), hidden, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), hidden)
    with featx.capture(model, ["0", "0:grad_output"]) as features:
        output = model(x).sum()
        torch.autograd.grad(output, x, create_graph=True)
        gradient = features["0:grad_output"]
        assert torch.equal(gradient, first)
        gradient.square().sum().backward()
        assert len(features.gradients("0")) == 2
        torch.testing.assert_close(features["0:grad_output"], second)
