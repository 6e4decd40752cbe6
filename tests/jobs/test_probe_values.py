"""job=probe on numbers and on several labels of a row, against scikit-learn and scipy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_store import make_labelled
from probe_job import predictions, probe
from probe_problem import blobs, write_store
from scipy import stats
from sklearn import metrics as oracle
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

import featx
from featx.analysis import head_of_store
from featx.base import WIDTH
from featx.errors import ConfigError, DataError, StoreError

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")

X, Y = blobs(300, signal=0.35)
RNG = np.random.default_rng(0)
Z = (X - X.mean(0)) / X.std(0)
AGE = 40 + 10 * Z[:, 0] - 5 * Z[:, 3] + 4 * RNG.normal(size=300)
LABELS = Z[:, :4] + 0.7 * RNG.normal(size=(300, 4)) > 0.4
NAMES = ["dog", "indoor", "night", "red"]
TAGS = [";".join(np.array(NAMES)[row]) or "none" for row in LABELS]


def lines(method: str, layer: str = "x") -> list[dict[str, str]]:
    return predictions(layer=layer, method=method)


def store_with(**columns: Any) -> None:
    made = {name: np.array(values) for name, values in columns.items()}
    made = {
        name: np.char.encode(values) if values.dtype.kind == "U" else values
        for name, values in made.items()
    }
    write_store(Path("store"), Y, made, x=X, odd=X[:, 1::2])


def test_numbers_are_ridge_regression_and_its_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    store_with(age=AGE)
    found = probe(label_column="age", task="regression", method=["linear", "knn"])
    out = capsys.readouterr().out
    about = found["layers"]["x"]["linear"]
    for method in ("linear", "knn"):
        rows = lines(method)
        true, predicted = (
            np.array([float(row[name]) for row in rows]) for name in ("true", "predicted")
        )
        each = found["layers"]["x"][method]
        assert each["r2"] == pytest.approx(oracle.r2_score(true, predicted))
        assert each["mae"] == pytest.approx(oracle.mean_absolute_error(true, predicted))
        assert each["spearman"] == pytest.approx(stats.spearmanr(true, predicted).statistic)
    rows = lines("linear")
    test = [int(row["key"].removesuffix(".jpg")) for row in rows]
    assert [float(row["true"]) for row in rows] == AGE[test].tolist()
    train = np.setdiff1d(np.arange(300), test)
    scaler = StandardScaler().fit(X[train])
    # mean |r|^2 + l2 |w|^2 is sum |r|^2 + n l2 |w|^2
    fitted = Ridge(alpha=about["l2"] * len(train)).fit(scaler.transform(X[train]), AGE[train])
    predicted = [float(row["predicted"]) for row in rows]
    assert predicted == pytest.approx(fitted.predict(scaler.transform(X[test])), rel=1e-4)
    assert about["l2"] == min(about["sweep"], key=lambda trial: trial["loss"])["l2"]
    assert found["layer"] == "x"
    assert out.startswith(f"Chosen layer: x (linear, by the validation rows). R2 {about['r2']:.3f}")
    low, high = found["interval"]
    assert low < about["r2"] < high
    expected = stats.bootstrap(
        (np.array([float(row["true"]) for row in rows]), np.array(predicted)),
        oracle.r2_score,
        paired=True,
        vectorized=False,
        n_resamples=1000,
        method="percentile",
        rng=0,
    ).confidence_interval
    assert [low, high] == pytest.approx(list(expected), abs=0.03)
    assert found["head"]["method"] == "linear"


def test_several_labels_are_one_logistic_regression_each() -> None:
    store_with(tags=TAGS)
    found = probe(label_column="tags", task="multilabel", method=["linear", "knn"])
    names = [*NAMES[:2], "night", "none", "red"]
    assert found["targets"] == names
    for method in ("linear", "knn"):
        rows, each = lines(method), found["layers"]["x"][method]
        true, scores = (
            np.array([[float(row[f"{what}{name}"]) for name in names] for row in rows])
            for what in ("true:", "score:")
        )
        expected = oracle.average_precision_score(true, scores, average="macro")
        assert each["map"] == pytest.approx(expected)
        f1 = oracle.f1_score(true, scores >= 0.5, average="macro", zero_division=0)
        assert each["macro_f1"] == pytest.approx(f1)
    rows, l2 = lines("linear"), found["layers"]["x"]["linear"]["l2"]
    test = [int(row["key"].removesuffix(".jpg")) for row in rows]
    train = np.setdiff1d(np.arange(300), test)
    scaler = StandardScaler().fit(X[train])
    for name in names:
        y = np.array([name in tags.split(";") for tags in TAGS])
        fitted = LogisticRegression(C=1 / (l2 * len(train)), tol=1e-8, max_iter=5000)
        fitted.fit(scaler.transform(X[train]), y[train])
        expected = fitted.predict_proba(scaler.transform(X[test]))[:, 1]
        assert [float(row[f"score:{name}"]) for row in rows] == pytest.approx(expected, abs=2e-4)


def test_labels_that_a_split_cannot_learn_are_named() -> None:
    tags = ["a;b" if i % 2 else "b" for i in range(300)]
    tags[4] += ";rare"
    store_with(tags=tags)
    found = probe(label_column="tags", task="multilabel", method="knn", folds=2)
    [note] = [note for note in found["notes_on_rows"] if "nothing is learnt" in note]
    assert note.startswith("2 labels are in none or in all of the training rows of a split")
    assert note.endswith(": b, rare")


def test_labels_that_are_not_learnt_choose_nothing() -> None:
    role = np.array(["train", "train", "train", "val", "test"])[np.arange(300) % 5]
    rare = [f"{tags};rare" if i in (3, 8, 13) else tags for i, tags in enumerate(TAGS)]
    store_with(tags=TAGS, rare=rare, role=role)
    plain, with_rare = (
        probe(label_column=name, task="multilabel", split="role")["layers"]["x"]["linear"]
        for name in ("tags", "rare")
    )
    for one, other in zip(plain["sweep"], with_rare["sweep"], strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_knn_averages_the_values_of_the_nearest_rows() -> None:
    store_with(age=AGE)
    probe(label_column="age", task="regression", method="knn", k=3)
    rows = lines("knn")
    test = [int(row["key"].removesuffix(".jpg")) for row in rows]
    train = np.setdiff1d(np.arange(300), test)
    unit = X / np.linalg.norm(X.astype(np.float64), axis=1, keepdims=True)
    cosines = unit[test] @ unit[train].T
    nearest = np.argsort(-cosines, axis=1)[:, :3]
    weights = np.exp(np.take_along_axis(cosines, nearest, 1) / 0.07)
    expected = (weights * AGE[train][nearest]).sum(1) / weights.sum(1)
    assert [float(row["predicted"]) for row in rows] == pytest.approx(expected, rel=1e-5)


def test_auto_never_takes_whole_numbers_as_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = np.arange(300)
    columns = {
        "flags": (numbers % 2 == 0, "flags holds booleans"),
        "digits": (numbers % 10, "digits holds 10 different whole numbers"),
        "whole_floats": ((numbers % 10).astype(float), "holds 10 different whole numbers"),
        "ages": (numbers // 10, "probe.task=regression predicts them as numbers"),
        "texts": (np.array(["a", "b", "c"])[Y], "texts holds text"),
        "shares": (AGE, "shares holds fractional numbers"),
    }
    store_with(**{name: values for name, (values, _) in columns.items()})
    for name, (_, said) in columns.items():
        found = probe(label_column=name)
        assert found["task"] == ("regression" if name == "shares" else "classification")
        assert said in found["task_reason"]
        out = " ".join(capsys.readouterr().out.split())
        assert f"task {found['task']}: {found['task_reason']}" in out


def test_labels_that_the_separator_does_not_divide_are_noted() -> None:
    store_with(tags=[tags.replace(";", "|") for tags in TAGS])
    options = {"label_column": "tags", "task": "multilabel", "method": "knn"}
    note = "no value of tags has ';', so that every row has one label"
    assert note in str(probe(**options)["notes_on_rows"])
    assert note not in str(probe(**options, label_separator="|")["notes_on_rows"])


def test_the_first_text_in_a_column_of_numbers_is_named() -> None:
    columns = {
        "one": {5: "unknown"},
        "two": {5: "unknown", 9: "?"},
        "missing": {2: "NA", 3: "nan", 5: "?", 7: ""},
        "zeros": {5: "007"},
    }
    number = {name: "" if name == "zeros" else "1.5" for name in columns}
    store_with(
        **{
            name: np.array([values.get(i, number[name]) for i in range(300)])
            for name, values in columns.items()
        }
    )
    for name, message in (
        ("one", "holds text ('unknown' in 1 of 300 rows); expected numbers with a decimal point"),
        ("two", "holds text ('unknown' and others in 2 of 300 rows)"),
        ("missing", "holds text ('?' in 1 of 300 rows)"),
        ("zeros", "holds text ('007' in 1 of 300 rows)"),
    ):
        with pytest.raises(DataError, match=re.escape(f"probe.task=regression: {name} {message}")):
            probe(label_column=name, task="regression")


def test_infinite_numbers_are_counted() -> None:
    age = AGE.copy()
    age[5:7] = np.inf, -np.inf
    store_with(age=age)
    with pytest.raises(DataError, match="age holds infinite numbers in 2 of 300 rows"):
        probe(label_column="age", task="regression")


@pytest.mark.slow
def test_whole_numbers_are_predicted_as_numbers_on_request() -> None:
    store_with(count=np.round(AGE).astype(np.int64))
    found = probe(label_column="count", task="regression", folds=3)
    assert found["r2"] > 0.5
    assert sorted({row["fold"] for row in lines("linear")}) == ["1", "2", "3"]
    assert len(lines("linear")) == 300
    assert len(found["layer_of_folds"]) == 3


def test_rows_without_a_value_and_groups() -> None:
    age = AGE.copy()
    age[5:9] = np.nan
    store_with(age=age, patient=np.arange(300) // 3)
    found = probe(label_column="age", group_column="patient")
    assert found["rows_labelled"] == 296
    assert "4 rows without a value of age left out" in found["notes_on_rows"]
    tested = {row["group"] for row in lines("linear")}
    keys = featx.open("store").keys
    patients = {int(row["key"].removesuffix(".jpg")) // 3 for row in lines("linear")}
    assert len(patients) == len(tested)
    # Whole patients are tested: each patient's rows that have a value are all there.
    there = {row["key"] for row in lines("linear")}
    for patient in patients:
        rows = [i for i in range(300) if i // 3 == patient and not np.isnan(age[i])]
        assert {keys[i] for i in rows} <= there
    assert found["unit"] == "group"


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "options", "message"),
    [
        (300, 5, {"test_share": 0.9}, "for validation, which chooses settings: 300 rows with a "
         r"value of age have a single group \(patient\) besides the test rows, .* or a smaller "
         "probe.test_share than 0.9"),
        (300, 1, {}, r"to test on: 300 rows with a value of age have a single group \(patient\), "),
        (2, 300, {}, "2 rows with a value of age are too few to be divided"),
    ],
)  # fmt: skip
def test_what_is_missing_for_a_split_is_named(
    num_rows: int, num_groups: int, options: dict[str, Any], message: str
) -> None:
    age = np.where(np.arange(300) < num_rows, AGE, np.nan)
    store_with(age=age, patient=np.arange(300) * num_groups // 300)
    with pytest.raises(DataError, match=message):
        probe(label_column="age", task="regression", group_column="patient", **options)


@pytest.mark.slow
def test_seeds_have_values_and_a_spread_of_their_own() -> None:
    store_with(age=AGE)
    found = probe(label_column="age", seeds=3)
    seeds = found["seeds"]
    for layer in ("x", "odd"):
        values = []
        for seed in "012":
            rows = [row for row in lines("linear", layer) if row["seed"] == seed]
            values.append(oracle.r2_score(*([float(row[n]) for row in rows]
                                            for n in ("true", "predicted"))))  # fmt: skip
        entry = seeds["layers"][layer]["linear"]["r2"]
        assert entry["values"] == pytest.approx(values)
        assert entry["std"] == pytest.approx(np.std(values, ddof=1))
    assert seeds["chosen"]["r2"] == seeds["layers"]["x"]["linear"]["r2"]
    first = probe(label_column="age")
    assert first["seeds"] is None
    assert (first["r2"], first["interval"]) == (found["r2"], found["interval"])


@pytest.mark.parametrize("task", ["regression", pytest.param("multilabel", marks=pytest.mark.slow)])
def test_rows_of_another_store_are_tested(task: str) -> None:
    half = slice(0, 200), slice(200, 300)
    tags = np.array([*TAGS[:299], "dog;unseen"])
    for number, (store, rows) in enumerate(zip(("store", "other"), half, strict=True)):
        columns = {"age": AGE[rows], "tags": np.char.encode(tags[rows])}
        run = make_labelled({"x": X[rows]}, Y[rows], ["c0", "c1", "c2"])
        run = replace(run, listing=replace(run.listing, columns=columns))
        run.changed(of=number).write(Path(store), packed=True)
    column = "age" if task == "regression" else "tags"
    found = probe(label_column=column, task=task, test_store="other", l2=0.01)
    assert (found["rows"], found["split"]["kind"]) == (100, "test_store")
    rows = lines("linear")
    assert [row["key"] for row in rows] == [f"{i:05d}.jpg" for i in range(100)]
    scaler = StandardScaler().fit(X[:200])
    train, test = scaler.transform(X[:200]), scaler.transform(X[200:])
    if task == "regression":
        fitted = Ridge(alpha=0.01 * 200).fit(train, AGE[:200])
        assert [float(row["true"]) for row in rows] == AGE[200:].tolist()
        said = [float(row["predicted"]) for row in rows]
        assert said == pytest.approx(fitted.predict(test), rel=1e-4)
    else:
        y = np.array(["dog" in text.split(";") for text in tags])
        fitted = LogisticRegression(C=1 / (0.01 * 200), tol=1e-8).fit(train, y[:200])
        said = [float(row["score:dog"]) for row in rows]
        assert said == pytest.approx(fitted.predict_proba(test)[:, 1], abs=2e-4)
        assert [float(row["true:dog"]) for row in rows] == y[200:].astype(float).tolist()
        assert "1 label that no training row has, such as unseen" in str(found["notes_on_rows"])


def test_a_column_of_another_kind_names_the_store() -> None:
    store_with(age=AGE)
    run = make_labelled({"x": X, "odd": X[:, 1::2]}, Y, ["c0", "c1", "c2"]).changed(of=1)
    columns = {"age": np.full(len(Y), b"old")}
    replace(run, listing=replace(run.listing, columns=columns)).write(Path("other"))
    with pytest.raises(DataError, match=r"age of .*/other holds text \('old'"):
        probe(label_column="age", task="regression", test_store="other")


@pytest.mark.slow
def test_rows_that_are_left_out_are_named_once_for_each_store() -> None:
    for number, (store, num_missing) in enumerate((("store", 4), ("other", 3))):
        age = AGE.copy()
        age[:num_missing] = np.nan
        run = make_labelled({"x": X}, Y, ["c0", "c1", "c2"])
        run = replace(run, listing=replace(run.listing, columns={"age": age}))
        run.changed(of=number).write(Path(store), packed=True)
    notes = probe(label_column="age", task="regression", test_store="other", l2=0.01)[
        "notes_on_rows"
    ]
    assert [note for note in notes if "left out" in note] == [
        "4 rows without a value of age left out",
        "probe.test_store: 3 rows without a value of age left out",
    ]


@pytest.mark.slow
def test_more_features_than_rows_and_constant_features() -> None:
    wide = RNG.normal(size=(24, 100)).astype(np.float32)
    wide[:, 7] = 3
    write_store(Path("store"), Y[:24], {"age": wide[:, 0].astype(float)}, x=wide)
    found = probe(label_column="age")
    assert found["r2"] is not None
    assert np.isfinite([float(row["predicted"]) for row in lines("linear")]).all()


def test_a_label_without_test_rows_is_not_counted() -> None:
    from featx.analysis.probe.value_task import value_metrics

    truth = np.array([[1.0, 0, 0], [0, 0, 0], [1, 1, 0]])
    scores = np.array([[0.9, 0.1, 0.3], [0.2, 0.6, 0.3], [0.8, 0.7, 0.3]])
    found, reasons = value_metrics("multilabel", truth, scores)
    assert found["map"] == 1.0
    assert reasons == {}
    assert found["macro_f1"] == pytest.approx((1 + 2 / 3) / 2)
    found, reasons = value_metrics("multilabel", np.zeros((2, 2)), scores[:2, :2])
    assert found == {"map": None, "macro_f1": None}
    assert reasons["map"] == "no test row has a label"
    found, reasons = value_metrics("regression", np.ones((3, 1)), np.array([[1.0], [2], [3]]))
    assert (found["r2"], found["spearman"], found["mae"]) == (None, None, 1.0)
    assert reasons["r2"] == "the test rows have a single value"


def test_options_that_make_no_sense() -> None:
    store_with(age=AGE)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"label_column": "age", "method": "ridge"}, "use linear, which is ridge regression"),
        ({"label_column": "age", "shots": [1]}, r"probe\.shots has an effect on classification"),
    ]
    for options, message in refused:
        with pytest.raises(ConfigError, match=message):
            probe(**options)


def test_columns_of_the_wrong_kind_are_refused() -> None:
    store_with(age=AGE, tags=TAGS, same=np.ones(300), one=["a"] * 300)
    for options, message in (
        ({"label_column": "tags", "task": "regression"}, "tags holds text .*expected numbers"),
        ({"label_column": "age", "task": "multilabel"}, "age holds numbers; expected text"),
        ({"label_column": "age", "task": "classification"}, "numbers that are not whole"),
        ({"label_column": "same", "task": "regression"}, "same is 1 in all rows"),
        ({"label_column": "one", "task": "multilabel"}, "one has 1 label divided by ';'"),
    ):
        with pytest.raises(DataError, match=message):
            probe(**options)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_the_result_fits_into_a_terminal_and_the_report_has_it(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    column = "a_column_with_quite_a_long_name_of_" + task
    long = "vision_tower.encoder.layers.encoder_layer_11.attention.out_proj"
    values = AGE if task == "regression" else np.char.encode(np.array(TAGS))
    write_store(Path("store"), Y, {column: values}, **{long: X, f"{long}.odd": X[:, 1::2]})
    probe(label_column=column, task=task, method=["linear", "knn"], folds=2)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > WIDTH] == []
    assert out.startswith("Chosen layer: ")
    featx.write_report(store="store", report={"thumbnails": 0, "tsne": False})
    page = Path("store/report.html").read_text(encoding="utf-8")
    assert f"probe of <code>{column}</code> on" in page
    metrics = page[page.index("Metrics of the layers") :]
    assert metrics[: metrics.index("</table>")].count('<th scope="row"') == 4
    assert head_of_store(Path("store"), None).is_file()


def test_a_store_that_was_probed_for_numbers_is_not_compared() -> None:
    store_with(age=AGE)
    write_store(Path("classes"), Y, x=X)
    probe(label_column="age")
    with pytest.raises(StoreError, match=r"is of probe\.task=regression"):
        probe(store="[classes,store]")
    with pytest.raises(ConfigError, match=r"compares classes of two stores; this is regression"):
        probe(store="[store,classes]", label_column="age")
