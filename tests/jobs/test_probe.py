"""job=probe on made-up stores: the file, the best layer, every kind of split, and no leaks."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_store import make_labelled
from probe_job import given_split, predictions
from probe_problem import blobs, write_store
from safetensors.numpy import load_file
from tiny_model import job_result, run_job
from torch.utils._python_dispatch import TorchDispatchMode

import featx
from featx.errors import ConfigError, DataError, LayerError, StoreError, StoreMismatchError
from featx.similarity import data_set_distance

pytestmark = pytest.mark.usefixtures("in_tmp_path")

X, Y = blobs(300, signal=0.35)


def probe(**keys: Any) -> dict[str, Any]:
    """What probe.json says, which stdout has to say too."""
    options = {key: keys.pop(key) for key in list(keys) if key not in ("seed", "layers", "store")}
    printed = job_result("probe", **{"store": "store", "device": "cpu", **keys}, probe=options)
    result = json.loads(Path(keys.get("store", "store"), "probe.json").read_text())
    checksum = result.pop("sha256")
    assert printed == result
    return {**result, "sha256": checksum}


def head(layer: str = "x") -> dict[str, np.ndarray]:
    return load_file(f"store/probe/{layer}.safetensors")


@pytest.mark.slow
def test_the_best_layer_is_on_top_and_all_are_below() -> None:
    noise = np.random.default_rng(1).normal(size=X.shape)
    write_store(Path("store"), Y, noise=noise, good=X, halved=X[:, ::2])
    found = probe(method=["linear", "knn", "ridge"])
    layers = found["layers"]
    assert set(layers) == {"noise", "good", "halved"}
    accuracies = {name: about["linear"]["validation_accuracy"] for name, about in layers.items()}
    assert found["layer"] == max(accuracies, key=lambda name: accuracies[name])
    assert layers["noise"]["linear"]["accuracy"] < 0.5 < found["accuracy"]
    for key in ("accuracy", "confusion", "recall", "interval", "sweep", "l2"):
        assert found[key] == layers[found["layer"]]["linear"][key]
    assert found["split"]["test_rows"] == [60]
    assert found["split"]["fit"] == [192]
    for name in layers:
        weights = head(name)
        width = layers[name]["features"]
        shapes = {key: value.shape for key, value in weights.items()}
        expected = {"weight": (3, width), "bias": (3,), "mean": (width,), "scale": (width,)}
        assert shapes == expected


def test_shuffled_labels_give_chance() -> None:
    shuffled = np.random.default_rng(5).permutation(Y)
    write_store(Path("store"), shuffled, x=X)
    methods = ["linear", "knn", "ridge"]
    found = probe(method=methods, folds=5)["layers"]["x"]
    for method in methods:
        low, high = found[method]["interval"]
        assert low - 0.05 < 1 / 3 < high + 0.05, method


def test_test_rows_change_neither_head_nor_scaler_nor_choice() -> None:
    from featx.analysis.probe.splits import holdout

    test = holdout(Y, 0.2, 0).test
    changed = X.copy()
    changed[test] = changed[test] * 100 - 7
    write_store(Path("store"), Y, x=X)
    before, first = probe(shots=[2]), head()
    write_store(Path("changed"), Y, x=changed)
    after = probe(store="changed", shots=[2])
    second = load_file("changed/probe/x.safetensors")
    assert before["accuracy"] != after["accuracy"]
    assert before["sweep"] == after["sweep"]
    for name, value in first.items():
        assert (value == second[name]).all(), name
    # And training rows do.
    changed[holdout(Y, 0.2, 0).fit] += 1
    write_store(Path("third"), Y, x=changed)
    probe(store="third")
    assert (load_file("third/probe/x.safetensors")["mean"] != first["mean"]).all()


@pytest.mark.slow
def test_the_same_command_gives_the_same_file() -> None:
    write_store(Path("store"), Y, x=X)

    def numbers(**keys: Any) -> dict[str, Any]:
        found = probe(method=["linear", "knn"], shots=[3], **keys)
        for about in found["layers"]["x"].values():
            if isinstance(about, dict):
                about.pop("seconds", None)
        return found["layers"]

    first = numbers()
    assert numbers() == first
    assert numbers(seed=1) != first


def test_kfold_tests_every_row_and_keeps_a_head_of_all() -> None:
    write_store(Path("store"), Y, x=X)
    found = probe(folds=3)
    assert found["rows"] == 300
    assert len(found["folds"]["values"]) == len(found["l2_of_folds"]) == 3
    assert found["folds"]["mean"] == pytest.approx(found["accuracy"])
    assert found["head_fitted_on"] == "all labelled rows"
    rows = predictions()
    assert sorted(row["fold"] for row in rows) == sorted("123" * 100)
    assert {row["key"] for row in rows} == set(featx.open("store").keys.tolist())
    assert head()["mean"] == pytest.approx(X.mean(0), rel=1e-4)


def test_a_note_on_one_fold_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Noise wants the strongest penalty of the grid."""
    write_store(Path("store"), Y, x=np.random.default_rng(2).normal(size=X.shape))
    options = {"folds": 3, "shots": [2]}
    run_job("probe", store="store", device="cpu", probe=options)
    notes = json.loads(Path("store/probe.json").read_text())["notes"]
    assert [note[:25] for note in notes] == [f"fold {i} of 3: the best l2," for i in (1, 2, 3)]
    printed = capsys.readouterr().out
    for text in ("Chosen layer: x", "95 % interval", "folds       mean", "Few-shot", "job=predict"):
        assert text in printed
    printed = " ".join(printed.split())
    assert printed.count("the best l2,") == 1
    assert "x, linear (3 folds): the best l2," in printed


