"""What people type, as it arrives in the config: text stays text, paths are paths."""

from __future__ import annotations

import re
import shlex
from itertools import cycle
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from featx.base import shipped_folder
from featx.cli import read_command_line, register_with_hydra
from featx.config import (
    Config,
    Kind,
    from_composed,
    from_keywords,
    from_saved,
    option_tree,
    saved_yaml,
)
from featx.errors import ConfigError
from featx.jobs import JOBS, check


def composed(*argv: str) -> Any:
    """The node of a command, without running it."""
    line = read_command_line(argv)
    register_with_hydra(JOBS, line.config_dirs)
    name, overrides = "config", list(line.arguments)
    if "--config-name" in overrides:
        at = overrides.index("--config-name")
        name = overrides[at + 1]
        del overrides[at : at + 2]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(shipped_folder("conf")), version_base="1.3"):
        return hydra.compose(name, overrides)


def typed(*argv: str) -> Config:
    """The config of a command."""
    config = from_composed(composed(*argv))
    check(config, read_command_line(argv).given)
    return config


ODD = [
    *("2024_01", "1e5", "1.10", "007", "0x10", "0b1", "1:30", "1_000", ".5", "1.", "-1", "+1"),
    *("yes", "no", "on", "off", "true", "False", "Null", "NULL", "~", "None", "nan", "inf", "-"),
    *("a b", "a=b", "a,b", "a#b", "[x]", "[x", "x]", "{a: 1}", "{a", "(a)", "it's", 'say "x"'),
    *("'", '"', "é", "日本", "a\\b", "a\\", "a:b", "a;b", "a|b", "a&b", "$HOME", "%s", "a\tb"),
    *("!x", "@x", "`x`", "*", "?", "a\nb", "/a b/c=d,#[x]'é", "x'", "a'b'c", "'a'b", "\\", "\\\\"),
]


@pytest.mark.parametrize(
    ("root", "out"),
    [("2024_01", "1e5"), ("~", "a=b"), ("-", "a,b"), ("a\nb", "/a b/c=d,#[x]'é"), ("\\", "'a'b")],
)
def test_a_path_is_a_path(root: str, out: str) -> None:
    found = typed("data=folder", f"data.root={root}", f"out={out}")
    assert (found.data.root, found.out) == (root, out)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


TEXT_OPTIONS = [name for name, kind in option_tree().items() if kind.kind is Kind.TEXT]


@pytest.mark.slow
# Many texts in one command: composing it is what takes the time.
@given(st.lists(TEXT, min_size=6, max_size=6))
@example(["2024_01"])
@settings(max_examples=12, deadline=None)
def test_every_text_that_a_shell_passes_arrives(texts: list[str]) -> None:
    expected = {}
    for name, text in zip(TEXT_OPTIONS, texts, strict=False):
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        if not (text == "null" or "${" in text or "???" in text or quoted):
            expected[name] = text
    node = composed(*(f"{name}={text}" for name, text in expected.items()))
    assert {name: OmegaConf.select(node, name) for name in expected} == expected


@pytest.mark.parametrize("first", [0, 20, 40])
def test_every_option_that_is_text_keeps_it(first: int) -> None:
    """Before any check of its own: by the type of the field, for options that come later too."""
    texts = dict(zip(TEXT_OPTIONS, cycle(ODD[first:] + ODD[:first]), strict=False))
    node = composed(*(f"{name}={text}" for name, text in texts.items()))
    assert {name: OmegaConf.select(node, name) for name in texts} == texts
    assert set(texts.values()) == {*ODD}


def test_null_is_one_of_the_values_of_a_sweep() -> None:
    texts = ["model.weights=null,a b.pt", "layers=[a],null", "data.columns=[a],null"]
    arguments = read_command_line(["-m", *texts]).arguments
    assert arguments == [
        "-m", 'model.weights=null,"a b.pt"', 'layers=["a"],null', 'data.columns=["a"],null',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mapping", "same"),
    [
        ("reduce={name: grid, rows: 64, columns: 48}",
         ["reduce=grid", "reduce.rows=64", "reduce.columns=48"]),
        ("model={name: resnet18,weights: null}", ["model=resnet18", "model.weights=null"]),
        ("model={library: custom, factory: 'a:b', args: {x: 1}}",
         ["model=custom", "model.factory=a:b", "model.args={x: 1}"]),
        ("data={root: some/photos, limit: 5}", ["data=some/photos", "data.limit=5"]),
        ("data={root: 'a, b.csv'}", ["data=table", "data.root=a, b.csv"]),
        ("executor={name: slurm, sbatch: {mem: 32G}}",
         ["executor=slurm", "executor.sbatch={mem: 32G}"]),
    ],
)  # fmt: skip
def test_a_group_may_be_a_mapping_as_in_python(mapping: str, same: list[str]) -> None:
    assert typed(mapping) == typed(*same)


