"""Few-shot probes: every printed number follows from few_shot.csv, also by fits of scikit-learn."""

from __future__ import annotations

import csv
import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import slow_except
from probe_job import probe
from probe_problem import blobs, write_store
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")

X, Y = blobs(90, signal=0.3)


@pytest.mark.parametrize(
    "options",
    slow_except([{}, {"seeds": 2}, {"folds": 3, "seeds": 4}], {"seeds": 2}),
)
def test_accuracies_follow_from_the_rows_of_each_draw(options: dict[str, Any]) -> None:
    write_store(Path("store"), Y, x=X, half=X[:, :9])
    found = probe(method=["linear", "knn"], shots=[2, 5], **options)
    data = Path("store/probe/few_shot.csv").read_bytes()
    named = found["few_shot_predictions"]
    assert named["file"] == "probe/few_shot.csv"
    assert named["sha256"] == hashlib.sha256(data).hexdigest()
    rows = list(csv.DictReader(data.decode().splitlines()))
    for layer, x in (("x", X), ("half", X[:, :9])):
        for method in ("linear", "knn"):
            for shots in ("2", "5"):
                about = found["layers"][layer][method]["few_shot"][shots]
                accuracies = []
                for draw in range(1, options.get("seeds", 5) + 1):
                    same = [r for r in rows if (r["shots"], r["draw"]) == (shots, str(draw))]
                    train = [int(r["key"][:5]) for r in same if r["split"] == "train"]
                    of_layer = [r for r in same if (r["layer"], r["method"]) == (layer, method)]
                    test = [int(r["key"][:5]) for r in of_layer]
                    assert {r["split"] for r in of_layer} == {"test"}
                    assert not set(train) & set(test)
                    assert np.bincount(Y[train]).max() == int(shots)
                    assert [r["true"] for r in of_layer] == [f"c{Y[i]}" for i in test]
                    assert len(train) == about["rows"][draw - 1]
                    accuracies.append(np.mean([r["true"] == r["predicted"] for r in of_layer]))
                    if method == "linear":
                        scaler = StandardScaler().fit(x[train])
                        oracle = LogisticRegression(C=1, tol=1e-8, max_iter=5000)
                        oracle.fit(scaler.transform(x[train]), Y[train])
                        said = oracle.predict(scaler.transform(x[test]))
                        assert [r["predicted"] for r in of_layer] == [f"c{i}" for i in said]
                assert about["mean"] == pytest.approx(np.mean(accuracies), abs=1e-12)
                assert about["std"] == pytest.approx(np.std(accuracies, ddof=1), abs=1e-12)


def test_shots_that_the_classes_do_not_have_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """80 % of 30 and of 10 rows are for training."""
    places = np.concatenate([np.flatnonzero(Y == 0)[:30], np.flatnonzero(Y == 1)[:10]])
    write_store(Path("store"), Y[places], x=X[places])
    found = probe(method="ridge", shots=[2, 10, 100])
    entry = found["few_shot"]
    assert [entry[shots]["rows_per_class"] for shots in ("2", "10", "100")] == [
        [2, 2], [8, 10], [8, 24],
    ]  # fmt: skip
    out = " ".join(capsys.readouterr().out.split())
    assert len(re.findall(r"\d ± \d", out)) == 2, "100 a class are one draw"
    assert "\n2 a class:" not in out
    assert "10 a class: some classes have fewer training rows, 8 at least." in out
    assert (
        "100 a class: no class has so many training rows; all of them are taken, 8 to 24 a class."
    ) in out
    assert [len(entry[shots]["values"]) for shots in ("2", "10", "100")] == [5, 5, 1]
    assert entry["100"]["std"] is None


@pytest.mark.slow
def test_a_probe_without_shots_removes_the_file_of_an_earlier_one() -> None:
    write_store(Path("store"), Y, x=X)
    probe(shots=1)
    assert Path("store/probe/few_shot.csv").exists()
    assert "few_shot_predictions" not in probe()
    assert not Path("store/probe/few_shot.csv").exists()
