"""Heads of numbers and of several labels: job=predict gives new images what the probe computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from csv_rows import csv_rows
from probe_job import predictions
from safetensors.numpy import load_file
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler
from tiny_model import TRUSTED, extract, run_job, write_images

import featx
from featx.analysis import head_of_store
from featx.analysis.probe.heads import read_head
from featx.errors import StoreError

pytestmark = pytest.mark.usefixtures("in_tmp_path")

ROWS = 40
RNG = np.random.default_rng(0)
AGES = np.round(RNG.normal(40, 10, ROWS), 2)
BORN = 1_700_000_000
LABELS = RNG.random((ROWS, 3)) < 0.5
NAMES = ("dog", "night", "red")


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, and their store with a column of numbers and one of labels."""
    root = tmp_path_factory.mktemp("made")
    photos = write_images(root / "photos", ROWS)
    table = ["path,age,born,tags"]
    for row, path in enumerate(sorted(photos.rglob("*.png"))):
        tags = ";".join(np.array(NAMES)[LABELS[row]]) or "none"
        table.append(f"{path.relative_to(photos)},{AGES[row]},{BORN + AGES[row]:.2f},{tags}")
    (photos / "rows.csv").write_text("\n".join(table) + "\n")
    data = {"name": "table", "root": str(photos / "rows.csv"), "columns": ["age", "born", "tags"]}
    extract(data, layers=["conv", "pool"], out=str(root / "store"), part_rows=64)
    return root


@pytest.fixture
def photos(extracted: Path, in_tmp_path: None) -> Path:
    shutil.copytree(extracted / "store", "store")
    return extracted / "photos"


def predicted(photos: Path, code: int = 0) -> list[dict[str, str]]:
    data = {"name": "folder", "root": str(photos)}
    keys = {"model": TRUSTED, "store": "store", "out": "new", "device": "cpu", "layers": "pool"}
    assert run_job("predict", data=data, **keys) == code
    return csv_rows("new/predictions.csv")


@pytest.mark.parametrize(
    ("column", "origin"), [pytest.param("age", 0, marks=pytest.mark.slow), ("born", BORN)]
)
def test_numbers_of_new_images_are_those_of_the_probe(
    column: str, origin: int, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers far from 0, such as times, keep their digits."""
    options = {"label_column": column, "task": "regression", "l2": 0.1}
    run_job("probe", store="store", device="cpu", probe=options)
    assert "job=predict" in capsys.readouterr().out
    Path("new").mkdir()
    Path("new/predictions.html").write_text("of an earlier run")
    rows = predicted(photos)
    assert list(rows[0]) == ["key", "predicted", "status", "reason"]
    assert not Path("new/predictions.html").exists()
    assert f"predicted {column}" in capsys.readouterr().out
    of_key = {row["key"]: float(row["predicted"]) - origin for row in rows}
    tested = predictions(layer="pool")
    assert len(tested) == 8
    for row in tested:
        expected = float(row["predicted"]) - origin
        assert of_key[row["key"]] == pytest.approx(expected, rel=1e-4)
    store = featx.open("store")
    x = store["pool"][:].reshape(ROWS, -1).astype(np.float64)
    train = ~np.isin(store.keys, [row["key"] for row in tested])
    scaler = StandardScaler().fit(x[train])
    oracle = Ridge(alpha=0.1 * train.sum()).fit(scaler.transform(x[train]), AGES[train])
    assert [of_key[key] for key in store.keys] == pytest.approx(
        oracle.predict(scaler.transform(x)), rel=1e-3
    )


def test_labels_of_new_images_are_those_of_the_probe(photos: Path) -> None:
    options = {"label_column": "tags", "task": "multilabel", "folds": 2}
    run_job("probe", store="store", device="cpu", seed=1, probe=options)
    found = json.loads(Path("store/probe.json").read_text())
    about = found["layers"]["pool"]["linear"]
    assert about["head_fitted_on"] == "all labelled rows"
    shutil.copytree(photos, "fresh")
    Path("fresh/bad.png").write_bytes(b"no image")
    rows = predicted(Path("fresh"), code=3)
    names = found["targets"]
    assert list(rows[0])[:4] == ["key", "labels", "status", "reason"]
    bad = next(row for row in rows if row["key"] == "bad.png")
    assert (bad["labels"], bad[f"score:{names[0]}"]) == ("", "")
    assert bad["reason"]
    scores = {
        row["key"]: [float(row[f"score:{name}"]) for name in names] for row in rows if row != bad
    }
    store = featx.open("store")
    x = store["pool"][:].reshape(ROWS, -1).astype(np.float64)
    x = StandardScaler().fit_transform(x)
    truth = np.column_stack([LABELS, ~LABELS.any(1)])[:, [NAMES.index("dog"), 1, 3, 2]]
    assert names == ["dog", "night", "none", "red"]
    for label, y in enumerate(truth.T):
        oracle = LogisticRegression(C=1 / (about["head_l2"] * ROWS), tol=1e-8, max_iter=5000)
        expected = oracle.fit(x, y).predict_proba(x)[:, 1]
        assert [scores[key][label] for key in store.keys] == pytest.approx(expected, abs=1e-3)
    for row in rows:
        if row != bad:
            said = [name for name, score in zip(names, scores[row["key"]], strict=True)
                    if score >= 0.5]  # fmt: skip
            assert row["labels"] == ";".join(said)


def test_a_head_says_its_task_and_readers_of_classes_refuse_it(photos: Path) -> None:
    options = {"label_column": "tags", "task": "multilabel", "l2": 0.1}
    run_job("probe", store="store", device="cpu", probe=options)
    path = head_of_store(Path("store"), "pool")
    head, about = read_head(path, torch.device("cpu"))
    # A reader of version 1 would apply the softmax to labels that do not exclude each other.
    assert (about["featx_head"], about["task"], head.task) == (3, "multilabel", "multilabel")
    tensors = load_file(path)
    x = featx.open("store")["pool"][:].reshape(ROWS, -1).astype(np.float64)
    logits = (x - tensors["mean"]) / tensors["scale"] @ tensors["weight"].T + tensors["bias"]
    assert head.scores(torch.from_numpy(x).float()).numpy() == pytest.approx(
        1 / (1 + np.exp(-logits)), abs=1e-5
    )


def test_a_head_of_another_probe_than_probe_json_names_is_refused(photos: Path) -> None:
    options = {"label_column": "age", "task": "regression"}
    run_job("probe", store="store", device="cpu", probe=options)
    before = Path("store/probe.json").read_bytes()
    run_job("probe", store="store", device="cpu", probe={**options, "l2": 1.0})
    # As a probe that was killed after it had replaced the heads and before probe.json.
    Path("store/probe.json").write_bytes(before)
    with pytest.raises(StoreError, match=r"is not the head that .*probe\.json names"):
        predicted(photos)