@pytest.mark.parametrize("text", ["{grid}", "{}", "{name: grid, 4}"])
def test_an_entry_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"reduce: expected name: value in \{"):
        typed(f"reduce={text}")


@pytest.mark.parametrize("kind", ["tsv", "parquet"])
def test_the_kind_of_a_table_is_understood(kind: str) -> None:
    assert typed(f"data={kind}", "data.root=t.csv").data.name == "table"


def test_null_is_null_and_quotes_make_it_text() -> None:
    found = typed("model.weights=null", "model=resnet18", 'out="null"', "data.limit=None")
    assert (found.model.weights, found.out, found.data.limit) == (None, "null", None)
    shards = 'data.root="train-{000..012}.tar"'
    found = typed("model.weights=None", "model=resnet18", "out='a b'", "data=folder", shards)
    assert (found.model.weights, found.out) == (None, "a b")
    assert found.data.root == "train-{000..012}.tar"
    with pytest.raises(ConfigError, match=r"out=null: expected a value; leave out out"):
        typed("out=null")


def test_an_interpolation_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOTOS", "/photos")
    found = typed("data=folder", "data.root=${oc.env:PHOTOS}", "out=runs/${data.name}")
    assert (found.data.root, found.out) == ("/photos", "runs/folder")


@pytest.mark.parametrize(
    ("argument", "option", "value"),
    [
        ("layers=[1.10,1e5,007,layer4]", "layers", ["1.10", "1e5", "007", "layer4"]),
        ("layers=[layer1.0.add, 'blocks.[0-9].*',\"a,b\"]", "layers",
         ["layer1.0.add", "blocks.[0-9].*", "a,b"]),
        ("layers=[]", "layers", []),
        ("layers=[a,b,]", "layers", ["a", "b"]),
        ("layers=embedding", "layers", "embedding"),
        ("layers={layer4: avg, avgpool: flatten}", "layers",
         {"layer4": "avg", "avgpool": "flatten"}),
        ("layers={layer4:avg}", "layers", {"layer4": "avg"}),
        ("layers={layer4:input: avg}", "layers", {"layer4:input": "avg"}),
        ('layers={"blocks.*.mlp": {name: grid, size: 4}}', "layers",
         {"blocks.*.mlp": {"name": "grid", "size": 4}}),
        ("layers={fc: {name: pca, stats: 2024_01, k: 3}}", "layers",
         {"fc": {"name": "pca", "stats": "2024_01", "k": 3}}),
        ("layers=1.10", "layers", "1.10"),
        ("layers=null", "layers", None),
        ("model.args={pause_s:0.5}", "model.args", {"pause_s": 0.5}),
        ("model.args={a: {b: 1}, c: x}", "model.args", {"a": {"b": 1}, "c": "x"}),
        ("model.args.a.b=1", "model.args", {"a": {"b": 1}}),
    ],
)  # fmt: skip
def test_lists_and_mappings(argument: str, option: str, value: object) -> None:
    found = OmegaConf.select(composed(argument), option)
    found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    assert found == value
    assert type(found) is type(value)


def test_values_are_of_the_type_of_their_option() -> None:
    node = composed(
        "data.columns=[1,02,größe]",
        "probe.shots=[1,5]",
        "max_failures=1.0",
        "model.transform.mean=[0.5,0.5,0.5]",
    )
    assert node.data.columns == ["1", "02", "größe"]
    assert node.probe.shots == [1, 5]
    assert (type(node.max_failures), node.max_failures) == (float, 1.0)
    assert node.model.transform.mean == [0.5, 0.5, 0.5]


def test_numbers_as_keys_of_layers_are_names() -> None:
    layers = typed('layers={"4": null, 10: {name: grid, size: 4}}').layers
    assert layers == {"4": None, "10": {"name": "grid", "size": 4}}


@pytest.mark.parametrize("path", ["./photos", "/abs/path", "~/x", "photos/", "a b/c,d", "photos"])
def test_data_may_be_a_path(path: str, in_tmp_path: None) -> None:
    Path("photos").mkdir()
    found = typed(f"data={path}")
    assert (found.data.name, found.data.root) == ("folder", path)


def test_a_folder_named_as_a_source_is_not_meant(in_tmp_path: None) -> None:
    Path("sample").mkdir()
    assert typed("data=sample").data.name == "sample"


def test_the_last_of_several_counts() -> None:
    found = typed("out=a", "data=sample", "out=b", "data=./photos", "data=./other")
    assert (found.out, found.data.root) == ("b", "./other")


