"""featx.capture: what is read belongs to one pass, of one thread, of one model."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_engine import num_hooks
from torch import nn

import featx
from featx.errors import LayerError, ModelError


class Scaled(nn.Module):
    """One layer called twice, an operation of its own, and attention that averages its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.act = nn.ReLU()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.first(x) + 1)
        y, _ = self.attend(y, y, y, need_weights=bool(x[0, 0, 0] > 0))
        return self.act(y).sum((1, 2))


NAMES = ["first", "act@1", "act@2", "attend[0]"]


@pytest.fixture
def model() -> Scaled:
    torch.manual_seed(0)
    return Scaled().eval()


def weak(tensors: list[torch.Tensor]) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(tensor) for tensor in tensors]


def images(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))


def meeting(num_threads: int) -> Callable[..., None]:
    """A hook in which each of some threads waits for the others."""
    barrier = threading.Barrier(num_threads, timeout=30)

    def hook(*_: object) -> None:
        barrier.wait()

    return hook


def test_get_returns_its_default_for_a_layer_that_is_not_captured(model: Scaled) -> None:
    with featx.capture(model, "first") as features:
        model(images(1))
    assert torch.equal(features.get("first:output"), images(1) @ model.first.weight.T)
    assert features.get("act@1") is None
    assert features.get("act@1", 5) == 5
    with pytest.raises(LayerError, match=r"'act@1' is not captured"):
        features["act@1"]


