"""The choice of the best layer: ties, nested validation, and intervals on noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from probe_job import predictions, probe
from probe_problem import blobs, write_store
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from featx.errors import DataError

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def test_a_tie_goes_to_the_smaller_validation_loss() -> None:
    x, y = blobs(90, signal=10)
    write_store(Path("store"), y, few=x[:, :4], many=x)
    found = probe()
    trials = {
        layer: min(about["linear"]["sweep"], key=lambda trial: trial["loss"])
        for layer, about in found["layers"].items()
    }
    assert {trial["accuracy"] for trial in trials.values()} == {1.0}
    assert found["layer"] == min(trials, key=lambda layer: trials[layer]["loss"])


def test_validation_rows_of_a_class_that_is_not_fitted_choose_nothing() -> None:
    x, y = blobs(300, signal=0.35)
    role = np.array([b"train", b"train", b"train", b"val", b"test"])[np.arange(300) // 3 % 5]
    roles = {"some": np.where((y == 2) & (role != b"val"), b"", role)}
    roles["none"] = np.where(y == 2, b"", role)
    write_store(Path("store"), y, roles, x=x)
    some, none = (probe(split=name) for name in roles)
    assert some["sweep"] == none["sweep"]
    assert (some["split"]["validation_rows"], none["split"]["validation_rows"]) == ([60], [40])
    note = "20 validation rows are of a class without a training row: the others choose settings"
    assert note in some["notes_on_rows"]
    roles = {"only": np.where((y == 2) == (role == b"val"), role, b"")}
    write_store(Path("only"), y, roles, x=x)
    with pytest.raises(DataError, match="no validation row, on which settings are chosen"):
        probe(store="only", split="only")


def test_with_folds_the_top_is_nested_and_layers_are_their_own() -> None:
    x, y = blobs(300, signal=0.35)
    halves = {"even": x[:, ::2], "odd": x[:, 1::2], "late": x[:, 8:18]}
    write_store(Path("store"), y, **halves)
    found = probe(folds=5, method="ridge")
    chosen = found["layer_of_folds"]
    assert len(set(chosen)) > 1
    values = [
        found["layers"][layer]["ridge"]["folds"]["values"][fold]
        for fold, layer in enumerate(chosen)
    ]
    assert found["folds"]["values"] == values
    assert found["accuracy"] == pytest.approx(np.mean(values))
    single = probe(method="ridge")
    assert "layer_of_folds" not in single
    assert single["accuracy"] == single["layers"][single["layer"]]["ridge"]["accuracy"]


def test_knn_with_fewer_than_five_neighbours_has_no_top_five() -> None:
    x, y = blobs(160, num_classes=8)
    write_store(Path("store"), y, x=x)
    assert probe(method="knn", k=4)["top5"] is None
    at_five = probe(method="knn", k=5)
    assert at_five["accuracy"] <= at_five["top5"] < 1


def role_of_rows(layer: str) -> dict[str, np.ndarray]:
    """Rows of each role in predictions.csv of a hold-out."""
    rows: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for line in predictions():
        if line["layer"] in ("", layer):
            rows[line["split"]].append(int(line["key"].removesuffix(".jpg")))
    return {role: np.array(places) for role, places in rows.items()}


def accuracy_of(x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray) -> float:
    fitted = make_pipeline(
        StandardScaler(), LogisticRegression(C=1 / (0.1 * len(train)), tol=1e-8, max_iter=2000)
    ).fit(x[train], y[train])
    return float(fitted.score(x[test], y[test]))


def test_the_layer_is_the_one_that_scikit_learn_chooses_on_the_validation_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Layers of little signal: the highest test accuracy is not that of the chosen layer."""
    x, y = blobs(300, width=60, num_classes=3, signal=0.15)
    layers = {f"l{i}": x[:, 10 * i : 10 * i + 10] for i in range(6)}
    write_store(Path("store"), y, **layers)
    found = probe(l2=0.1)
    rows = role_of_rows("l0")
    validation, test = {}, {}
    for layer, values in layers.items():
        train = np.sort(np.concatenate([rows["train"], rows["validation"]]))
        validation[layer] = accuracy_of(values, y, rows["train"], rows["validation"])
        test[layer] = accuracy_of(values, y, train, rows["test"])
    selection = found["layer_selection"]
    assert validation[found["layer"]] == max(validation.values())
    (split,) = selection["splits"]
    assert (split["seed"], split["fold"], split["layer"]) == (0, None, found["layer"])
    assert split["validation_accuracy"] == pytest.approx(validation[found["layer"]])
    assert split["accuracy"] == pytest.approx(test[found["layer"]]) == found["accuracy"]
    highest = selection["highest_on_test"]
    assert highest["accuracy"] == pytest.approx(max(test.values()))
    assert test[highest["layer"]] > found["accuracy"]
    out = " ".join(capsys.readouterr().out.split())
    assert f"Highest on the test rows: {highest['layer']}, " in out


