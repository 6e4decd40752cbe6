"""Keys, defaults and checks, and the config that a store keeps, without a model."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from featx import jobs
from featx.config import (
    Config,
    DataConfig,
    ReduceConfig,
    described_options,
    from_composed,
    from_keywords,
    from_saved,
    given_keywords,
    known_keys,
    layer_requests,
    make_reduce,
    model_options,
    saved_yaml,
)
from featx.errors import ConfigError, FeatxError
from featx.export.faiss import FaissOptions
from featx.models.libraries.custom import CustomOptions
from featx.sources import FolderOptions


def config(**keys: object) -> Config:
    return from_composed(from_keywords(keys))


def test_short_forms_from_python() -> None:
    made = config(model="resnet50", data="photos/", reduce="avg", out=Path("there"))
    assert made.model.name == "resnet50"
    assert (made.data.name, made.data.root) == ("folder", "photos/")
    assert made.reduce == ReduceConfig("avg")
    assert made.out == "there"
    assert config(data="textiles").data.name == "textiles"
    assert config(model={"name": "resnet18", "weights": None}).model.weights is None


def test_the_default_store_is_named_for_data_and_model() -> None:
    assert config(model="resnet50").out == "runs/textiles/resnet50"


@pytest.mark.parametrize("job", ["export", "neighbors", "report", "predict"])
def test_a_job_that_reads_a_store_writes_where_it_is_told(job: str, tmp_path: Path) -> None:
    """Also where an extraction would write by default."""
    default = "runs/textiles/efficientnet_lite0"
    given = config(store=tmp_path, out=default)
    assert not given.has_default_out
    assert given.output_folder(tmp_path, job) == Path(default).absolute()
    not_given = config(store=tmp_path)
    assert not_given.has_default_out
    assert not_given.output_folder(tmp_path, job) == tmp_path / job


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("embedding", [("embedding", "none")]),
        (["layer4", "avgpool"], [("layer4", "none"), ("avgpool", "none")]),
        ({"layer4": "avg", "avgpool": "flatten"}, [("layer4", "avg"), ("avgpool", "flatten")]),
        ({"layer4": {"name": "grid", "size": 4}}, [("layer4", "grid")]),
    ],
)
def test_layers_takes_three_forms(layers: object, expected: list[tuple[str, str]]) -> None:
    found = [(name, reduce.name) for name, reduce in layer_requests(config(layers=layers))]
    assert found == expected


def test_reduction_parameters_have_defaults_and_are_checked() -> None:
    assert make_reduce("gem").args == {"p": 3.0}
    assert make_reduce("gem", p=4).args == {"p": 4}
    assert make_reduce("grid").args == {"size": 2}
    assert ReduceConfig("avg").args == {}
    with pytest.raises(ConfigError, match=r"reduce\.p=-1"):
        make_reduce("gem", p=-1)


def test_options_of_a_reduction_are_made_by_its_name() -> None:
    """ReduceConfig alone would be gem without its exponent, and so another fingerprint."""
    with pytest.raises(FeatxError, match="reduce=gem has options of its own"):
        ReduceConfig("gem")
    with pytest.raises(ConfigError, match=r"unknown key 'reduce\.sise'.* Nearest: reduce\.size"):
        make_reduce("grid", sise=4)
    with pytest.raises(ConfigError, match=r"reduce\.size has an effect with reduce=align or"):
        make_reduce("avg", size=4)
    with pytest.raises(ConfigError, match=r"reduce=mean: expected one of"):
        make_reduce("mean")


@pytest.mark.parametrize("count", [-1, float("inf"), float("nan")])
def test_max_failures_is_a_number(count: float) -> None:
    with pytest.raises(ConfigError, match=r"max_failures=.*: expected a share"):
        Config(max_failures=count)


def test_allowed_failures_is_a_share_or_a_number() -> None:
    assert Config(max_failures=0.01).allowed_failures(2000) == 20
    assert Config(max_failures=0.01).allowed_failures(99) == 0
    assert Config(max_failures=7).allowed_failures(10) == 7
    assert Config(max_failures=1).allowed_failures(10) == 1


def test_a_key_without_effect_is_an_error() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.root has no effect with data=textiles; .* add data=folder",
    ):
        DataConfig(name="textiles", root="photos")
    with pytest.raises(ConfigError, match=r"model\.args has an effect with model\.library="):
        model_options(args={"depth": 20})


def test_every_key_is_described() -> None:
    rows = described_options()
    assert [row.name for row in rows if "." not in row.name] == list(Config.__dataclass_fields__)
    assert all(len(row.help) > 10 for row in rows)
    assert all(bool(row.type_text) == bool(row.default_text) for row in rows)
    assert {row.type_text for row in rows if row.name == "batch_size"} == {
        "auto, or a whole number of at least 1"
    }
    assert {row.type_text for row in rows if row.name == "data.root"} == {"a text, or null"}
    assert {"model.weights", "data.root", "model.transform.mean"} <= set(known_keys())


def test_the_saved_config_keeps_the_environment_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpolations that read the environment stay as they are; secrets are left out."""
    monkeypatch.setenv("HUB_SECRET", "hunter2")
    node = from_keywords({"model": {"library": "custom", "factory": "a:b"}})
    node["model"]["args"] = {"api_token": "hunter2", "home": "${oc.env:HUB_SECRET}", "depth": 20}
    for options in (node, OmegaConf.create(node)):  # from Python, and as Hydra composes them
        assert from_composed(options).model.args["home"] == "hunter2"
        text = saved_yaml(options)
        assert "hunter2" not in text
        assert "${oc.env:HUB_SECRET}" in text
        assert "depth: 20" in text
        assert "out: runs/<data>/<model>" in text