def test_a_gradient_of_an_earlier_pass_is_no_gradient_of_this_one(model: Scaled) -> None:
    with featx.capture(model, ["first", "first:grad_output", "add", "add:grad_output"]) as features:
        first = model(images(1)).sum()
        second = model(images(2)).sum()
        first.backward()
        for name in ("first:grad_output", "add:grad_output"):
            with pytest.raises(LayerError, match="has arrived for the last forward pass"):
                features[name]
        assert torch.equal(features["first"], images(2) @ model.first.weight.T)
        second.backward()
        gradient = features["first:grad_output"]
    x = model.first(images(2)).detach().requires_grad_()
    rest = model.act(x + 1)
    rest = model.attend(rest, rest, rest)[0]
    (expected,) = torch.autograd.grad(model.act(rest).sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_a_gradient_at_a_layer_that_is_not_called_needs_no_backward(model: Scaled) -> None:
    model.unused = nn.Linear(1, 1)
    with featx.capture(model, "unused:grad_output") as features:
        model(images(1)).sum().backward()
        with pytest.raises(LayerError, match=r"unused:grad_output' was not called in the last"):
            features["unused:grad_output"]


def test_gradients_of_two_passes_in_one_backward_are_told_apart(model: Scaled) -> None:
    def gradient(*seeds: int) -> torch.Tensor:
        with featx.capture(model, ["first:grad_output"]) as features:
            torch.stack([model(images(seed)).sum() for seed in seeds]).sum().backward()
            return features["first:grad_output"]

    assert torch.equal(gradient(1, 2), gradient(2))
    assert not torch.equal(gradient(1, 2), gradient(1))


def test_threads_that_share_a_model_read_their_own_features(model: Scaled) -> None:
    """The passes of all threads run at the same time: each waits in its own for the others."""
    num_threads, num_passes = 4, 20
    expected = {}
    for seed in range(num_threads):
        with torch.no_grad(), featx.capture(model, NAMES) as features:
            model(images(seed))
        expected[seed] = dict(features)
    meet = meeting(num_threads)

    def passes(features: Any, seed: int) -> bool:
        same = True
        for _ in range(num_passes):
            with torch.no_grad():
                model(images(seed))
            same &= all(torch.equal(features[name], expected[seed][name]) for name in NAMES)
        return same

    with featx.capture(model, NAMES) as features, ThreadPoolExecutor(num_threads) as pool:
        model.act.register_forward_hook(meet)
        found = list(pool.map(lambda seed: passes(features, seed), range(num_threads)))
        assert found == [True] * num_threads
        with pytest.raises(LayerError, match="forward passes in this block ran in other threads"):
            features["first"]


def test_attention_weights_asked_for_in_one_thread_reach_no_other(model: Scaled) -> None:
    """Each call gets back what it asked for: weights, or None."""
    x = images(1)

    def attend(need_weights: bool) -> bool:
        return all(
            (model.attend(x, x, x, need_weights=need_weights)[1] is not None) == need_weights
            for _ in range(50)
        )

    with featx.capture(model, ["attend:attention"]), ThreadPoolExecutor(2) as pool:
        model.attend.register_forward_pre_hook(meeting(2))
        assert list(pool.map(attend, [True, False])) == [True, True]


def test_operations_are_named_as_if_no_other_thread_ran_the_model(model: Scaled) -> None:
    stop = threading.Event()

    def run_meanwhile() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(images(5))

    with torch.no_grad(), featx.capture(model, ["add"]) as features:
        thread = threading.Thread(target=run_meanwhile)
        thread.start()
        try:
            for seed in range(50):
                model(images(seed))
                assert torch.equal(features["add"], model.first(images(seed)) + 1)
        finally:
            stop.set()
            thread.join()


def test_a_copy_of_the_model_is_another_model(model: Scaled) -> None:
    asked = [*NAMES, "add", "attend:attention", "first:grad_output"]
    with featx.capture(model, asked) as features:
        model(images(1)).sum().backward()
        expected = {name: features[name].clone() for name in asked}
        twin = copy.deepcopy(model)
        twin(images(2)).sum().backward()
        assert all(torch.equal(features[name], expected[name]) for name in asked)
        model(images(1))
        assert torch.equal(features["first"], expected["first"])
        with torch.no_grad(), featx.capture(twin, ["first"]) as of_twin:
            twin(images(2))
        assert torch.equal(of_twin["first"], twin.first(images(2)))
        assert torch.equal(features["first"], expected["first"])


@pytest.mark.parametrize("layers", [["first:attention"], ["add", "act", "first:attention"]])
def test_a_block_that_cannot_begin_leaves_no_hook(model: Scaled, layers: list[str]) -> None:
    with (
        pytest.raises(LayerError, match="cannot read the attention weights"),
        featx.capture(model, layers),
    ):
        pass
    assert num_hooks(model) == 0


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("frst", r"no layer 'frst' in this model\. Nearest: first\. Names are those of model"),
        ("logits", r"what the model returns has a dot before its name: '\.logits'\."),
        (nn.ReLU(), r"layers are given by their names, such as \['attend.out_proj'\]"),
        ([0], "layers are given by their names"),
        (None, "layers are given by their names"),
        ("attend.*", r"'attend\.\*': a pattern works in the option `layers` only\."),
        ("stages", r"Presets work in the option `layers` only; '' is what the model returns"),
    ],
)
def test_what_is_no_name_says_where_names_are(model: Scaled, layers: Any, message: str) -> None:
    with pytest.raises(LayerError, match=message), featx.capture(model, layers):
        pass


def test_a_layer_under_two_names_is_called_once(model: Scaled) -> None:
    with featx.capture(model, ["first", "first", "first:output"]) as features:
        model(images(0))
    assert torch.equal(features["first:output"], model.first(images(0)))
    assert features["first"] is features["first:output"]


def test_names_are_those_of_the_block_also_before_a_pass_and_from_a_generator(
    model: Scaled,
) -> None:
    names: Any = (name for name, _ in model.named_children() if name == "first")
    with featx.capture(model, names) as features:
        assert list(features) == ["first"]
        assert "first" in features
        assert "first:output" in features
        assert "frst" not in features


def test_what_is_no_module_says_so() -> None:
    not_a_module: Any = "resnet18"
    with (
        pytest.raises(ModelError, match=r"model is a str; expected a torch\.nn\.Module"),
        featx.capture(not_a_module, "first"),
    ):
        pass


def test_a_notebook_shows_what_is_captured(model: Scaled) -> None:
    with featx.capture(model, ["first", "act@1"]) as features:
        assert repr(features) == "<Captured 'first', 'act@1'>"


