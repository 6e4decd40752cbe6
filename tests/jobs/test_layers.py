"""job=layers: the tables, the JSON, the watch, and which image they are of."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from tiny_model import MODEL, write_image
from torch import nn
from zoo import SequenceFirst

from featx import jobs
from featx.cli import table_rows
from featx.config import ReduceConfig, from_composed, from_keywords
from featx.errors import ConfigError, DataError, LayerError, MissingExtraError, ModelError
from featx.layers import select, trace_forward

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def odd(fail: str = "") -> nn.Module:
    """A factory: attention with three inputs, a module called twice, one never, a tuple."""
    return Odd(fail)


class Odd(nn.Module):
    def __init__(self, fail: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 8, stride=8)
        self.relu = nn.ReLU(inplace=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.aside = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.first, self.swap, self.head = nn.Identity(), SequenceFirst(), nn.Linear(8, 4)
        self.fail = fail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.relu(self.conv(x))).flatten(2).transpose(1, 2)
        if self.fail == "nan":
            x = self.first(x * math.nan)
        x = self.attention(x, x, x)[0]
        if self.fail == "shape":
            x = x[..., :3]
        return self.head(self.swap(x).mean(0))


ODD = {**MODEL, "name": "odd", "factory": "test_layers:odd"}

Layers = Callable[..., str]


@pytest.fixture
def layers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Layers:
    """What the job prints on stdout."""
    monkeypatch.setattr("featx.layers.profiling.MAX_RUNS", 3)

    def run(show: str | None = None, as_json: bool = False, **keys: Any) -> str:
        all_layers = None if as_json or show == "watch" else ["**"]
        node = from_keywords({"model": MODEL, "data": "sample", "layers": all_layers, **keys})
        node["job"].update(name="layers", show=show, json=as_json)
        config = from_composed(node)
        jobs.check(config)
        assert jobs.run(config, "") == 0
        return capsys.readouterr().out

    return run


def columns(text: str) -> dict[str, list[str]]:
    """Name of a layer -> the words of its line in a table."""
    lines = text.split("\n\n")[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("layer")) + 1
    return {line.split()[0]: line.split()[1:] for line in lines[start:]}


def unwrapped(text: str) -> str:
    """The text with every run of spaces and line ends as one space."""
    return " ".join(text.split())


def test_shapes_by_hand(layers: Layers) -> None:
    rows = columns(layers())
    assert rows["conv"] == ["Conv2d", "8x4x4", "256", "B", "1,544", "0.049"]
    assert rows["head"] == ["Linear", "4", "8", "B", "28", "0"]
    rows = columns(layers(model=ODD))
    assert rows["attention[0]"][:2] == ["MultiheadAttention", "16x8"]
    assert rows["relu@1"] == rows["relu@2"]
    assert rows["swap"][:3] == ["SequenceFirst", "2x8", "*"]
    rows = columns(layers("all", model=ODD))
    assert rows["attention[0]"][2:4] == ["16x8", "+2"]


def nested() -> nn.Module:
    """A factory: a stem, a trunk of two stages with most of the operations, and a head."""
    stem = nn.Conv2d(3, 4, 1, stride=8)
    stages = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(2)))
    return Nested(stem, nn.Sequential(stages, nn.Conv2d(4, 4, 7, padding=3)), nn.Linear(4, 2))


class Nested(nn.Module):
    def __init__(self, stem: nn.Module, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.stem, self.trunk, self.head = stem, trunk, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(torch.relu(self.stem(x))).mean((2, 3)))


NESTED = {**MODEL, "name": "nested", "factory": "test_layers:nested"}


def test_the_top_level_is_listed_and_more_on_request(layers: Layers) -> None:
    """The trunk does most of the work, so what is inside it stands for it."""
    top = ["stem", "trunk.0", "trunk.1", "head"]
    text = layers(model=NESTED, layers=None)
    assert [*columns(text)] == top
    assert "4 of 11 layers and operations\nmore       'layers=[**]' for all" in text
    assert "'layers=[trunk.0.**]' for what is inside trunk.0" in text
    assert "the input of head; the default of layers" in text
    assert "'layers={trunk.0: avg}': 8 B an image instead of 128 B" in text
    everything = columns(layers(model=NESTED))
    assert {*everything} == {*top, "trunk", "relu", "mean"} | {
        f"trunk.0.{i}{inner}" for i in range(2) for inner in ("", ".0")
    }
    assert len(json.loads(layers(as_json=True, model=NESTED))) == len(everything)


@pytest.mark.slow
def test_named_layers_are_listed(layers: Layers) -> None:
    assert [*columns(layers(model=NESTED, layers=["trunk.0.**", "relu"]))] == [
        "relu", "trunk.0.0.0", "trunk.0.0", "trunk.0.1.0", "trunk.0.1",
    ]  # fmt: skip
    # A run takes one call of a module; the list shows each.
    assert {"relu@1", "relu@2"} <= {*columns(layers(model=ODD, layers=["*"]))}
    assert [*columns(layers(model=ODD, layers=["relu", "attention"]))][:2] == ["relu@1", "relu@2"]
    with pytest.raises(LayerError, match=r"no layer 'stam'.* stem"):
        layers(model=NESTED, layers=["stam"])
    rows = json.loads(layers(as_json=True, model=NESTED, layers=["stem:input"]))
    assert [row["name"] for row in rows] == ["stem:input"]
    assert [*columns(layers(model=NESTED, layers="embedding"))] == ["head:input"]


def test_what_is_not_called_is_told_once(layers: Layers) -> None:
    text = layers(model=ODD)
    assert "not called  so not to be captured: aside, attention.out_proj, first\n" in text
    assert "*           the batch is not in front of this tensor" in text
    assert "cannot be captured" not in layers()


def test_values_are_of_the_first_image(layers: Layers, tmp_path: Path) -> None:
    """White and black by hand: a white image is (1 - mean) / std after normalisation."""
    from PIL import Image

    (tmp_path / "p").mkdir()
    Image.new("RGB", (40, 40), "white").save(tmp_path / "p" / "a.png")
    Image.new("RGB", (40, 40), "black").save(tmp_path / "p" / "b.png")
    rows = json.loads(layers(as_json=True, data=str(tmp_path / "p"), capture="input"))
    given = next(row for row in rows if row["name"] == "conv:input")
    assert given["min"] == pytest.approx((1 - 0.485) / 0.229, rel=1e-5)
    assert given["max"] == pytest.approx((1 - 0.406) / 0.225, rel=1e-5)
    assert given["zeros"] == 0
    text = layers("values", data=str(tmp_path / "p"))
    assert f"a.png of {tmp_path}/p, as 1x3x32x32" in unwrapped(text)
    assert columns(text)["conv"][0] == "float32"


def test_an_image_that_cannot_be_read_is_passed_over(layers: Layers, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"none of the first 1 image of .*/p can be read"):
        layers(data=str(tmp_path / "p"))
    write_image(tmp_path / "p" / "b.png", 0)
    assert "image      b.png of" in layers(data=str(tmp_path / "p"))


def test_without_the_default_data_the_sample_is_taken_and_reported(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "conformal_clip_data", None)
    assert "image      checks/TURNED.JPG of data=sample (data=textiles is not" in layers(
        data="textiles"
    )
    with pytest.raises(MissingExtraError, match="data=textiles comes with the extra demo"):
        layers(data={"name": "textiles", "limit": 3})


def test_costs_are_of_the_batch_that_is_asked_for(layers: Layers) -> None:
    one, four = (json.loads(layers(as_json=True, batch_size=size)) for size in ("auto", 4))
    assert one[0]["output_bytes"] == 4 * 8 * 4 * 4
    assert [row["mean"] for row in four] == [pytest.approx(r["mean"], rel=1e-4) for r in one]
    modules = [row for row in one if row["ms"] is not None]  # operations are not timed
    more = [row["output_bytes"] for row in four if row["ms"] is not None]
    assert more == [4 * row["output_bytes"] for row in modules]
    assert all(row["ms"] >= row["own_ms"] > 0 for row in modules)
    assert one[0]["added_bytes"] is one[0]["peak_bytes"] is None  # what a CPU cannot tell
    text = layers("cost", batch_size=4)
    assert "as 4x3x32x32" in text
    assert "memory" not in text.split("\n\n")[1]
    assert "measured on CUDA only" in unwrapped(text)


@pytest.mark.parametrize(
    ("precision", "dtype", "said"),
    [
        ("auto", "float32", "fp32 (precision=auto stays fp32 here)"),
        ("bf16", "bfloat16", "bf16 on cpu"),
        ("fp32", "float32", "fp32 on cpu"),
    ],
)
def test_the_dtype_under_autocast(layers: Layers, precision: str, dtype: str, said: str) -> None:
    text = layers("values", precision=precision)
    assert columns(text)["conv"][0] == dtype
    assert said in text


def test_the_first_layer_that_is_not_finite_is_named(layers: Layers) -> None:
    assert "finite" not in layers()
    assert "every value of every layer is finite on this image" in layers("values")
    model = {**ODD, "args": {"fail": "nan"}}
    text = layers("values", model=model)
    assert (
        "first non-finite: first, 128 of 128 values; its input is not finite already, and no "
        "layer gave that" in unwrapped(text)
    )
    assert columns(text)["head"] == ["float32", "-", "-", "-", "0.0%", "4"]
    assert columns(text)["relu@2"][-1] == "0"


class Pair(nn.Module):
    """A model that returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 8, stride=8), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        vector = self.conv(x).mean((2, 3))
        return {"logits": self.head(vector), "vector": vector}


