"""Names, globs and presets: what is taken of tiny traces by hand, and of real backbones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from zoo import SequenceFirst

from featx.cli import table_rows
from featx.config import PRESETS, ReduceConfig, make_reduce, model_options
from featx.engine import Engine
from featx.errors import ConfigError, LayerError
from featx.layers import Selection, Trace, no_fast_path, select, trace_forward
from featx.models import Backbone, build_backbone

NONE = ReduceConfig()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, weights = self.mha(x, x, x, need_weights=True)
        return y, weights


class Odd(nn.Module):
    """All the odd layers in one model; (B, 3, 4, 4) -> (B, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())
        self.relu = nn.ReLU()
        self.attention = Attention()
        self.turn = SequenceFirst()
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.unused = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(x))
        tokens = self.relu(self.relu(x) + 1).flatten(2).transpose(1, 2)
        y, _ = self.attention(tokens)
        y = self.turn(y).transpose(0, 1)
        return self.fc(self.pool(y.transpose(1, 2)).flatten(1))


@functools.cache
def odd_trace() -> Trace:
    with no_fast_path:
        return trace_forward(Odd().eval(), torch.randn(2, 3, 4, 4))


@functools.cache
def traced(library: str, name: str) -> tuple[Backbone, Trace]:
    backbone = build_backbone(model_options(name=name, library=library, weights=None), seed=0)
    with Engine(backbone, torch.device("cpu"), "float32") as engine:
        return backbone, engine.trace(["embedding"])


def chosen(*requests: str, of: Trace | None = None) -> list[str]:
    return [point.name for point, _ in selection(*requests, of=of).chosen]


def selection(*requests: str, of: Trace | None = None) -> Selection:
    found = of or odd_trace()
    return select([(request, NONE) for request in requests], found, None, None)


def preset(library: str, name: str, request: str) -> Selection:
    backbone, found = traced(library, name)
    return select([(request, NONE)], found, backbone.classifier, backbone.stages)


def test_names_keep_the_order_of_the_requests_and_repeats_count_once() -> None:
    assert chosen("fc", "layer1", "fc", "layer1.0") == ["fc", "layer1", "layer1.0"]


def test_a_star_does_not_cross_dots_and_two_stars_do() -> None:
    assert chosen("layer*") == ["layer1", "layer2"]
    assert chosen("layer*.*") == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert chosen("layer**") == ["layer1.0", "layer1.1", "layer1", "layer2.0", "layer2.1", "layer2"]
    assert chosen("**.0") == ["layer1.0", "layer2.0"]
    assert chosen("layer?.1") == ["layer1.1", "layer2.1"]


def test_globs_need_no_names_of_wrappers() -> None:
    class DataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Odd()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    with no_fast_path:
        found = trace_forward(DataParallel().eval(), torch.randn(2, 3, 4, 4))
    assert chosen("layer*", "layer?.1:input", "ad*", of=found) == [
        *("layer1", "layer2", "layer1.1:input", "layer2.1:input", "add")
    ]
    assert chosen("module.layer*", of=found) == ["module.layer1", "module.layer2"]