def test_a_split_file() -> None:
    write_store(Path("store"), Y, x=X)
    keys = [f"{i:05d}.jpg" for i in range(300)]
    # Five rows have no split, as those that are not named.
    roles = ["train"] * 150 + ["val"] * 50 + ["test"] * 90 + [""] * 5
    given = given_split(["gone.jpg", *keys[:295]], ["train", *roles])
    Path("split.csv").write_bytes(b"\xef\xbb\xbf" + Path("split.csv").read_bytes())  # as by Excel
    found = probe(**given)
    assert found["split"]["fit"] == [150]
    assert found["split"]["validation_rows"] == [50]
    assert found["rows"] == 90
    assert found["notes_on_rows"] == [
        "1 key of split.csv is not among the labelled rows of the store",
        "10 labelled rows without a split in split.csv: left out",
    ]
    assert head()["mean"] == pytest.approx(X[:200].mean(0), rel=1e-4)
    with pytest.raises(DataError, match=r"no labelled row of the store for test.*'00000\.jpg'"):
        probe(**given_split(keys[:1], ["train"]))
    with pytest.raises(DataError, match="1 class is tested and not trained on, such as c2"):
        probe(**given_split(keys, np.where(Y == 2, "test", "train")))


def test_another_store_is_tested_with_classes_by_name() -> None:
    write_store(Path("store"), Y, x=X)
    x, y = blobs(90, signal=0.35)
    renamed = make_labelled({"x": x}, (y + 1) % 3, ["c2", "c0", "c1"])
    renamed.changed(other=1).write(Path("other"), packed=True)
    found = probe(test_store="other")
    assert found["rows"] == 90
    assert found["split"]["kind"] == "test_store"
    assert found["accuracy"] > 0.6
    assert found["support"] == [30, 30, 30]
    tested = predictions(split="test")
    assert [row["key"] for row in tested] == featx.open("other").keys.tolist()
    assert {row["fold"] for row in tested} == {""}
    with pytest.raises(ConfigError, match="its rows would be tested on themselves"):
        probe(test_store="store")
    make_labelled({"x": x[:, :5]}, y, ["a", "b", "c"]).changed(other=2).write(Path("narrow"))
    with pytest.raises(StoreMismatchError, match=r", x: these(.|\n)*  shape: \(20,\) and \(5,\)"):
        probe(test_store="narrow")


@pytest.mark.parametrize(
    ("reduce_args", "changes", "difference"),
    [
        ({"p": 6.0}, {}, r"  reduce_p: 3\.0 and 6\.0"),
        ({"p": 3.0}, {"model.args": {"global_pool": "max"}}, r"\n  model.args: None and"),
        ({"p": 3.0}, {"layer.x": "output, target label"}, "  target: '' and 'label'"),
        ({"p": 3.0}, {"model.init": "loaded"}, None),
    ],
)
def test_stores_of_other_values_are_not_tested(
    reduce_args: dict[str, float],
    changes: dict[str, Any],
    difference: str | None,
) -> None:
    run = make_labelled({"x": X}, Y, ["a", "b", "c"])
    run.write(Path("store"))
    specs = (replace(run.specs[0], reduce_args=reduce_args),)
    replace(run, specs=specs).changed(other=1, **changes).write(Path("other"))
    if difference is None:
        assert probe(test_store="other", l2=0.01)["rows"] == len(Y)
        return
    with pytest.raises(StoreMismatchError, match=difference):
        probe(test_store="other")
    with pytest.raises(StoreMismatchError, match=difference):
        data_set_distance(featx.open("store"), featx.open("other"), "x")


