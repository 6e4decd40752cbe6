"""Every printed number of job=probe, computed again from predictions.csv with scikit-learn."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_store import make_labelled
from probe_job import given_split, predictions, probe
from probe_problem import blobs, write_store
from scipy import stats
from sklearn import metrics as oracle
from sklearn.calibration import calibration_curve
from tiny_model import job_config

import featx
from featx.analysis.probe import run_probe
from featx.errors import DataError, StoreError, StoreMismatchError

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")

Line = dict[str, str]


def of_layer(layer: str, method: str, rows: list[Line]) -> list[Line]:
    return [row for row in rows if (row["layer"], row["method"]) == (layer, method)]


def recomputed(rows: list[Line], classes: list[str], probabilities: bool) -> dict[str, float]:
    """The metrics of test rows, from the columns of the file and by scikit-learn only."""
    true, predicted = ([row[name] for row in rows] for name in ("true", "predicted"))
    scores = np.array([[float(row[f"score:{name}"]) for name in classes] for row in rows])
    indicators = np.array([[name == each for name in classes] for each in true])
    tested = indicators.any(0)
    assert [classes[i] for i in scores.argmax(1)] == predicted
    found = {
        "accuracy": oracle.accuracy_score(true, predicted),
        "balanced_accuracy": oracle.recall_score(
            true, predicted, average="macro", labels=sorted(set(true))
        ),
        "macro_f1": oracle.f1_score(true, predicted, average="macro"),
        "mcc": oracle.matthews_corrcoef(true, predicted),
        "kappa": oracle.cohen_kappa_score(true, predicted),
        "auroc": oracle.roc_auc_score(indicators[:, tested], scores[:, tested], average="macro"),
    }
    if len(classes) > 5:
        number = [classes.index(name) for name in true]
        found["top5"] = oracle.top_k_accuracy_score(
            number, scores, k=5, labels=list(range(len(classes)))
        )
    if probabilities:
        assert scores.sum(1) == pytest.approx(np.ones(len(rows)), abs=1e-12)
        right, confidence = np.array(true) == np.array(predicted), scores.max(1)
        share, middle = calibration_curve(right, confidence, n_bins=15, strategy="uniform")
        bin_of = np.searchsorted(np.linspace(0, 1, 16)[1:-1], confidence)
        sizes = np.bincount(bin_of, minlength=15)
        found["calibration_error"] = (np.abs(share - middle) * sizes[sizes > 0]).sum() / len(rows)
        if (scores[indicators] > 0).all():
            found["log_loss"] = oracle.log_loss(true, scores, labels=classes)
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="holdout"),
        pytest.param({"folds": 3}, id="kfold", marks=pytest.mark.slow),
    ],
)
def test_all_metrics_follow_from_the_predictions(options: dict[str, Any]) -> None:
    x, y = blobs(300, num_classes=8, signal=0.5)
    noise = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    write_store(Path("store"), y, good=x, noise=noise)
    methods = ["linear", "knn", "ridge"]
    found, rows = probe(method=methods, **options), predictions()
    for layer, about in found["layers"].items():
        for method in methods:
            mine = of_layer(layer, method, rows)
            assert {(row["split"], row["group"]) for row in mine} == {("test", "")}
            assert len({row["key"] for row in mine}) == len(mine) == found["rows"]
            expected = recomputed(mine, found["classes"], method != "ridge")
            got = {name: about[method][name] for name in expected}
            top5 = expected.pop("top5"), got.pop("top5")
            if method == "knn":  # scikit-learn takes the first of classes without a vote
                assert about[method]["top5"] is None or top5[1] <= top5[0]
            else:
                assert top5[0] == pytest.approx(top5[1])
            assert got == pytest.approx(expected, abs=1e-12), (layer, method)
            missing = {name for name, value in about[method].items() if value is None}
            missing &= {"macro_f1", "auroc", "log_loss", "mcc", "kappa", "top5"}
            assert missing <= set(about[method]["not_available"])


def test_printed_numbers_are_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = blobs(300, num_classes=8, signal=0.5)
    write_store(Path("store"), y, good=x, odd=x[:, ::2])
    found = probe(show="all")
    out = capsys.readouterr().out
    for layer in found["layers"]:
        new = recomputed(of_layer(layer, "linear", predictions()), found["classes"], True)
        row = next(
            line.split() for line in out.splitlines() if line.startswith(layer) and ". " not in line
            and "linear" in line and "l2=" not in line
        )  # fmt: skip
        assert row[2:] == [
            f"{100 * new['balanced_accuracy']:.1f}", "%", f"{100 * new['top5']:.1f}", "%",
            *(f"{new[name]:.3f}" for name in ("macro_f1", "auroc", "log_loss", "mcc", "kappa")),
            f"{new['calibration_error']:.3f}",
        ]  # fmt: skip
        assert f"{100 * new['accuracy']:.1f} %" in out
    assert "(15 bins)" in out


def test_the_interval_counts_groups() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(200, 80)).astype(np.float32), np.arange(200) % 2
    x[:, 0] += 2 * y
    x[1::4] = x[0::4] + 0.01 * rng.normal(size=(50, 80)).astype(np.float32)
    write_store(Path("store"), y, {"patient": np.arange(200) // 4}, x=x)
    found = probe(group_column="patient")
    rows = of_layer("x", "linear", predictions())
    right = np.array([row["true"] == row["predicted"] for row in rows])
    group = np.array([int(row["group"]) for row in rows])
    # The variance of a mean of clusters, as statsmodels' cluster-robust one: G/(G-1) sum r_g^2/n^2.
    off = [(right[group == g] - right.mean()).sum() for g in np.unique(group)]
    count = len(off)
    variance = count / (count - 1) * np.square(off).sum() / len(rows) ** 2
    effective = min(len(rows), right.mean() * (1 - right.mean()) / variance)
    assert found["effective_rows"] == pytest.approx(effective)


def test_near_duplicates_are_those_of_the_split_of_each_seed() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(100, 80)).astype(np.float32), np.arange(100) % 2
    x[1::4] = x[0::4] + 0.01 * rng.normal(size=(25, 80)).astype(np.float32)
    write_store(Path("store"), y, x=x, half=x[:, :40])
    found = probe(seeds=2, method="ridge", l2=1)
    unit = (x - x.mean(0)) / x.std(0)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    for seed in "01":
        rows = [row for row in predictions() if row["seed"] == seed]
        test = [row for row in rows if (row["layer"], row["split"]) == ("half", "test")]
        train = [int(row["key"].removesuffix(".jpg")) for row in rows if row["split"] != "test"]
        near = 0
        for row in test:
            cosines = unit[train] @ unit[int(row["key"].removesuffix(".jpg"))]
            expected = f"{train[int(cosines.argmax())]:05d}.jpg" if cosines.max() > 0.9 else ""
            assert row["near_duplicate"] == expected
            near += bool(expected)
        assert near > 0
        if seed == "0":
            assert found["near_duplicates"]["rows"] == near


def test_a_file_with_too_many_scores_names_no_classes() -> None:
    x, y = blobs(90)
    write_store(Path("store"), y, x=x)
    config = job_config("probe", store="store", device="cpu")
    found = run_probe(config, print, max_scores=18 * 3 - 1)
    assert "no column per class" in found["notes_on_rows"][-1]
    assert not [name for name in predictions()[0] if name.startswith("score:")]
    run_probe(config, print, max_scores=18 * 3)
    assert "score:c2" in predictions()[0]


def test_without_scikit_learn_the_command_that_installs_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = blobs(90)
    write_store(Path("store"), y, {"age": x[:, 0].astype(float)}, x=x)
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)  # as if it were not installed
    for options in ({}, {"label_column": "age"}, {"masks": "masks"}):
        with pytest.raises(ImportError, match=r'pip install "featx\[evaluation\]"'):
            probe(**options)


@pytest.mark.slow
def test_seeds_have_a_split_each_and_their_spread_follows_from_the_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, y = blobs(200, num_classes=4, signal=0.5)
    write_store(Path("store"), y, even=x[:, ::2], odd=x[:, 1::2])
    found = probe(seeds=4, method=["linear", "knn"])
    out, rows, seeds = capsys.readouterr().out, predictions(), found["seeds"]
    assert seeds["seeds"] == [0, 1, 2, 3]
    tested = {}
    for seed in map(str, seeds["seeds"]):
        mine = [row for row in rows if row["seed"] == seed]
        roles = [row["split"] for row in mine if not row["layer"]]
        assert (roles.count("train"), roles.count("validation")) == (128, 32)
        tested[seed] = {row["key"] for row in mine if row["split"] == "test"}
    assert len(set(map(frozenset, tested.values()))) == 4
    accuracies: dict[str, list[float]] = {}
    for layer, methods in seeds["layers"].items():
        for method, metrics in methods.items():
            each = [
                recomputed(
                    [row for row in of_layer(layer, method, rows) if row["seed"] == str(seed)],
                    found["classes"],
                    True,
                )
                for seed in range(4)
            ]
            for name in set(each[0]) & {"accuracy", "macro_f1", "auroc", "mcc", "log_loss"}:
                values = [metric.get(name) for metric in each]
                if metrics[name] is None:
                    assert None in values
                    continue
                assert metrics[name]["values"] == pytest.approx(values)
                assert metrics[name]["std"] == pytest.approx(np.std(values, ddof=1))
                assert metrics[name]["min"] == pytest.approx(min(values))
            accuracies.setdefault(layer, [metric["accuracy"] for metric in each])
    (other,) = seeds["differences"]
    expected = np.subtract(accuracies[seeds["layer"]], accuracies[other])
    difference = seeds["differences"][other]
    assert difference["values"] == pytest.approx(expected)
    # 4 splits with 40 test rows for 160 training rows: the variance of the mean is v (1/4 + 1/4).
    error = np.std(expected, ddof=1) * np.sqrt(0.5)
    assert difference["interval"] == pytest.approx(
        stats.t.interval(0.95, 3, np.mean(expected), error)
    )
    p = 2 * stats.t.sf(abs(np.mean(expected)) / error, 3)
    assert difference["p"] == difference["p_holm"] == pytest.approx(p)
    assert difference["told_apart"] == (p < 0.05)
    chosen = [accuracies[layer][i] for i, layer in enumerate(seeds["layer_of_splits"])]
    assert seeds["chosen"]["accuracy"]["mean"] == pytest.approx(np.mean(chosen))
    assert out.startswith(f"Over 4 splits {100 * np.mean(chosen):.1f} % of the test rows are right")
    assert f"standard deviation {100 * np.std(chosen, ddof=1):.1f} points" in out
    # The first seed is a probe without the option.
    alone = probe(method=["linear", "knn"])
    assert alone["confusion"] == found["confusion"]
    assert alone["seeds"] is None


@pytest.mark.slow
def test_differences_of_layers_are_printed_with_their_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, y = blobs(300, num_classes=4, signal=0.5)
    write_store(Path("store"), y, whole=x, even=x[:, ::2], odd=x[:, 1::2])
    found = probe()
    out, rows, best = capsys.readouterr().out, predictions(), found["layer"]
    right = {
        layer: np.array(
            [row["true"] == row["predicted"] for row in of_layer(layer, "linear", rows)]
        )
        for layer in found["layers"]
    }
    tests = found["paired_tests"]
    assert len(tests) == 2
    p_values = [
        stats.binomtest(
            int((right[best] & ~right[layer]).sum()), int((right[best] != right[layer]).sum())
        ).pvalue
        for layer in tests
    ]
    # Two tests: the smaller p-value counts twice, and the larger one is not below it.
    small = min(1.0, 2 * min(p_values))
    for p, (layer, test) in zip(p_values, tests.items(), strict=True):
        assert test["p"] == pytest.approx(p)
        expected = small if p == min(p_values) else max(small, p)
        assert test["p_holm"] == pytest.approx(expected)
        gain = right[best].astype(int) - right[layer]
        assert test["difference"] == pytest.approx(gain.mean())
        oracle_interval = stats.bootstrap(
            (gain,), np.mean, n_resamples=20_000, method="percentile", rng=1
        ).confidence_interval
        assert test["interval"] == pytest.approx(list(oracle_interval), abs=0.017)
    nearest = min(tests, key=lambda layer: tests[layer]["difference"])
    points, (low, high) = tests[nearest]["difference"], tests[nearest]["interval"]
    verdict = "."
    if low > 0 and not tests[nearest]["told_apart"]:
        low_holm, high_holm = tests[nearest]["interval_holm"]
        reason = f"exact McNemar test, p = {tests[nearest]['p_holm']:.2g} (Holm)"
        if low_holm <= 0:
            reason = f"interval {100 * low_holm:.1f} to {100 * high_holm:.1f} (Holm)"
        verdict = f", but they cannot be told apart: {reason}."
    assert (
        f"{nearest}: {100 * points:+.1f} points, 95 % interval {100 * low:.1f} to "
        f"{100 * high:.1f}{verdict}"
    ) in " ".join(out.split())


def test_a_metric_that_is_equal_in_all_resamples_has_no_interval() -> None:
    x, y = blobs(80, num_classes=2, signal=20)
    write_store(Path("store"), y, x=x)
    found = probe(bootstrap=100)
    assert found["accuracy"] == 1
    assert found["bootstrap"]["intervals"]["accuracy"] is None
    assert found["interval"][0] < 1


@pytest.mark.parametrize(("width", "verb"), [(1, "better than"), (11, "against")])
def test_a_layer_is_called_better_only_if_the_interval_excludes_zero(
    capsys: pytest.CaptureFixture[str], width: int, verb: str
) -> None:
    """The second layer has the first `width` of the 12 informative numbers."""
    x, y = blobs(300, num_classes=4, signal=0.5)
    x = x[:, :12]
    write_store(Path("store"), y, whole=x, few=x[:, :width])
    found = probe()
    (layer, test), out = *found["paired_tests"].items(), " ".join(capsys.readouterr().out.split())
    assert test["told_apart"] == (verb == "better than")
    assert f"{found['layer']} {verb} {layer}: " in out


def test_few_test_rows_are_not_called_better(capsys: pytest.CaptureFixture[str]) -> None:
    """4 of 6 test rows for one layer and none for the other: p = 0.125, and an interval above 0."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    good = (10.0 * y[:, None] + rng.normal(size=(60, 2))).astype(np.float32)
    poor = good.copy()
    poor[54:58] = good[54:58][:, ::-1] * -1 + 10.0  # of the other class
    write_store(Path("store"), y, good=good, poor=poor)
    roles = ["train"] * 44 + ["validation"] * 10 + ["test"] * 6
    found = probe(**given_split(featx.open("store").keys, roles))
    (test,) = found["paired_tests"].values()
    out = " ".join(capsys.readouterr().out.split())
    assert (test["first_only"], test["second_only"], test["p"]) == (4, 0, 0.125)
    assert test["interval"][0] > 0
    assert not test["told_apart"]
    assert "good against poor: +66.7 points, 95 % interval 33.3 to 100.0, but they cannot be told "
    assert "better than" not in out
    assert "apart: exact McNemar test, p = 0.12 (Holm)." in out


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="holdout"),
        pytest.param({"folds": 5}, id="kfold", marks=pytest.mark.slow),
    ],
)
def test_stores_are_compared_on_the_same_rows(
    capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    x, y = blobs(200, num_classes=4, signal=0.5)
    write_store(Path("store"), y, x=x)
    write_store(Path("other"), y, even=x[:, ::2], odd=x[:, 1::2])
    with pytest.raises(StoreError, match="has no probe to compare with"):
        probe(store="[store,other]", **options)
    theirs = probe(store="other", **options)
    capsys.readouterr()
    ours = probe(store="[store,other]", **options)
    out, found = " ".join(capsys.readouterr().out.split()), ours["compared_store"]
    tested = predictions(layer="x", method="linear")
    mine = {row["key"]: row["true"] == row["predicted"] for row in tested}
    layers = theirs.get("layer_of_folds", [theirs["layer"]])
    others = {
        row["key"]: row["true"] == row["predicted"]
        for row in predictions("other", split="test")
        if row["layer"] == layers[int(row["fold"] or 1) - 1]
    }
    assert set(mine) == set(others)
    assert (found["rows"], found["rows_left_out"]) == (len(mine), 0)
    assert found["accuracies"] == [ours["accuracy"], theirs["accuracy"]]
    gain = np.array([int(mine[key]) - others[key] for key in mine])
    assert found["difference"] == pytest.approx(gain.mean())
    count = int((gain != 0).sum())
    assert found["p"] == pytest.approx(stats.binomtest(int((gain > 0).sum()), count).pvalue)
    low, high = found["interval"]
    assert (
        f"points, 95 % interval {100 * low:.1f} to {100 * high:.1f}. {len(mine)} test rows" in out
    )
    file = Path("other/probe/predictions.csv")
    file.write_bytes(file.read_bytes().replace(b"c1", b"c2", 1))
    with pytest.raises(StoreError, match="was changed"):
        probe(store="[store,other]", **options)


def test_stores_that_tested_another_store_are_compared_on_its_rows() -> None:
    x, y = blobs(100, num_classes=2, signal=0.5)
    keys = np.array([b"test/%03d.jpg" % i for i in range(100)])
    for number, name in enumerate(("store", "other")):
        rows = x[:, number:]
        write_store(Path(name), y, x=rows)
        run = make_labelled({"x": rows + 0.1}, y, ["c0", "c1"]).changed(number=number)
        listing = replace(run.listing, keys=keys)
        replace(run, listing=listing).write(Path(f"{name}-tested"))
    theirs = probe(store="other", test_store="other-tested", l2=0.01)
    ours = probe(store="[store,other]", test_store="store-tested", l2=0.01)
    found = ours["compared_store"]
    assert (found["rows"], found["rows_left_out"]) == (100, 0)
    assert found["accuracies"] == [ours["accuracy"], theirs["accuracy"]]


@pytest.mark.slow
def test_stores_of_other_rows_or_labels_are_not_compared() -> None:
    x, y = blobs(100, num_classes=2)
    write_store(Path("store"), y, x=x)
    write_store(Path("relabelled"), 1 - y, x=x)
    probe(store="relabelled")
    with pytest.raises(StoreMismatchError, match=r"is of the class c\d in this store and of c"):
        probe(store="[store,relabelled]")
    write_store(Path("reordered"), y, x=x)
    probe(store="reordered", test_share=0.01)
    with pytest.raises(DataError, match="has tested none of the 20 test rows"):
        probe(store="[store,reordered]", **split_without("reordered"))


def split_without(store: str) -> dict[str, str]:
    """A given split whose test rows are no test rows of a store."""
    avoided = {row["key"] for row in predictions(store, split="test")}
    keys = [f"{i:05d}.jpg" for i in range(100)]
    test = [key for key in keys if key not in avoided][:20]
    return given_split(keys, ["test" if key in test else "train" for key in keys])