REFUSED = [
    # A dot is a dot: a glob is no regular expression.
    ("layer1.0|fc*", "matches no layer"),
    ("layer.*", "matches no layer"),
    ("layre*", r"'layre\*' matches no layer.*crosses dots.*layer1"),
    ("unus*", "names only layers that are never called"),
    # A typo lists the nearest names and the presets.
    ("layer3", r"no layer 'layer3'.*Nearest: layer\d.*embedding, output, stages"),
    ("", "no layer ''"),
    ("layer1.7", r"no layer 'layer1\.7'.*Nearest: layer1\.\d"),
    ("fc@", "no layer 'fc@'"),
    ("fc[0]", r"no layer 'fc\[0\]'.*Nearest: fc"),
    # A repeated module lists its calls, and an ambiguous output or input its elements.
    ("relu", r"called 2 times.*relu@1 \(8, 4, 4\), relu@2 \(8, 4, 4\)"),
    ("relu:grad_output", r"relu@1:grad_output \(8, 4, 4\), relu@2:grad_output \("),
    ("relu_1", r"no layer 'relu_1': the call that torch\.fx names so is relu@2"),
    ("relu_2", r"no layer 'relu_2' in this model"),
    ("relu@9", "'relu@9': relu is called 2 times, counted from 1"),
    ("relu@0", "'relu@0': relu is called 2 times, counted from 1"),
    ("fc@2", "fc is called 1 time,"),
    ("attention", r"gives 2 tensors \(\[0\] \(2, 16, 8\), \[1\] \(2, 16, 16\)"),
    ("attention[2]", "attention gives 2 tensors"),
    ("attention.mha:input", r"takes \d tensors .*such as 'attention\.mha\[0\]:input'"),
    # What is never called is no typo.
    ("attention.mha.out_proj", "'attention.mha.out_proj' exists but is not called"),
    ("unused", "exists but is not called"),
    ("turn", r"turn has shape \(16, 2, 8\) for a batch of 2"),
    ("fc:grad", "one of output, input"),
    ("fc:input[0]", r"an element stands before the colon: 'fc\[0\]:input'"),
    ("embedding:input", "does not apply to it. Name a layer"),
    ("output:input", "preset output"),
]


@pytest.mark.parametrize(("request_", "message"), REFUSED)
def test_what_cannot_be_captured_is_refused(request_: str, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        chosen(request_)


@pytest.mark.parametrize("preset", ["all", "leaves"])
def test_a_preset_without_any_tensor_is_refused(preset: str) -> None:
    trace = trace_forward(nn.Sequential(nn.Conv2d(3, 4, 1)).eval(), torch.zeros(2, 3, 4, 4))
    with pytest.raises(LayerError, match=f"'{preset}:attention' means no tensor of this model"):
        selection(f"{preset}:attention", of=trace)


def test_calls_and_elements_are_told_apart() -> None:
    assert chosen("relu@2", "relu@1") == ["relu@2", "relu@1"]
    assert chosen("fc@1") == ["fc@1"]
    assert chosen("attention[0]", "attention[1]") == ["attention[0]", "attention[1]"]


def test_a_glob_tells_what_it_left_out() -> None:
    """`unused` matches and is never called; it must not vanish without a word."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    model.append(nn.ReLU())
    found = selection("?", of=trace_forward(model.eval(), torch.zeros(2, 3, 4, 4)))
    assert [point.name for point, _ in found.chosen] == ["0"]
    assert found.left_out == ["1 (never called)"]


def test_all_and_leaves_leave_out_what_has_no_rows_and_say_so() -> None:
    everything = selection("all")
    names = [point.name for point, _ in everything.chosen]
    assert names == [
        "layer1.0",
        "layer1.1",
        "layer1",
        "layer2.0",
        "layer2.1",
        "layer2",
        "relu@1",
        "relu@2",
        "attention.mha[0]",
        "attention.mha[1]",
        "attention[0]",
        "attention[1]",
        "pool",
        "fc",
    ]
    assert everything.left_out == ["turn (16, 2, 8) (the first dimension is not the batch)"]
    leaves = chosen("leaves")
    assert leaves == [
        "layer1.0",
        "layer1.1",
        "layer2.0",
        "layer2.1",
        "relu@1",
        "relu@2",
        "pool",
        "fc",
    ]


def test_every_capture_of_all_can_be_named_one_by_one() -> None:
    points = [point for point, _ in selection("all").chosen]
    for point in points:
        (found,) = selection(point.name).chosen
        again = found[0]
        assert (again.module, again.path) == (point.module, point.path)
        assert (again.call or 1) == (point.call or 1)


def test_an_element_with_the_name_of_a_module_has_another_name_under_all() -> None:
    """As in the backbones of torchvision's detection models."""

    class Body(nn.Sequential):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"0": super().forward(x), "1": x}

    trace = trace_forward(nn.Sequential(Body(nn.Flatten(), nn.Tanh())), torch.randn(2, 3, 8, 8))
    chosen = select([("all", ReduceConfig("none"))], trace, None, None).chosen
    assert [point.name for point, _ in chosen] == ["0.0", "0.1", "0@1.0", "0@1.1"]
    for point, reduce in chosen:
        assert select([(point.name, reduce)], trace, None, None).chosen[0][0].path == point.path


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (("fc", "none"), ("fc", "flatten"), "fc with reduce=none and with reduce=flatten"),
        (("layer*", "avg"), ("layer1", "max"), "layer1 with reduce=avg and with reduce=max"),
        (("embedding", "none"), ("embedding", "flatten"), "embedding with reduce=none and with"),
        (("fc", "grid", 2), ("fc", "grid", 3), "reduce=grid size=2 and with reduce=grid size=3"),
    ],
)
def test_one_layer_with_two_reductions_is_refused(first: Any, second: Any, text: str) -> None:
    requests = [
        (layer, make_reduce(name, **{"size": size[0]} if size else {}))
        for layer, name, *size in (first, second)
    ]
    with pytest.raises(ConfigError, match=text):
        select(requests, odd_trace(), None, None)