@pytest.mark.slow
def test_a_layer_over_the_memory_is_streamed() -> None:
    write_store(Path("store"), Y, x=X)
    keys: dict[str, Any] = {"method": ["linear", "knn", "ridge"], "learning_rate": 0.01}
    inside = probe(**keys)["layers"]["x"]
    streamed = probe(memory_gib=0.0, epochs=30, **keys)["layers"]["x"]
    assert streamed["streamed"]
    assert streamed["repeated_rows"] is None
    for method in ("knn", "ridge"):
        assert streamed[method]["confusion"] == inside[method]["confusion"]
    assert streamed["linear"]["accuracy"] == pytest.approx(inside["linear"]["accuracy"], abs=0.08)


class LargeTensors(TorchDispatchMode):
    """Largest number of elements of float tensors of half a matrix or more that live together."""

    def __init__(self, matrix: int) -> None:
        super().__init__()
        self.matrix, self.most = matrix, 0
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            if 2 * result.numel() >= self.matrix:
                self._made.append(weakref.ref(result))
            living = [each for ref in self._made if (each := ref()) is not None]
            # In-place results and views share memory.
            sizes = {each.untyped_storage().data_ptr(): each.numel() for each in living}
            self.most = max(self.most, sum(sizes.values()))
        return result


@pytest.mark.parametrize("method", ["knn", "ridge"])
def test_vectors_and_one_copy_of_them_are_in_memory(
    method: str, set_block_sizes: Callable[..., None]
) -> None:
    """What the check of free memory counts, also while near-duplicates are searched.

    The linear probe has another copy, of at most 64 MiB.
    """
    x, y = blobs(2500, width=64)
    write_store(Path("store"), y, x=x.astype("float32"))
    set_block_sizes(1 << 15)
    with LargeTensors(x.size) as tensors:
        found = probe(method=method)
    assert found["near_duplicates"]["not_checked"] is None
    assert x.size <= tensors.most <= 2 * x.size


def test_options_of_steps_without_effect_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    write_store(Path("store"), Y, x=X)
    for keys in ({"epochs": 3, "memory_gib": 0.0}, {"epochs": 3, "learning_rate": 0.1}):
        assert run_job("probe", store="store", device="cpu", probe=keys) == 0
        said = "probe.epochs, probe.learning_rate: without effect" in capsys.readouterr().err
        assert said is ("learning_rate" in keys)


def test_the_same_images_on_both_sides_are_counted() -> None:
    twice = np.concatenate([X[:150], X[:150]])
    write_store(Path("store"), np.concatenate([Y[:150], Y[:150]]), x=twice)
    found = probe()
    assert found["layers"]["x"]["repeated_rows"] > 30
    assert "may be the same images" in found["notes_on_rows"][0]


