"""Metrics of pixels against scikit-learn and a plain bootstrap, and fits on counts of classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from probe_problem import blobs
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix, jaccard_score, recall_score
from sklearn.preprocessing import StandardScaler

from featx.analysis.probe.logistic_regression import fit_logistic
from featx.analysis.probe.patches import PixelCounts, segmentation_metrics
from featx.analysis.probe.pixel_task import pixel_interval

pytestmark = pytest.mark.usefixtures("one_thread")

RNG = np.random.default_rng(1)
TRUE, SAID = RNG.integers(0, 5, (7, 400)), RNG.integers(0, 6, (7, 400))


def counted() -> PixelCounts:
    counts = PixelCounts.empty(7, 6)
    for row in range(7):
        counts.add(counts.pixels[row], TRUE[row], SAID[row], counts.confusion)
        counts.add(counts.patches[row], TRUE[row], SAID[row])
    return counts


def test_confusion_and_metrics_are_scikit_learns() -> None:
    counts, true, said = counted(), TRUE.ravel(), SAID.ravel()
    assert np.array_equal(counts.confusion, confusion_matrix(true, said, labels=range(6)))
    found = segmentation_metrics(counts)
    expected = jaccard_score(true, said, labels=range(5), average=None)
    assert found["iou"][:5] == pytest.approx(expected.tolist(), abs=1e-12)
    assert found["iou"][5] is None  # a class that is predicted and in no mask
    assert found["miou"] == pytest.approx(float(expected.mean()), abs=1e-12)
    assert found["patch_miou"] == found["miou"]
    assert found["pixel_accuracy"] == pytest.approx(float((true == said).mean()), abs=1e-12)
    recall = recall_score(true, said, labels=range(5), average="macro")
    assert found["mean_accuracy"] == pytest.approx(recall, abs=1e-12)
    joined = PixelCounts.join([counts, counts])
    assert np.array_equal(joined.confusion, 2 * counts.confusion)
    assert len(joined.pixels) == 14


def test_nothing_to_count_is_none() -> None:
    found = segmentation_metrics(PixelCounts.empty(2, 3))
    assert found["miou"] is found["pixel_accuracy"] is found["mean_accuracy"] is None
    assert found["iou"] == [None] * 3


@pytest.mark.parametrize("groups", [None, np.array([0, 0, 1, 1, 2, 3, 3])])
def test_the_interval_draws_images_or_groups(groups: np.ndarray | None) -> None:
    found = pixel_interval(counted().pixels, groups)
    units = np.arange(7) if groups is None else groups
    each = [
        confusion_matrix(true, said, labels=range(6)) for true, said in zip(TRUE, SAID, strict=True)
    ]
    rng, values = np.random.default_rng(7), []
    for _ in range(800):
        drawn = rng.integers(units.max() + 1, size=units.max() + 1)
        rows = np.concatenate([np.flatnonzero(units == unit) for unit in drawn])
        matrix = sum(each[row] for row in rows)
        right = np.diag(matrix)[:5]
        values.append((right / (matrix.sum(0) + matrix.sum(1) - np.diag(matrix))[:5]).mean())
    assert found["interval"] == pytest.approx(np.quantile(values, [0.025, 0.975]), abs=0.004)
    assert found["units"] == units.max() + 1
    assert found["unit"] == ("image" if groups is None else "group")
    assert pixel_interval(counted().pixels[:1], None)["interval"] is None


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("l2", [1e-1, 1e-3])
def test_counts_weigh_as_the_rows_that_they_stand_for(l2: float, last: bool) -> None:
    x, _ = blobs()
    x = StandardScaler().fit_transform(x).astype(np.float32)
    counts = RNG.integers(0, 30, (len(x), 3)) * (x[:, :3] > -0.5)
    counts[0] = [5, 0, 0]
    kept = counts.any(1)
    x, counts = x[kept], counts[kept]
    given = torch.from_numpy(counts.astype(np.float32))
    fit = fit_logistic(torch.from_numpy(x), given, 3, l2, last=last)
    assert fit.converged
    oracle = LogisticRegression(C=1 / (l2 * counts.sum()), tol=1e-9, max_iter=5000)
    weights, y = counts.ravel().astype(float), np.tile(np.arange(3), len(x))
    oracle.fit(np.repeat(x, 3, 0), y, sample_weight=weights)
    atol = 2e-4 if last else 2e-4 / l2
    assert np.allclose(fit.weight.numpy(), oracle.coef_, atol=atol)
    bias = fit.bias.numpy()
    mean = oracle.intercept_.mean()
    assert np.allclose(bias - bias.mean(), oracle.intercept_ - mean, atol=max(atol, 1e-3))