def test_presets_and_names_go_together() -> None:
    assert chosen("embedding", "layer1") == ["embedding", "layer1"]
    (point, reduce), _ = selection("embedding", "fc").chosen
    assert (point.module, point.capture, reduce.name) == ("fc", "input", "none")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_preset_also_with_a_module_of_that_name(name: str) -> None:
    """38 of timm's files call a module `stages`; it is reached by its call, and that is said."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    model.add_module(name, nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)))
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)])
    found = trace_forward(model.eval(), torch.zeros(2, 3, 8, 8))
    expected = {
        "embedding": ["embedding"],
        "output": ["output"],
        "stages": ["0", f"{name}@1"],
        "leaves": ["0", f"{name}.0", f"{name}.1", "2", "3", "4"],
        "all": ["0", f"{name}.0", f"{name}.1", f"{name}@1", "2", "3", "4"],
    }
    preset = selection(name, of=found)
    assert [point.name for point, _ in preset.chosen] == expected[name]
    assert preset.left_out == [
        f"the module {name!r} of this model: layers={name} is the preset, the module is {name}@1"
    ]
    for request in (f"{name}@1", f"{name[:-1]}?"):
        module = selection(request, of=found)
        ((point, _),) = module.chosen
        assert (point.name, point.module, point.capture) == (f"{name}@1", name, "output")
        assert module.left_out == []
    ((point, _),) = selection(f"{name}@1:input", of=found).chosen
    assert (point.module, point.capture) == (name, "input")
    assert f"{name}@1" in [row["name"] for row in table_rows(found, 4)]


def test_no_embedding_without_a_linear_layer_at_the_end() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    found = trace_forward(model, torch.zeros(2, 3, 4, 4))
    with pytest.raises(LayerError, match=r"ends in a linear layer; the last layer.*here is 1"):
        selection("embedding", of=found)


def test_stages_of_a_model_without_any() -> None:
    found = trace_forward(
        nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).eval(), torch.zeros(2, 3, 4, 4)
    )
    with pytest.raises(LayerError, match="found no feature maps and no transformer blocks"):
        selection("stages", of=found)


STAGES = {
    ("torchvision", "resnet18"): ["relu", "layer1", "layer2", "layer3", "layer4"],
    ("torchvision", "mobilenet_v2"): [f"features.{i}" for i in (1, 3, 6, 13, 18)],
    ("torchvision", "vit_b_16"): [f"encoder.layers.encoder_layer_{i}" for i in range(12)],
    ("torchvision", "swin_t"): [f"features.{i}" for i in (1, 3, 5, 7)],
    ("torchvision", "convnext_tiny"): [f"features.{i}" for i in (1, 3, 5, 7)],
    ("torchvision", "squeezenet1_1"): [f"features.{i}" for i in (1, 4, 7, 12)],
    ("timm", "resnet18"): ["act1", "layer1", "layer2", "layer3", "layer4"],
    ("timm", "vit_tiny_patch16_224"): [f"blocks.{i}" for i in range(12)],
    ("timm", "efficientnet_lite0"): [f"blocks.{i}" for i in (0, 1, 2, 4, 6)],
}


@pytest.mark.parametrize(("library", "name"), STAGES)
@pytest.mark.slow
def test_stages_of_real_backbones(library: str, name: str) -> None:
    assert [point.name for point, _ in preset(library, name, "stages").chosen] == STAGES[
        library, name
    ]


@pytest.mark.parametrize(("library", "name"), STAGES)
@pytest.mark.slow
def test_leaves_and_all_of_real_backbones(library: str, name: str) -> None:
    """Every called module is there or told to be left out; leaves are the childless ones."""
    backbone, found = traced(library, name)
    modules = dict(backbone.module.named_modules())
    everything, leaves = preset(library, name, "all"), preset(library, name, "leaves")
    got = {point.module for point, _ in everything.chosen}
    called = {call.module for call in found.calls if call.module}
    output = {entry.split(" ")[0].split("@")[0].split("[")[0] for entry in everything.left_out}
    assert got | output == called
    assert {point.module for point, _ in leaves.chosen} == {
        name for name in got if not list(modules[name].children())
    }
    names = [point.name for point, _ in everything.chosen]
    assert len(names) == len(set(names))


def test_an_input_is_named_for_its_kind_and_found_under_globs_and_presets() -> None:
    found = selection("fc:input", "layer*:input", "fc")
    assert [(point.name, point.module, point.capture) for point, _ in found.chosen] == [
        ("fc:input", "fc", "input"),
        ("layer1:input", "layer1", "input"),
        ("layer2:input", "layer2", "input"),
        ("fc", "fc", "output"),
    ]
    every = {point.name for point, _ in selection("all:input").chosen}
    assert {"layer1.0:input", "relu@1:input", "relu@2:input"} <= every
    assert "attention.mha[0]:input" in every


def test_several_inputs_are_told_apart() -> None:
    point = selection("attention.mha[1]:input").chosen[0][0]
    assert (point.name, point.path) == ("attention.mha[1]:input", (1,))


def test_output_is_what_the_model_returns() -> None:
    """The logits of a classifier; otherwise each tensor with a row per image."""

    def outputs(returned: object, name: str = "output") -> tuple[list[str], list[str]]:
        class Returns(nn.Module):
            def forward(self, x: torch.Tensor) -> object:
                return returned

        selection = select([(name, NONE)], trace_forward(Returns(), torch.ones(2, 3)), None, None)
        return [point.name for point, _ in selection.chosen], selection.left_out

    rows, other = torch.ones(2, 5), torch.ones(7)
    assert outputs(rows) == (["output"], [])
    assert outputs({"logits": rows, "hidden": rows}) == (["output"], ["output.hidden"])
    assert outputs((rows, [rows, other])) == (["output[0]", "output[1][0]"], ["output[1][1]"])
    with pytest.raises(LayerError, match="no row per image"):
        outputs(other)
    for name in ("output.hidden", "output.maps[1]"):
        assert outputs({"logits": rows, "hidden": rows, "maps": [other, rows]}, name) == (
            [name],
            [],
        )
    with pytest.raises(
        LayerError, match=r"output gives 2 tensors \(\[0\] \(2, 5\), \[1\] \(7,\)\)"
    ):
        outputs((rows, other), "output.logits")
    with pytest.raises(LayerError, match="no row per image"):
        outputs((rows, other), "output[1]")
    with pytest.raises(LayerError, match="output gives one tensor"):
        outputs(rows, "output[0]")