@pytest.mark.parametrize(("options", "splits"), [({"folds": 3}, 6), ({}, 2)])
def test_every_split_of_every_seed_chooses_for_itself(
    capsys: pytest.CaptureFixture[str], options: dict[str, Any], splits: int
) -> None:
    x, y = blobs(240, signal=0.35)
    halves = {"even": x[:, ::2], "odd": x[:, 1::2], "late": x[:, 8:18]}
    write_store(Path("store"), y, **halves)
    found = probe(seeds=2, method="ridge", **options)
    selection = found["layer_selection"]
    assert found["seeds"]["layer_of_splits"] == [split["layer"] for split in selection["splits"]]
    out = " ".join(capsys.readouterr().out.split())
    where, count = ("fold", 6) if options else ("split", 2)
    most, times = next(iter(selection["counts"].items()))
    assert f"each {where} chose on validation rows ({most} in {times} of {count}" in out
    assert len(selection["splits"]) == splits == sum(selection["counts"].values())
    accuracies = [split["accuracy"] for split in selection["splits"]]
    assert selection["accuracy"]["mean"] == pytest.approx(np.mean(accuracies))
    first = [split for split in selection["splits"] if split["seed"] == 0]
    if options:
        assert [split["layer"] for split in first] == found["layer_of_folds"]
        assert [split["accuracy"] for split in first] == found["folds"]["values"]
    assert found["seeds"]["chosen"]["accuracy"]["mean"] == pytest.approx(
        np.mean(accuracies), abs=0.01
    )


@pytest.mark.slow
def test_the_choice_on_noise_has_the_accuracy_of_chance() -> None:
    """40 layers of noise: the highest test accuracy is far above chance, the nested one is not."""
    rng = np.random.default_rng(0)
    layers = {f"l{i}": rng.normal(size=(100, 4)).astype(np.float32) for i in range(40)}
    write_store(Path("store"), np.arange(100) % 2, **layers)
    found = probe(method="ridge", l2=1, seeds=6)
    selection = found["layer_selection"]
    # 120 tests of chance 0.5: a standard deviation of 0.046.
    assert selection["accuracy"]["mean"] == pytest.approx(0.5, abs=0.12)
    assert selection["highest_on_test"]["accuracy"] > selection["accuracy"]["mean"] + 0.05
    told_apart = [each["told_apart"] for each in found["seeds"]["differences"].values()]
    assert sum(told_apart) <= 1


def test_a_single_layer_needs_no_selection(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = blobs(90)
    write_store(Path("store"), y, x=x)
    assert probe()["layer_selection"] is None
    assert "told apart" not in capsys.readouterr().out


@pytest.mark.slow
def test_intervals_on_noise_lie_above_chance_as_often_as_they_say() -> None:
    """120 rows of 8 layers of noise: of the layer chosen on the same folds 28 % lay above."""
    above, seeds = 0, 100
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        layers = {f"l{i}": rng.normal(size=(120, 8)).astype(np.float32) for i in range(8)}
        write_store(Path(f"s{seed}"), np.arange(120) % 2, **layers)
        above += probe(store=f"s{seed}", folds=5, method="ridge")["interval"][0] > 0.5
    # 2.5 % are meant; folds share training rows, and 100 draws of 5 % are at most 10 but for 1 %.
    assert above <= 10