def test_the_signs_of_hydra_may_stand_before_any_option() -> None:
    found = typed("+seed=1", "++model=resnet18", "+reduce=gem", "+reduce.p=2.0", "+out=a")
    assert (found.seed, found.model.name, found.reduce, found.out) == (
        *(1, "resnet18", typed("reduce=gem", "reduce.p=2.0").reduce, "a"),
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["model=resnet18,resnet34"],
            "a run takes one. With -m in front of the options, each is a run",
        ),
        (
            ["batch_size=8,16"],
            "a run takes one value. With -m in front of the options, each is",
        ),
        (["precision=fp32,bf16"], "a run takes one value. With -m in front of the options"),
        (["layers=layer3,layer4"], r"'layers=\[layer3,layer4\]'"),
        (["data.columns=patient"], r"'data.columns=\[patient\]'"),
        (["layers={1.10: avg}"], r"1\.10 in a mapping is read as a number"),
        (["layers={layer4}"], "expected name: value"),
        (["--model", "x"], "given as key=value, without dashes: model=VALUE"),
        (["--model=x"], "without dashes: model=x"),
        (["-seed=3"], "without dashes: seed=3"),
        (["--batch-size=8"], "without dashes: batch_size=8"),
        (["--multrun"], r"unknown flag --multrun\. Nearest: --multirun"),
        (["resnet50"], "For a model: model=resnet50"),
        (["help"], "For help: --help"),
        (["some/photos"], "For a folder of images: data=some/photos"),
        (["\u2018layers=[a]\u2019"], "\u2018 is no quote of the shell"),
        (["model"], "model=VALUE"),
        (["=3"], "name of an option stands before"),
        (["model="], "model=: expected a name"),
        (["data=./a", "data.root=b"], "data.root is given too"),
        (["seed=null"], "seed=null: expected a value"),
        (["--config-dir", "/no/such"], "is no folder"),
        (["--config-name", "config"], "--config-name config: featx has a file of this name"),
        (["-cn=config.yaml"], "Copy yours under another name"),
        (["out="], "out is empty"),
        (["store="], "store is empty"),
        (["data=folder", "data.root="], "data=folder needs data.root"),
        (["seed=100000000000000000000000"], "whole number from 0 to 4294967295"),
        (["max_failures=1.5"], "expected a share with a point"),
        (["max_failures=many"], "expected a share .*, or a whole number"),
        (["model.args={pause_s:0.5}"], r"model\.args has an effect with model\.library=custom or"),
        (["dtype=fp16"], "Nearest: float16"),
        (["data.crops=99999999"], "a whole number from 1 to 1000000, or null"),
        (["executor.workers=99999999"], "a whole number from 1 to 100000, or null"),
        (["model=resnet18", "model.input_size=[99999,99999]"], r"\(16384 at most\), or null"),
        (["data.workers=99999999"], "data.workers=99999999: .* whole number from 1 to 1024"),
        (["job=probe", "store=a", "probe.bootstrap=9999999"], "100 to 1000000 resamples"),
        (["model=resnet18", "model.transform.resize=99999"], r"\(16384 at most\), or null"),
        (["probe=linear"], "probe is a group of options. Give one .* probe.method=VALUE"),
        (["model.window=[64,64]"], r"model.window=\[64,64\]: model.window is a group of options"),
    ],
)
def test_mistakes_say_what_to_type(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        typed(*argv)


@pytest.mark.parametrize("argv", [["probe", "store=a"], ["--probe"]])
def test_a_job_without_its_key_says_how_it_is_given(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="For the job: job=probe"):
        read_command_line(argv, {"probe"})


def test_a_path_that_the_shell_has_cut_is_answered_with_quotes(in_tmp_path: None) -> None:
    for words in (["data=./my", "new", "photos"], ["data=./it's", "a store"]):
        whole = " ".join(words)
        Path(whole.removeprefix("data=")).mkdir()
        with pytest.raises(ConfigError) as error:
            read_command_line([*words, "out=a"])
        assert shlex.split(str(error.value).partition("in quotes: ")[2]) == [whole]
    with pytest.raises(ConfigError, match=r"folder of images: 'data=it'\"'\"'s a store'"):
        read_command_line(["it's a store"])
    with pytest.raises(ConfigError, match="For a model: model=old"):
        read_command_line(["data=./my", "old", "photos", "out=a"])


@pytest.mark.parametrize(
    "words",
    [
        ["layers=[layer3,", "layer4]"],
        ["reduce={name:", "grid,", "rows:", "4}", "seed=1"],
        ["layers={layer4:", "{name:", "grid,", "size:", "2}}"],
    ],
)
def test_a_list_that_the_shell_has_cut_is_shown_in_quotes(words: list[str]) -> None:
    whole = " ".join(word for word in words if word != "seed=1")
    with pytest.raises(ConfigError, match=re.escape(f"Put the option in quotes: '{whole}'")):
        read_command_line(["model=resnet18", *words])


def test_a_store_without_its_key_says_how_it_is_given(in_tmp_path: None) -> None:
    Path("runs/p").mkdir(parents=True)
    Path("runs/p/featx.json").touch()
    with pytest.raises(ConfigError, match="For a store: store=runs/p"):
        read_command_line(["job=status", "runs/p"])


def test_a_multirun_sweeps_also_over_text() -> None:
    line = read_command_line(["-m", "model=resnet18,resnet34", "out=2024_01,1e5", "seed=range(3)"])
    assert line.arguments == [
        "-m", 'model="resnet18","resnet34"', 'out="2024_01","1e5"', "seed=range(3)",
    ]  # fmt: skip
    line = read_command_line(["-m", "layers=[a,b],[c]", "data=./x,./y", "out=choice(a,b)"])
    assert line.arguments[1:] == [
        'layers=["a","b"],["c"]', "data=folder", 'data.root="./x","./y"', "out=choice(a,b)",
    ]  # fmt: skip


# Files


@pytest.mark.slow
def test_a_file_of_options_reads_as_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "model: resnet18\n"
        "data: ./photos\n"
        "out: 2024_01  # YAML takes it for a number\n"
        "layers: [1.10, layer4]\n"
        "reduce: {name: gem, p: 4}\n"
        "seed: 3\n"
        "store: null\n"
    )
    argv = ("--config-dir", str(tmp_path), "--config-name", "my")
    found = typed(*argv)
    assert found.model.name == "resnet18"
    assert (found.data.name, found.data.root) == ("folder", "./photos")
    assert found.out == "2024_01"
    assert found.layers == ["1.10", "layer4"]
    assert (found.reduce.name, found.reduce.p) == ("gem", 4)
    assert (found.seed, found.store) == (3, None)
    assert typed(*argv, "model=resnet34", "seed=4").model.name == "resnet34"
    (tmp_path / "my.yaml").write_text("model: {name: resnet18, weights: null}\n")
    found = typed(*argv, "model=resnet34")
    assert (found.model.name, found.model.weights) == ("resnet34", None)