def test_captures_multiply_the_layers() -> None:
    config = Config(layers=["a", "b:input"], capture=["output", "input"])
    assert [name for name, _ in layer_requests(config)] == ["a", "a:input", "b:input"]
    assert [name for name, _ in layer_requests(Config(layers="stages", capture="input"))] == [
        "stages:input"
    ]
    for wrong in ("weights", [], ["input", "input"]):
        for layers in ("embedding", ["a:input"]):
            with pytest.raises(ConfigError, match=r"^capture"):
                Config(capture=wrong, layers=layers)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reduce": {"name": "avg", "p": 3.0}}, r"reduce\.p has an effect with reduce=gem only"),
        (
            {"data": {"name": "sample", "every_s": 1.0}},
            r"data\.every_s has an effect with data=",
        ),
        ({"reduce": {"name": "gem", "p": 3.0}}, None),
    ],
)
def test_an_option_of_another_member_is_refused_with_its_default_too(
    values: dict[str, Any], message: str | None
) -> None:
    """A default of a member that is not chosen has no effect; the user thinks that it has one."""
    refused = (
        contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message)
    )
    with refused:
        jobs.check(from_composed(from_keywords(values)), given_keywords(values))


def test_options_of_a_group_are_given_as_objects_mappings_or_texts() -> None:
    model = model_options(name="resnet18", library="torchvision", weights=None)
    data = replace(from_composed(from_keywords({"data": "photos"})).data, depth=2)
    typed = {"model": model, "data": data, "reduce": make_reduce("gem", p=2.0)}
    mappings = {
        "model": {"name": "resnet18", "library": "torchvision", "weights": None},
        "data": {"name": "folder", "root": "photos", "depth": 2},
        "reduce": {"name": "gem", "p": 2.0},
    }
    assert from_composed(from_keywords(typed)) == from_composed(from_keywords(mappings))
    assert given_keywords(typed) == {
        *("model.name", "model.weights", "data.root", "data.depth", "reduce.p"),
    }
    both, _ = jobs.config_of_call(
        "plan", {**typed, "data_limit": 3, "layers": {"fc": typed["reduce"]}}
    )
    assert (both.data.depth, both.data.limit, both.model) == (2, 3, model)
    assert both.layers["fc"]["p"] == 2.0
    call = {"store": "runs/a", "export": FaissOptions(), "export_ok_only": True}
    index, _ = jobs.config_of_call("export", call)
    assert (index.export.format, index.export.ok_only) == ("faiss", True)
    with pytest.raises(ConfigError, match=r"data_depth and data both give data\.depth"):
        jobs.config_of_call("plan", {**typed, "data_depth": 1})
    with pytest.raises(ConfigError, match=r"model=.*: model is a group of options"):
        Config(model=data)


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'layrs'\. Nearest: layers"):
        config(layrs=["layer4"])
    with pytest.raises(ConfigError, match=r"unknown key 'layer'\. Nearest: layers"):
        config(layer=["layer4"])
    with pytest.raises(ConfigError, match="nane"):
        config(model={"nane": "resnet50"})


