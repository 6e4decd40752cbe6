"""Calibrated heads: temperatures against scikit-learn, and penalties on several data sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import slow_except
from probe_job import probe
from probe_problem import blobs, write_store
from safetensors.numpy import load_file
from scipy import optimize
from sklearn import datasets
from sklearn import metrics as oracle
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression

from featx.analysis.probe.heads import HIGHEST, LOWEST, fit_temperature

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")


@pytest.mark.parametrize("factor", slow_except([0.4, 1.0, 5.0], 0.4))
def test_the_temperature_is_that_of_scipy_and_scikit_learn(factor: float) -> None:
    x, y = blobs(600, num_classes=4, signal=0.5)
    model = LogisticRegression(max_iter=2000).fit(x[:300], y[:300])
    model.coef_ *= factor
    model.intercept_ *= factor
    logits = model.decision_function(x[300:])

    def loss(log_t: float) -> float:
        z = logits / np.exp(log_t)
        z = z - z.max(1, keepdims=True)
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        return oracle.log_loss(y[300:], p)

    found = fit_temperature(logits, y[300:])
    expected = optimize.minimize_scalar(loss, bounds=(-2, 2), method="bounded").x
    assert found == pytest.approx(np.exp(expected), rel=1e-3)
    scaled = CalibratedClassifierCV(FrozenEstimator(model), method="temperature")
    p = scaled.fit(x[300:], y[300:]).predict_proba(x[300:])
    z = logits / found
    z = z - z.max(1, keepdims=True)
    assert p == pytest.approx(np.exp(z) / np.exp(z).sum(1, keepdims=True), abs=2e-3)


def test_the_temperature_has_limits() -> None:
    logits = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert fit_temperature(logits, np.array([0, 1])) == pytest.approx(LOWEST)
    assert fit_temperature(logits, np.array([1, 0])) == pytest.approx(HIGHEST)


@pytest.mark.parametrize("folds", [None, 5], ids=["holdout", "kfold"])
def test_the_head_is_divided_by_the_temperature_and_classes_stay(
    folds: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = blobs(300, num_classes=4, signal=0.4)
    write_store(Path("store"), y, x=x)
    plain = probe(l2=1e-4, folds=folds)
    before = load_file("store/probe/x.safetensors")
    capsys.readouterr()
    scaled = probe(l2=1e-4, folds=folds, calibration="temperature")
    after = load_file("store/probe/x.safetensors")
    temperature = scaled["calibration_temperature"]
    assert temperature > 1.2, "a weak penalty is over-confident"
    assert after["weight"] == pytest.approx(before["weight"] / temperature, rel=1e-5)
    assert after["bias"] == pytest.approx(before["bias"] / temperature, rel=1e-5)
    assert scaled["confusion"] == plain["confusion"]
    assert scaled["log_loss"] < plain["log_loss"]
    assert f"logits divided by {temperature:.3f}" in capsys.readouterr().out
    assert "calibration_temperature" not in plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "breast_cancer"])
def test_the_penalty_with_the_smallest_loss_is_calibrated(name: str) -> None:
    """It is never much worse than the penalty with the highest accuracy, on real data."""
    made = getattr(datasets, f"load_{name}")()
    x, y = made.data[:400].astype(np.float32), made.target[:400]
    write_store(Path("store"), y, x=x)  # constant pixels of digits included
    by_loss = probe()
    sweep = by_loss["sweep"]
    assert by_loss["l2"] == min(sweep, key=lambda trial: trial["loss"])["l2"]
    accurate = max(sweep, key=lambda trial: (trial["accuracy"], -trial["loss"]))["l2"]
    by_accuracy = probe(l2=accurate)
    assert by_loss["log_loss"] <= by_accuracy["log_loss"] + 0.02
    assert by_loss["calibration_error"] <= by_accuracy["calibration_error"] + 0.02
    assert by_loss["accuracy"] >= by_accuracy["accuracy"] - 0.03