def test_the_predictions_agree_with_the_metrics() -> None:
    write_store(Path("store"), Y, x=X)
    found = probe(method=["linear", "knn", "ridge"])
    data = Path("store", found["predictions"]["file"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == found["predictions"]["sha256"]
    rows = predictions()
    kept = [row for row in rows if not row["layer"]]
    roles = [row["split"] for row in kept]
    assert roles.count("train") == found["split"]["fit"][0]
    assert roles.count("validation") == found["split"]["validation_rows"][0]
    assert not any(row["method"] or row["predicted"] or row["p_true"] for row in kept)
    for row in rows:
        if row["method"] == "ridge":
            assert row["p_true"] == row["p_predicted"] == ""
        elif row["method"]:
            assert 0 <= float(row["p_true"]) <= float(row["p_predicted"]) <= 1


def test_the_predictions_are_a_split_file() -> None:
    write_store(Path("store"), Y, x=X)
    found = probe(seed=7)
    Path("store/probe/predictions.csv").rename("split.csv")
    again = probe(split="split.csv")
    assert again["confusion"] == found["confusion"]
    assert again["split"]["validation_rows"] == found["split"]["validation_rows"]


def test_what_cannot_be_probed_is_reported() -> None:
    write_store(Path("store"), Y, x=X)
    with pytest.raises(LayerError, match="has no layer 'y'; it has x"):
        probe(layers=["y"])
    with pytest.raises(StoreError, match="no store at"):
        probe(store="nowhere")
    make_labelled({"x": X[:4]}, [0, 0, 0, 0], ["a", "b"]).write(Path("one"))
    with pytest.raises(DataError, match="class 'a' only"):
        probe(store="one")
    make_labelled({"x": X[:4]}, [0, 1, 2, 3], list("abcd")).write(Path("single"))
    with pytest.raises(DataError, match=r"every class has a single row, such as a\."):
        probe(store="single")
    with pytest.raises(DataError, match=r"fold 1 is empty\. Give more rows\."):
        probe(store="single", folds=2)
    # The last class has a row in each group, which is the only one of another class.
    shared = {"patient": np.array([0, 1, 2, 0, 1, 2])}
    write_store(Path("shared"), np.array([0, 1, 2, 3, 3, 3]), shared, x=X[:6])
    with pytest.raises(DataError, match="or shares its groups with such a class"):
        probe(store="shared", group_column="patient")
    with pytest.raises(DataError, match=r"fold 1 is empty\. Give more groups\."):
        probe(store="shared", group_column="patient", folds=2)
    make_labelled({"x[0]": X[:90], "x(0)": X[:90]}, Y[:90], list("abc")).write(Path("like"))
    with pytest.raises(ConfigError, match=r"heads of x\(0\) and x\[0\] would have one file"):
        probe(store="like")
    assert not Path("like/probe").exists()
    make_labelled({"x": X[:4]}, [0, 0, 1, 1], list("ab")).write(Path("pairs"))
    with pytest.raises(DataError, match=r"left for validation.* Give more images of a class\."):
        probe(store="pairs")
    make_labelled({"x": X[:8]}, [0, 0, 0, 0, 1, 1, 1, 1], list("ab")).write(Path("fours"))
    with pytest.raises(DataError, match=r"left for validation.* or a smaller probe\.test_share\."):
        probe(store="fours", test_share=0.8)
    probe(store="fours", test_share=0.5)
    with pytest.raises(DataError, match=r"left for validation.* Give more images of a class\."):
        probe(store="pairs", folds=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "svm"}, "probe.method=svm: expected some of linear, knn, ridge"),
        ({"method": []}, "probe.method is empty: expected linear, knn, ridge"),
        ({"split": "kfold"}, "probe.split=kfold is gone: probe.folds=5 selects it"),
        ({"split": "column"}, "probe.split=column is gone: probe.split=NAME names the column"),
        ({"split_file": "a.csv"}, "probe.split_file is gone: probe.split=FILE.csv"),
        (
            {"folds": 5, "test_share": 0.1},
            "probe.test_share and probe.folds each say which rows are tested; give one",
        ),
        ({"test_share": 1.5}, "a share between 0 and 1"),
        ({"k": 5}, "probe.k has an effect with probe.method=knn only"),
        ({"method": "knn", "l2": 0.1}, "probe.method=linear or ridge or attentive only"),
        ({"shots": [0]}, "rows a class"),
        ({"draws": 3}, "probe.draws is gone: probe.seeds is also the number of random"),
        ({"folds": 1}, "from 2 to 1000000"),
        ({"memory_gib": -1.0}, "memory_gib=-1.0: expected a number of at least 0"),
        ({"seeds": 1}, "expected 2 to 10000"),
        ({"seeds": 3, "split": "role"}, "probe.split says which rows are tested"),
        ({"bootstrap": 10}, "expected 100 to 1000000 resamples"),
        (
            {"method": "ridge", "calibration": "temperature"},
            "has an effect with probe.method=linear only",
        ),
        ({"calibration": "platt"}, "expected one of none, temperature"),
        ({"task": "regression"}, "needs probe.label_column"),
        ({"task": "number", "label_column": "age"}, "expected one of auto, classification"),
        ({"label_separator": ","}, "probe.label_separator has an effect"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        run_job("probe", store="store", probe=options)