@pytest.mark.parametrize("option", ["retry_failed", "refresh", "grow"])
def test_what_changes_a_store_and_overwrite_exclude_each_other(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}=true .* overwrite=true deletes it; give one"):
        Config(overwrite=True, **{option: True})


@pytest.mark.parametrize("number", [np.int64(3), np.int32(3), 3])
def test_python_gives_numbers_of_numpy(number: object) -> None:
    made = config(batch_size=number, data={"limit": number})
    assert (made.batch_size, made.data.limit) == (3, 3)


def test_python_gives_arrays_and_booleans_of_numpy() -> None:
    made = config(layers=np.array(["a", "b"]), compile=np.bool_(False))
    assert (made.layers, made.compile) == (["a", "b"], False)
    assert type(Config(seed=np.int64(3)).seed) is type(Config(seed=np.int64(0)).seed) is int
    with pytest.raises(ConfigError, match="seed=-1: expected a whole number"):
        Config(seed=np.int64(-1))


def test_groups_of_options_take_paths_and_name_the_type_of_other_objects() -> None:
    assert FolderOptions(root=Path("photos")) == FolderOptions(root="photos")
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"^model\.factory=Sequential: expected a text, or null"):
        CustomOptions(factory=net)  # type: ignore[arg-type]


def test_python_gives_devices_and_dtypes_of_torch() -> None:
    made = config(device=torch.device("cuda", 1), dtype=torch.bfloat16)
    assert (made.device, made.dtype) == ("cuda:1", "bfloat16")
    assert Config(device=torch.device("cpu")).device == "cpu"  # as featx.embed makes it


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data": None}, "data is a NoneType; expected a name or a mapping of options"),
        ({"model": ["resnet50"]}, "model is a list; expected a name or a mapping of options"),
        ({"reduce": None}, "reduce is a NoneType"),
        ({"export": "npy"}, r"expected a mapping of options, such as \{'format': 'npy'\}\.$"),
        ({"layers": {"a"}}, r"layers is a set; expected text, a number, a list"),
        ({"dtype": np.float32}, "dtype is a type; expected text"),
        ({"model": {"args": {"z": {1}}}}, r"model\.args\.z is a set"),
        ({"data": {"root": ["photos"]}}, r"data\.root=\[photos\]: expected a text, or null"),
        ({"conformance": {"mode": False}}, "conformance.mode=false: expected one of off, warn"),
        ({"precision": 16}, "precision=16: expected one of auto, fp32"),
        ({"data": {"exif": True}}, r"data\.exif=true: expected one of apply, ignore"),
        ({"probe": {"method": 7}}, r"probe\.method=7: expected some of linear, knn"),
        ({"codec": True}, "codec=true: expected a text"),
        ({"out": "runs/${"}, "out: no viable alternative"),
        ({"out": "runs/${nope}"}, "out: Interpolation key 'nope' not found"),
    ],
)
def test_what_is_no_value_of_an_option_is_named(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**keys)


def test_a_root_that_is_none_is_not_given() -> None:
    assert config(data={"root": None, "limit": 3}).data == DataConfig(limit=3)


@pytest.mark.parametrize(
    ("source", "root", "name"),
    [
        ("folder", "photos", "photos"),
        ("folder", "my/photos.v2/", "photos.v2"),
        ("folder", ".", "here"),
        ("folder", "/", "folder"),
        ("table", "tables/labels.csv.gz", "labels"),
        ("webdataset", "shards/train-{000..012}.tar", "train"),
        ("webdataset", "shards/{000..012}.tar", "webdataset"),
        ("webdataset", "https://host/x/photos.tar?signature=secret", "photos"),
        ("webdataset", "s3://bucket/photos.tar", "photos"),
    ],
)
def test_the_default_of_out_has_the_name_of_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, root: str, name: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = config(data={"name": source, "root": root}, model="resnet18")
    assert made.out == f"runs/{name}/resnet18"


def test_without_a_root_out_has_the_name_of_the_source() -> None:
    assert config(data="sample", model="resnet18").out == "runs/sample/resnet18"
    assert config(data="sample", model="resnet18", out="there").out == "there"


@pytest.mark.parametrize("text", ["a", "[1, 2]", "- a", "3"])
def test_anything_but_a_mapping_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be read: it is a .*, and a mapping was expected"
    ):
        from_saved(text)