def test_files_with_a_list_of_defaults_and_groups_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: resnet18\nweights: 2024_01\n")
    (tmp_path / "my.yaml").write_text(
        "defaults:\n  - config\n  - override model: mine\n  - _self_\n"
        "data:\n  name: folder\n  root: 1e5\n  columns: null\n"
        "layers:\n  1.10: avg\n  layer4: {name: grid, size: 2}\n"
    )
    argv = ("--config-dir", str(tmp_path))
    found = typed(*argv, "--config-name", "my")
    assert (found.model.name, found.model.weights) == ("resnet18", "2024_01")
    assert found.data.root == "1e5"
    assert list(found.layers) == ["1.10", "layer4"]
    assert typed(*argv, "model=mine").model.weights == "2024_01"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.weights: null\n", "written as weights below model"),
        ("out: [a\n", "is no YAML"),
        ("out: a\nout: b\n", "is no YAML|duplicate"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        typed("--config-dir", str(tmp_path), "--config-name", "my")


# Python, and the config that a store keeps


def test_python_takes_paths_and_refuses_numbers_for_text() -> None:
    def config(**keys: Any) -> Config:
        return from_composed(from_keywords(keys))

    found = config(out=Path("2024_01"), data={"name": "folder", "root": Path("1e5")})
    assert (found.out, found.data.root) == ("2024_01", "1e5")
    assert config(out="1e5", data="2024_01").data.root == "2024_01"
    for keys in ({"out": 202401}, {"out": 1e5}, {"data": {"name": "folder", "root": 1}}):
        with pytest.raises(ConfigError, match=r"expected text, and .* is a number"):
            config(**keys)
    with pytest.raises(ConfigError, match=r"data\.columns=\[1\]: expected text"):
        config(data={"name": "table", "root": "x.csv", "columns": [1]})


PRINTED = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1)


@given(PRINTED, PRINTED)
@settings(max_examples=25, deadline=None)
def test_what_a_store_keeps_reads_back(root: str, out: str) -> None:
    if any("${" in text or text == "???" or "://" in text for text in (root, out)):
        return
    node = from_keywords({"data": {"name": "folder", "root": root}, "out": out})
    found = from_saved(saved_yaml(node))
    assert (found.data.root, found.out) == (root, out)