@pytest.mark.parametrize(
    ("factory", "requests", "names"),
    [
        ("zoo:TwoStageConvNet", ["conv@1", "output"], ["conv", "output"]),
        ("test_layers:Pair", ["output", "head@1:input"], ["head:input", "output.logits"]),
        ("test_layers:Pair", ["output.vector"], ["output.vector"]),
    ],
)
def test_every_name_that_a_run_takes_has_a_row(
    layers: Layers, factory: str, requests: list[str], names: list[str]
) -> None:
    text = layers(model={**MODEL, "factory": factory}, layers=requests)
    assert list(columns(text)) == names
    assert "layers=[output." not in text  # a run takes `output`


def test_names_are_what_to_write_in_layers() -> None:
    """Each row whose batch is in front, and each name under inputs, is accepted by `select`."""
    traced = trace_forward(odd().eval(), torch.randn(2, 3, 32, 32))
    rows = table_rows(traced, 2, ("output", "input", "grad_output"))
    names = [row["name"] for row in rows if row["batch_in_front"]]
    assert len(names) == len(set(names))
    assert {"relu@2:input", "attention[1]:input", "attention[0]", "head:grad_output"} <= set(names)
    taken = {name for row in rows for name in row["inputs"]}
    for name in {*names, *(name for name in taken if name != "head:input")}:
        ((point, _),) = select([(name, ReduceConfig())], traced, None, None).chosen
        assert point.name == name
    assert all(row["ms"] is None and row["mean"] is None for row in rows)  # nothing was measured