EARLIER = """
model: {name: clone, library: timm, args: {a: {}}, weights: w.pth,
        checkpoint: {convert: auto, resample: true, sha256: null}}
layers: {a: {name: grid, size: 2, rows: 3, columns: 4}, b: null, c.d: avg}
reduce: {name: align, rows: null, columns: 7, pool: 1}
data: {name: hdf5, root: x.h5, dataset: /i, labels: /l, crops: 2, crop_ratio: null}
executor: {name: slurm, gres: 'gpu:1', partition: null, account: a, memory_gib: 8, cpus: 3}
conformance: {mode: warn, images: 4}
probe: {split: kfold, temperature: 0.1, l2: 0.5}
outliers: {k: 3}
mislabelled: {folds: 3}
part_mib: 512
job: {name: extract, depth: 2}
distance: {subset_rows: 5}
"""
"""Options that a store of an earlier version may have."""


def test_a_config_of_an_earlier_version_is_read_as_one_of_this() -> None:
    found = from_saved(EARLIER)
    assert found == config(
        model={
            "library": "timm", "name": "clone", "weights": "w.pth", "args": {"a": {}},
            "checkpoint": {"convert": "resample"},
        },
        layers={"a": {"name": "grid", "rows": 3, "columns": 4}, "b": None, "c.d": "avg"},
        reduce={"name": "align", "rows": 28, "columns": 7},
        data={"name": "hdf5", "root": "x.h5", "dataset": "/i", "label_column": "/l", "crops": 2},
        executor={"name": "slurm", "cpus": 3},
        conformance={"mode": "warn"},
        probe={"l2": 0.5},
    )  # fmt: skip
    hub = from_saved("model: {library: hub, name: clone, entry: small}").model
    assert hub == model_options(library="hub", name="clone", factory="small")
    maps = from_saved("{layers: null, attribute: {layer: deep, per_class: 3}}")
    assert (maps.layers, maps.attribute.per_class) == (["deep"], 3)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"models": {"local": True}}, r"models\.local is gone: job\.show=local does the same"),
        ({"attribute": {"layer": "a"}}, r"attribute\.layer is gone: 'layers=\[NAME\]' names it"),
        ({"probe": {"compare_store": "b"}}, r"compare_store is gone: 'store=\[A,B\]' names"),
        ({"export": {"clam": True}}, r"export\.clam is gone: export\.format=clam writes"),
    ],
)
def test_an_option_that_is_gone_says_what_replaces_it(
    keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**keywords)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {crops: 1, crop_ratio: [1, 2]}", r"data\.crop_ratio is gone: the quotient"),
        ("model: 3", "model is a group of options"),
        ("model: {library: timm, checkpoint: 3}", "model.checkpoint is a group of options"),
        ("layers: {a: 3}", "3 is not a reduction"),
        ("part_mibs: 4", "unknown key 'part_mibs'"),
    ],
)
def test_a_saved_config_that_cannot_be_read_says_why(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"the store keeps cannot be read: .*{message}"):
        from_saved(text)


@pytest.mark.parametrize("unit", ["[", "{a: ", "- "])
def test_deeply_nested_text_is_refused(unit: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: it is nested too deeply"):
        from_saved("out: " * (unit != "- ") + unit * 20_000)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_failures", 1),
        ("max_failures", 1.0),
        ("tensorboard", 1),
        ("tensorboard", True),
        ("layers", {"conv": {"name": "avg"}}),
        ("capture", ["output", "input"]),
    ],
)
def test_values_that_resemble_a_default_keep_their_type(key: str, value: object) -> None:
    found = getattr(from_saved(saved_yaml(from_keywords({key: value}))), key)
    assert (found, type(found)) == (value, type(value))


def test_it_keeps_what_makes_values_and_what_was_given() -> None:
    text = saved_yaml(from_keywords({"data": "photos", "probe": {"k": 5, "method": "knn"}}))
    assert "probe:\n  method: knn\n  k: 5\n" in text
    assert "neighbors" not in text
    assert "columns" not in text, "data=folder has no columns"
    assert "  exif: apply\n" in text
    assert "reduce:\n  name: none\n" in text


@pytest.mark.parametrize(
    "text",
    ["off", "Y", "1e5", "0x10", "1_000", "2024-01-01", "1:30", ".inf", "=", "<<", "null", "é"],
)
def test_texts_that_resemble_other_values_stay_texts(text: str) -> None:
    found = from_saved(saved_yaml(from_keywords({"out": text, "layers": [text]})))
    assert (found.out, found.layers) == (text, [text])
