"""job=mislabelled: planted wrong labels, against scikit-learn, plain numpy and cleanlab."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from csv_rows import csv_rows
from made_store import make_labelled
from probe_problem import blobs, write_store
from tiny_model import job_result, run_job

import featx
from featx.analysis.probe.mislabelled import confident_labels
from featx.errors import ConfigError, DataError
from featx.similarity import judge_labels
from featx.store import read_result, result_json

pytestmark = pytest.mark.usefixtures("in_tmp_path")

PLANTED = (4, 31, 77, 102, 140, 199)
"""Rows whose label is replaced by the next class."""


def planted_store(**options: Any) -> np.ndarray:
    """Write a store of three clouds with some wrong labels; returns the labels as written."""
    x, y = blobs(num_rows=210, signal=2.0)
    given = y.copy()
    given[list(PLANTED)] = (y[list(PLANTED)] + 1) % 3
    write_store(Path("store"), given, failed=(8,), x=x, **options)
    return given


def ask(**options: Any) -> Any:
    keys: dict[str, Any] = {"layers": "x", "device": "cpu"}
    return job_result("mislabelled", store="store", **keys, **options)


def test_planted_labels_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    planted_store()
    summary = ask()
    assert len(summary["least_credible"]) == 10
    first = {one["row"] for one in summary["least_credible"][:6]}
    assert first == set(PLANTED)
    lines = csv_rows("store/mislabelled/mislabelled.csv")
    assert [line["rank"] for line in lines] == [str(i) for i in range(1, 210)]
    confidences = [float(line["p_label"]) for line in lines]
    assert confidences == sorted(confidences)
    assert "8" not in {line["row"] for line in lines}
    doubtful = {int(line["row"]) for line in lines if line["doubtful"]}
    assert len(doubtful) == summary["doubtful"]
    assert len(doubtful & first) >= 4
    assert len(doubtful - first) <= 1
    assert summary["notes"] == ["1 failed row is left out"]
    run_job("mislabelled", store="store", layers="x", device="cpu")
    assert "least credible label" in capsys.readouterr().out


@pytest.mark.slow
def test_probabilities_are_those_of_the_probe() -> None:
    """The same folds, penalties and probabilities as job=probe with probe.folds."""
    planted_store()
    options = {"folds": 4}
    assert run_job("probe", store="store", layers="x", device="cpu", seed=3, probe=options) == 0
    judged = judge_labels(featx.open("store"), "x", 4, seed=3, device="cpu")
    tested = {line["key"]: line for line in csv_rows("store/probe/predictions.csv")}
    keys = featx.open("store").keys
    assert len(tested) == len(judged.rows)
    for place, row in enumerate(judged.rows.tolist()):
        line = tested[str(keys[row])]
        assert float(line["p_true"]) == pytest.approx(judged.confidences[place], abs=1e-12)


def doubtful_by_hand(labels: Sequence[int], probabilities: np.ndarray) -> list[bool]:
    """Confident learning, written out: one row after the other."""
    classes, pairs = range(probabilities.shape[1]), list(zip(labels, probabilities, strict=True))
    of_class = {j: [p[j] for label, p in pairs if label == j] for j in classes}
    found = []
    for label, p in pairs:
        confident = [
            j for j in classes if of_class[j] and p[j] >= sum(of_class[j]) / len(of_class[j])
        ]
        guess = max(confident, key=lambda j: p[j]) if confident else label
        found.append(guess != label and p[label] < max(p))
    return found


def random_labels(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of 300 rows, and the probabilities of 4 classes."""
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(4, 0.5), 300)
    labels = np.where(rng.random(300) < 0.7, probabilities.argmax(1), rng.integers(0, 4, 300))
    return labels, probabilities


def judged_in_blocks(labels: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, ...]:
    order = np.random.default_rng(0).permutation(300)
    places = [np.sort(some) for some in np.array_split(order, 7)]
    return confident_labels(labels, 4, lambda: [(each, probabilities[each]) for each in places])


@pytest.mark.parametrize("seed", range(3))
def test_doubtful_labels_are_those_by_hand(seed: int) -> None:
    labels, probabilities = random_labels(seed)
    confidences, predicted, p_predicted, are_doubtful = judged_in_blocks(labels, probabilities)
    expected = doubtful_by_hand(labels.tolist(), probabilities)
    assert are_doubtful.tolist() == expected
    assert confidences.tolist() == probabilities[np.arange(300), labels].tolist()
    assert predicted.tolist() == probabilities.argmax(1).tolist()
    assert p_predicted.tolist() == probabilities.max(1).tolist()
    assert any(expected)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_ranking_of_cleanlab(seed: int) -> None:
    pytest.importorskip("cleanlab")
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    labels, probabilities = random_labels(seed)
    confidences, _, _, are_doubtful = judged_in_blocks(labels, probabilities)
    scores = get_label_quality_scores(labels, probabilities, method="self_confidence")
    assert confidences.tolist() == scores.tolist()
    issues = find_label_issues(labels, probabilities, filter_by="confident_learning", n_jobs=1)
    assert are_doubtful.tolist() == issues.tolist()


