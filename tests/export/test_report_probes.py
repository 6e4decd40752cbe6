"""Metrics, seeds, differences and other tasks of job=probe on the page of job=report."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from csv_rows import csv_rows
from probe_problem import blobs, write_store
from sklearn.metrics import recall_score
from tiny_model import extract, run_job, write_image, write_images

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")


def page_of() -> str:
    """The words of the page of the store, with a space for each tag."""
    assert run_job("report", store="store", device="cpu", report={"tsne": False}) == 0
    text = Path("store/report.html").read_text(encoding="utf-8")
    text = re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", text)
    return " ".join(html.unescape(text).replace("\u202f", " ").split())


@pytest.mark.slow
def test_metrics_and_differences_are_those_of_probe_json() -> None:
    photos = write_images(Path("photos"))
    for i in range(24):  # images of noise, so that some are predicted wrong
        write_image(photos / ("cat", "dog")[i * 7 % 5 % 2] / f"noise{i}.png", 200 + i)
    extract(photos, layers=["conv", "deep", "pool"])
    run_job("probe", store="store", device="cpu", probe={"seeds": 3, "bootstrap": 100})
    words, found = page_of(), json.loads(Path("store/probe.json").read_text())
    chosen = found["seeds"]["chosen"]["accuracy"]
    over = f"Over 3 splits {100 * chosen['mean']:.1f} % ± {100 * chosen['std']:.1f}"
    assert over in words
    for name, label in (("macro_f1", "Macro-F1"), ("auroc", "AUROC"), ("log_loss", "Log-loss")):
        spread, interval = found["seeds"]["chosen"][name], found["bootstrap"]["intervals"][name]
        between = "" if interval is None else f" {interval[0]:.3f} – {interval[1]:.3f}"  # noqa: RUF001
        expected = f"{label} {found[name]:.3f}{between} {spread['mean']:.3f} ± {spread['std']:.3f}"
        assert expected in words
    for layer, test in found["paired_tests"].items():
        low, high = (-100 * edge for edge in reversed(test["interval"]))
        apart = "yes" if test["told_apart"] else "no"
        points = [f"{each:+.1f}" for each in (-100 * test["difference"], low, high)]
        first, low_text, high_text = (re.sub(r"[+-](0\.0)$", r"\1", each) for each in points)
        expected = f"{layer} {first} {low_text} to {high_text} {test['p_holm']:.2g} {apart}"
        assert expected in words
    # Errors are those of the split that is shown, not of all seeds.
    wrong = found["rows"] - found["correct"]
    assert f"{wrong} of {found['rows']} misclassified" in words
    assert Path("store/report.html").read_text(encoding="utf-8").count("<li data-true") == wrong


@pytest.mark.slow
def test_a_difference_of_0_has_no_sign() -> None:
    x, y = blobs(num_rows=60, width=8)
    write_store(Path("store"), y, a=x, b=x)
    run_job("probe", store="store", device="cpu")
    words = page_of()
    assert " b 0.0 – 1 no " in words  # noqa: RUF001
    assert "-0.0" not in words


@pytest.mark.slow
def test_errors_are_those_of_the_layer_that_each_fold_chose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Headline, check, gallery and the text of job=probe name one number of errors."""
    x, y = blobs(num_rows=150, width=8, signal=0.8)
    write_store(Path("store"), y, a=x[:, :5], b=x[:, 3:])
    run_job("probe", store="store", device="cpu", probe={"folds": 5})
    found, printed = json.loads(Path("store/probe.json").read_text()), capsys.readouterr().out
    assert set(found["layer_of_folds"]) == {"a", "b"}
    wrong = found["rows"] - found["correct"]
    of_layer = round((1 - found["layers"][found["layer"]]["linear"]["accuracy"]) * found["rows"])
    assert wrong != of_layer
    words = page_of()
    assert f"{wrong} of {found['rows']} misclassified" in words
    assert f"24 of {wrong} test images that the linear probe on the layer that its fold" in words
    assert f"errors {wrong} of {found['rows']}: " in " ".join(printed.split())


@pytest.mark.slow
def test_images_without_a_class_are_named_so() -> None:
    """Near-duplicates of which one has no label, and captions with their folders."""
    photos = write_images(Path("photos"))
    shutil.copy(photos / "cat" / "000.png", photos / "copy.png")
    extract(photos)
    words = page_of()
    assert "cat and no label , cosine 1.000" in words
    assert "cat/000.png" in words
    neighbours = words.partition("Nearest neighbours")[2].partition("Near-duplicates")[0]
    assert len(re.findall(r"(?:cat|dog)/\d+\.png", neighbours)) >= 18


@pytest.mark.slow
def test_numbers_have_a_result_of_their_own() -> None:
    x, y = blobs(90, signal=0.35)
    age = 40 + x[:, 5].astype(float) - x[:, 6]
    write_store(Path("store"), y, {"age": age}, x=x)
    run_job("probe", store="store", device="cpu", probe={"label_column": "age"})
    found, words = json.loads(Path("store/probe.json").read_text()), page_of()
    assert "R² of the linear probe of age on x" in words
    assert f"{found['r2']:.3f} {found['rows']} test images" in words
    points = re.search('class="points" d="([^"]*)"', Path("store/report.html").read_text("utf-8"))
    assert points is not None
    assert points.group(1).count("M") == found["rows"]


@pytest.mark.slow
def test_several_labels_have_a_result_of_their_own() -> None:
    x, y = blobs(90, signal=0.35)
    tags = np.char.encode(np.where(x[:, 5] > 3, "old;red", "red"))
    write_store(Path("store"), y, {"tags": tags}, x=x, odd=x[:, 1::2])
    run_job(
        "probe", store="store", device="cpu", probe={"label_column": "tags", "task": "multilabel"}
    )
    found, words = json.loads(Path("store/probe.json").read_text()), page_of()
    assert f"mAP of the linear probe of tags on the chosen layer, {found['layer']}" in words
    mine = csv_rows("store/probe/predictions.csv", layer=found["layer"])
    true, said = (np.array([float(row[f"{what}:old"]) for row in mine]) >= 0.5
                  for what in ("true", "score"))  # fmt: skip
    recall = f"{100 * recall_score(true, said):.1f}"
    assert f"old {true.sum()} {recall} %" in words


def test_a_malformed_probe_costs_its_section_and_not_the_page() -> None:
    x, y = blobs(60)
    write_store(Path("store"), y, x=x)
    run_job("probe", store="store", device="cpu")
    file = Path("store/probe.json")
    found = json.loads(file.read_text())
    del found["sha256"]  # of the content before
    for value in ("<b>", None, [], {}):
        found["layers"]["x"]["linear"]["accuracy"] = value
        file.write_text(json.dumps(found))
        words = page_of()
        assert "is not as job=probe writes it" in words
        assert "<b>" not in words
        assert "Nearest neighbours" in words