class Encoder(nn.Module):
    """People's models: `encode`, `forward_features`, and a forward around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.act = nn.Linear(3, 4), nn.ReLU(inplace=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act(self.enc(x) + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


def plain_tensors(model: Encoder, x: torch.Tensor) -> dict[str, torch.Tensor]:
    enc = torch.nn.functional.linear(x, model.enc.weight, model.enc.bias)
    act = (enc + 1).relu()
    norm = torch.nn.functional.layer_norm(act, (4,), model.norm.weight, model.norm.bias)
    return {"enc": enc, "enc:input": x, "act": act, "norm": norm}


@pytest.mark.parametrize("call", ["encode", "forward", "__call__"])
@pytest.mark.parametrize("grad", [True, False])
def test_any_call_of_the_model_is_a_pass(call: str, grad: bool) -> None:
    model = Encoder()
    outputs: list[weakref.ref[torch.Tensor]] = []
    asked = ["enc", "enc:input", "act", "norm"]
    with torch.set_grad_enabled(grad), featx.capture(model, asked) as features:
        for seed in range(4):
            x = images(seed)[0, :, :3]
            getattr(model, call)(x)
            for name, expected in plain_tensors(model, x).items():
                assert torch.equal(features[name], expected), name
            outputs += weak([features["norm"]])
            del expected
        assert [output() is not None for output in outputs] == [False] * 3 + [True]
        del features
    assert [output() for output in outputs] == [None] * 4


def test_a_call_has_a_number_inside_a_call_of_the_model_only() -> None:
    model, x = Encoder(), images(0)[0, :, :3]
    with featx.capture(model, ["enc@1", "enc@2", "enc"]) as features:
        for _ in range(2):
            model(x)
            assert torch.equal(features["enc@1"], features["enc"])
            with pytest.raises(LayerError, match=r"the layer 'enc@2' was not called"):
                features["enc@2"]
        for _ in range(2):
            model.encode(x + 1)
            assert torch.equal(features["enc"], plain_tensors(model, x + 1)["enc"])
            with pytest.raises(LayerError, match="Capture 'enc' without a number"):
                features["enc@1"]
        model(x)
        assert torch.equal(features["enc@1"], plain_tensors(model, x)["enc"])


def test_a_pass_that_was_interrupted_is_over(model: Scaled) -> None:
    with featx.capture(model, ["first", "act@1"]) as features:
        model(images(1))
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.zeros(2, 3, 5))
        model.first(images(2))
        assert torch.equal(features["first"], images(2) @ model.first.weight.T)
        with pytest.raises(LayerError, match="was not called"):
            features["act@1"]


def test_pickles_and_copies_made_inside_a_block_compute_and_capture_nothing(model: Scaled) -> None:
    x = images(1)
    expected = model(x)  # the capture of attention weights changes its last bits
    with featx.capture(model, ["first", "add", "attend:attention"]) as features:
        model(x)
        copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
        before = features["first"]
        for twin in copies:
            assert torch.equal(twin(x), expected)
            assert features["first"] is before


def test_operations_outside_a_call_of_the_model_belong_to_the_latest_call() -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1) + 2

    model = nn.Sequential(Block(), nn.Identity())
    with torch.no_grad(), featx.capture(model, ["0.add", "0.add_1"]) as features:
        for number in range(3):
            x = torch.full((2,), float(number))
            model[0](x)
            assert torch.equal(features["0.add"], x + 1)
            assert torch.equal(features["0.add_1"], x + 3)
        model(x)
        assert torch.equal(features["0.add_1"], x + 3)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_are_read_as_the_layer_returned_them() -> None:
    class Quantise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.quantize_per_tensor(x, 0.1, 7, torch.quint8)

    model = nn.Sequential(Quantise(), nn.ReLU(inplace=True))
    x = torch.linspace(-0.5, 2, 6).reshape(2, 3)
    with featx.capture(model, ["0", "1:input", "1"]) as features:
        model(x)
        expected = model[0](x)
    for layer in ("0", "1:input"):
        assert torch.equal(features[layer].int_repr(), expected.int_repr())
        assert features[layer].q_scale() == expected.q_scale()
    assert torch.equal(features["1"].dequantize(), expected.dequantize().clamp(min=0))