def test_json_has_every_column_for_every_row(layers: Layers) -> None:
    rows = json.loads(layers(as_json=True, model=ODD, capture=["output", "grad_input"]))
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    by_name = {row["name"]: row for row in rows}
    assert by_name["attention[0]"]["inputs"] == {f"attention[{i}]:input": [16, 8] for i in range(3)}
    assert by_name["head:grad_input"]["ms"] == by_name["head"]["ms"]
    assert by_name["head:grad_input"]["mean"] is None  # what a gradient holds was not measured


def test_the_forward_log_ends_at_the_layer_that_fails(
    layers: Layers, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = layers("watch").splitlines()
    names = [line.split()[0] for line in lines[-5:]]
    assert names == ["conv", "deep", "pool", "head", "(the"]
    model = {**ODD, "args": {"fail": "shape"}}
    with pytest.raises(ModelError, match=r"failed in head \(Linear\)"):
        layers("watch", model=model)
    last = [line.split()[0] for line in capsys.readouterr().out.splitlines()[-6:]]
    assert last == ["conv", "relu", "relu@2", "attention", "swap", "head"]
    with pytest.raises(ModelError, match=r"RuntimeError: .* job\.show=watch prints every call"):
        layers(model=model)


def test_keys_that_would_have_no_effect(layers: Layers) -> None:
    with pytest.raises(ConfigError, match=r"job\.show=cost has no effect with job\.json=true"):
        layers("cost", as_json=True)
    with pytest.raises(ConfigError, match=r"job\.show=costs: expected one of shapes, cost"):
        layers("costs")
    node = from_keywords({"model": MODEL})
    node["job"]["show"] = "cost"
    with pytest.raises(
        ConfigError, match=r"job\.show has an effect with job=layers, job=models and job=probe"
    ):
        jobs.check(from_composed(node))
    with pytest.raises(ConfigError, match=r"job\.show=local: job=layers has shapes, cost, values,"):
        layers("local")
    with pytest.raises(ConfigError, match=r"layers has no effect with job\.show=watch"):
        layers("watch", layers=["conv"])


def test_a_reader_may_leave_early() -> None:
    """`python -m featx job=layers | head`"""
    code = """
        from featx.base import own_process, print_result

        own_process()
        print_result("read")
        input()
        print_result(100_000 * "x")
        print_result("and more")
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=REPOSITORY, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "read\n"
        process.stdout.close()
        process.stdout = None
        assert process.communicate("\n", timeout=60)[1] == ""
    assert process.returncode == 0