@pytest.mark.slow
def test_classes_of_one_row_are_left_out() -> None:
    x, y = blobs(num_rows=60)
    y[17] = 3
    write_store(Path("store"), y, x=x)
    judged = judge_labels(featx.open("store"), "x", device="cpu")
    assert 17 not in judged.rows.tolist()
    assert len(judged.rows) == 59
    assert np.isfinite(judged.confidences).all()
    assert judged.notes == ("1 class with a single row is trained on and never tested",)
    assert not np.isnan(judged.are_doubtful).any()


@pytest.mark.parametrize("job", ["probe", "mislabelled"])
def test_probabilities_that_do_not_fit_into_memory_are_refused(
    job: str, set_free_memory: Callable[..., None]
) -> None:
    planted_store()
    set_free_memory(10.0)
    with pytest.raises(ConfigError, match=r"The probabilities of 3 classes take .* 10 B of memory"):
        run_job(job, store="store", layers="x", device="cpu")


def test_the_votes_for_every_number_of_neighbours_count_as_memory(
    set_free_memory: Callable[..., None],
) -> None:
    planted_store()
    sizes = []
    for options in ({}, {"k": 5}):
        set_free_memory(10.0)
        with pytest.raises(ConfigError, match=r"The probabilities of 3 classes take") as refused:
            run_job(
                "probe", store="store", layers="x", device="cpu", probe={"method": "knn", **options}
            )
        sizes.append(float(re.search(r"take ([0-9.]+) KiB", str(refused.value))[1]))
    assert sizes[0] > 2 * sizes[1]


def test_other_labels_are_refused() -> None:
    x, y = blobs(num_rows=60)
    columns = {
        "share": np.linspace(0, 1, 60),
        "several": np.array([b"dog;cat", b"dog"] * 30),
        "same": np.array([b"dog"] * 60),
    }
    write_store(Path("store"), y, columns, x=x)
    for column, words in (
        ("share", "a number with a fraction"),
        ("several", "several labels, such as 'dog;cat'"),
        ("same", "of the class 'dog' only"),
    ):
        with pytest.raises(DataError, match=words):
            ask(probe={"label_column": column})


@pytest.mark.slow
def test_a_folder_named_by_two_words_is_one_class() -> None:
    x, y = blobs(num_rows=60)
    make_labelled({"x": x}, y, ["a;b", "dog;cat", "c"]).write(Path("store"))
    ask()
    assert {line["label"] for line in csv_rows("store/mislabelled/mislabelled.csv")} >= {"a;b"}


@pytest.mark.slow
def test_labels_of_a_column() -> None:
    x, y = blobs(num_rows=60, signal=2.0)
    write_store(Path("store"), y[::-1].copy(), {"column": y}, x=x)
    assert ask(probe={"label_column": "column"})["accuracy"] > 0.9


def test_too_many_folds() -> None:
    x, y = blobs(num_rows=6)
    write_store(Path("store"), y, x=x)
    with pytest.raises(ConfigError, match=r"probe.folds=20: 6 labelled rows of 3 classes cannot"):
        ask(probe={"folds": 20})


def test_folds_of_one_image_are_refused_with_its_groups() -> None:
    run = make_labelled({"x": blobs(num_rows=40)[0]}, np.arange(40) % 2, ["a", "b"])
    keys = np.array([b"0.jpg#%d,0,9,9" % i for i in range(40)])
    replace(run, listing=replace(run.listing, keys=np.sort(keys))).write(Path("store"))
    with pytest.raises(ConfigError, match=r"in 1 group \(image; a group stays whole\) cannot"):
        ask()


def page_of() -> str:
    options = {"tsne": False, "thumbnails": 0}
    return Path(featx.write_report(store="store", device="cpu", report=options)).read_text()


@pytest.mark.slow
def test_the_report_shows_both_rankings() -> None:
    planted_store()
    assert "Odd images and labels" not in page_of()
    ask()
    assert run_job("outliers", json=True, store="store", layers="x", device="cpu") == 0
    page = page_of()
    for line in csv_rows("store/mislabelled/mislabelled.csv")[:6]:
        p_label, p_predicted = float(line["p_label"]), float(line["p_predicted"])
        caption = f"{line['label']} {p_label:.3f}, predicted {line['predicted']} {p_predicted:.3f}"
        assert caption in page
    far = csv_rows("store/outliers/outliers.csv")[0]
    assert f"{far['class']}, {float(far['distance']):.3f}" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows_sha256": "another"}, "belongs to another state"),
        ({"least_credible": [{"row": 99999, "key": "a"}]}, "left out: IndexError"),
    ],
)
def test_the_report_leaves_out_other_results(
    change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planted_store()
    ask()
    path = Path("store/mislabelled/mislabelled.json")
    path.write_bytes(result_json({**read_result(path), **change}, 1))
    assert "Odd images and labels" not in page_of()
    assert words in capsys.readouterr().err
