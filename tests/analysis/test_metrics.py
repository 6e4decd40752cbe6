"""Metrics, also of many resamples at once, against scikit-learn, scipy and numbers by hand."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from conftest import slow_except
from sklearn import metrics as oracle
from sklearn.calibration import calibration_curve
from sklearn.metrics import confusion_matrix

from featx.analysis.probe.class_metrics import (
    bootstrap_entry,
    prediction_metrics,
    weighted_metrics,
)
from featx.analysis.probe.metrics import CLASS_METRICS, ProbePredictions, drawn_counts, wilson
from featx.analysis.probe.patches import PixelCounts
from featx.analysis.probe.pixel_task import pixel_interval

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn_predictions(
    rows: int, classes: int, probabilities: bool = True, ties: bool = False, untested: int = 0
) -> ProbePredictions:
    """Predictions that are better than chance; no row is of the last `untested` classes."""
    rng = np.random.default_rng(0)
    y = rng.integers(classes - untested, size=rows)
    scores = rng.normal(size=(rows, classes))
    scores[np.arange(rows), y] += 1
    if probabilities:
        scores = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return ProbePredictions.of_scores(y, scores.round(1) if ties else scores, probabilities)


def test_numbers_of_each_class_are_scikit_learns() -> None:
    predictions = drawn_predictions(400, 8, untested=1)
    y, predicted = predictions.y, predictions.predicted
    found = prediction_metrics(predictions)
    labels = list(range(8))
    tested = labels[:7]
    recall = oracle.recall_score(y, predicted, labels=tested, average=None)
    assert found["recall"][:7] == pytest.approx(recall.tolist())
    assert found["recall"][7] is None
    precision = oracle.precision_score(y, predicted, labels=labels, average=None, zero_division=0)
    assert found["precision"] == pytest.approx(precision.tolist())
    assert found["confusion"] == oracle.confusion_matrix(y, predicted, labels=labels).tolist()
    assert found["support"] == np.bincount(y, minlength=8).tolist()
    assert found["correct"] == (predicted == y).sum()


@pytest.mark.parametrize(("num_classes", "has_one"), [(1000, True), (1001, False)])
def test_many_classes_have_no_confusion_matrix(num_classes: int, has_one: bool) -> None:
    predictions = drawn_predictions(400, num_classes)
    found = prediction_metrics(predictions)
    assert (found["confusion"] is not None) == has_one
    assert found["correct"] == (predictions.predicted == predictions.y).sum()


def test_resamples_of_many_classes_are_taken_a_few_at_a_time(
    set_block_sizes: Callable[..., None],
) -> None:
    predictions = drawn_predictions(40, 200)
    expected = bootstrap_entry(predictions, 30)
    whole = [*drawn_counts(np.arange(40), 30, 200)]
    set_block_sizes(16 * 2000)
    assert bootstrap_entry(predictions, 30) == expected
    parts = [*drawn_counts(np.arange(40), 30, 200)]
    assert [len(part) for part in parts] == [10, 10, 10]
    assert np.array_equal(np.concatenate(parts), np.concatenate(whole))


def test_calibration_error_by_hand() -> None:
    predictions = drawn_predictions(400, 8)
    y, scores = predictions.y, predictions.scores.copy()
    scores[0] = np.eye(8)[0] * (1 + 1e-12)  # votes that sum to more than 1 by rounding
    assert 0 < calibration_error(y, scores) < 1
    # Two rows at 0.9, one of them right: |0.5 - 0.9|; two at 0.6, both right: |1 - 0.6|.
    scores = np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    assert calibration_error(np.array([0, 1, 0, 0]), scores) == pytest.approx(0.4)
    # All rows right, and all wrong: the confidence is off by 0.25 and 0.75 on average.
    assert calibration_error(np.zeros(4, int), scores) == pytest.approx(0.25)
    assert calibration_error(np.ones(4, int), scores) == pytest.approx(0.75)


def calibration_error(y: np.ndarray, scores: np.ndarray) -> float:
    found = prediction_metrics(ProbePredictions.of_scores(y, scores, True))
    assert found["calibration_bins"] == 15
    return float(found["calibration_error"])


@pytest.mark.parametrize(
    ("correct", "count", "expected"),
    # scipy.stats.binomtest(correct, count).proportion_ci(method="wilson")
    [
        (0, 10, (0.0, 0.2775327999)),
        (10, 10, (0.7224672001, 1.0)),
        (430, 478, (0.8693712074, 0.9234206809)),
        (1, 2, (0.0945312057, 0.9054687943)),
    ],
)
def test_wilson(correct: int, count: int, expected: tuple[float, float]) -> None:
    assert wilson(correct / count, count) == pytest.approx(expected, abs=1e-9)


def test_top_k_does_not_count_classes_by_their_place_in_the_alphabet() -> None:
    def top5(y: list[int], scores: np.ndarray, most_ranked: int | None = None) -> float | None:
        predictions = ProbePredictions.of_scores(np.array(y), scores, True, most_ranked=most_ranked)
        found: float | None = prediction_metrics(predictions)["top5"]
        return found

    scores = np.zeros((2, 6))
    assert top5([4, 5], scores) == 0
    assert top5([0, 1], scores) == 0
    scores[:, 2:] = 0.25
    assert top5([4, 5], scores) == 1
    assert top5([0, 5], scores) == 0.5
    assert top5([0, 5], scores, most_ranked=4) is None
    five = prediction_metrics(ProbePredictions.of_scores(np.array([0, 4]), np.eye(5)[[0, 4]], True))
    assert five["top5"] is None


def of_scikit_learn(predictions: ProbePredictions) -> dict[str, float]:
    """The metrics that are defined."""
    y, scores, predicted = predictions.y, predictions.scores, predictions.predicted
    labels, tested, rows = np.arange(scores.shape[1]), np.unique(y), np.arange(len(y))
    metrics = {
        "accuracy": oracle.accuracy_score(y, predicted),
        "balanced_accuracy": oracle.recall_score(y, predicted, labels=tested, average="macro"),
        "macro_f1": oracle.f1_score(y, predicted, average="macro", zero_division=0),
    }
    if len(labels) > 5 and (predictions.most_ranked or 5) >= 5:
        # Ties count against a row: scikit-learn ranks equal scores by the place of their classes.
        lowered = scores.copy()
        lowered[rows, y] = np.nextafter(scores[rows, y], -np.inf)
        metrics["top5"] = oracle.top_k_accuracy_score(y, lowered, k=5, labels=labels)
    if len(tested) > 1:
        areas = [oracle.roc_auc_score(y == label, scores[:, label]) for label in tested]
        metrics |= {"auroc": np.mean(areas), "kappa": oracle.cohen_kappa_score(y, predicted)}
        if len(np.unique(predicted)) > 1:
            metrics["mcc"] = oracle.matthews_corrcoef(y, predicted)
    if predictions.p_true is not None:
        if (predictions.p_true > 0).all():
            metrics["log_loss"] = oracle.log_loss(y, scores, labels=labels)
        confidence, edges = scores.max(1), np.linspace(0, 1, 16)[1:-1]
        share, middle = calibration_curve(predicted == y, confidence, n_bins=15, pos_label=True)
        counts = np.bincount(np.searchsorted(edges, confidence))
        metrics["calibration_error"] = np.abs(share - middle) @ counts[counts > 0] / len(y)
    return metrics


def check(predictions: ProbePredictions, drawn: np.ndarray) -> None:
    """Compare all metrics of resamples, given as (b, n) rows, with those of the drawn rows."""
    count = len(predictions.y)
    weights = np.array([np.bincount(rows, minlength=count) for rows in drawn], np.float64)
    found = weighted_metrics(predictions, weights)
    assert tuple(found) == CLASS_METRICS
    for i, rows in enumerate(drawn):
        of_rows = ProbePredictions.of_scores(
            predictions.y[rows],
            predictions.scores[rows],
            predictions.p_true is not None,
            None,
            predictions.most_ranked,
        )
        expected, of_one_test = of_scikit_learn(of_rows), prediction_metrics(of_rows)
        assert set(CLASS_METRICS) - set(expected) == set(of_one_test["not_available"])
        for name in CLASS_METRICS:
            value = pytest.approx(expected.get(name, math.nan), rel=1e-12, abs=1e-14, nan_ok=True)
            assert found[name][i] == value, name
            assert (math.nan if of_one_test[name] is None else of_one_test[name]) == value, name


@pytest.mark.parametrize(
    ("classes", "rows"), slow_except([(2, 12), (3, 60), (9, 40)], (2, 12), (9, 40))
)
@pytest.mark.parametrize("probabilities", [True, False])
def test_they_are_those_of_the_drawn_rows(classes: int, rows: int, probabilities: bool) -> None:
    drawn = np.random.default_rng(1).integers(rows, size=(10, rows))
    check(drawn_predictions(rows, classes, probabilities), drawn)


@pytest.mark.slow
def test_ties_few_ranked_classes_and_probabilities_of_0() -> None:
    drawn = np.random.default_rng(1).integers(30, size=(20, 30))
    tied = drawn_predictions(30, 8, probabilities=False, ties=True)
    check(tied, drawn)
    check(ProbePredictions.of_scores(tied.y, tied.scores, False, None, 3), drawn)
    sure = drawn_predictions(30, 8)
    scores = sure.scores.copy()
    scores[4, sure.y[4]] = 0
    scores[4] /= scores[4].sum()
    never = ProbePredictions.of_scores(sure.y, scores, True)
    check(never, drawn)
    assert {len(np.unique(rows == 4)) for rows in drawn} == {1, 2}, "with and without the row"


def test_resamples_of_one_class_or_one_prediction() -> None:
    predictions = drawn_predictions(6, 3)
    y = predictions.y
    rows = np.array([np.full(6, 2), *(np.full(6, i) for i in (0, 5)), np.arange(6)])
    check(predictions, rows)
    same = np.where(y == y[0])[0]
    check(predictions, np.array([np.resize(same, 6)]))
    one = ProbePredictions.of_scores(y, np.tile([0.8, 0.1, 0.1], (6, 1)), True)
    check(one, rows)
    assert prediction_metrics(one)["precision"] == [(y == 0).mean(), None, None]


def test_the_resamples_are_those_of_a_loop() -> None:
    """Blocks of resamples draw the numbers that one resample after the other would draw."""
    predictions = drawn_predictions(40, 3)
    groups = np.arange(40) // 4
    grouped = ProbePredictions.of_scores(predictions.y, predictions.scores, True, groups)
    rng, values = np.random.default_rng(0), []
    for _ in range(60):
        drawn = rng.integers(10, size=10)
        rows = np.concatenate([np.flatnonzero(groups == unit) for unit in drawn])
        values.append(
            prediction_metrics(
                ProbePredictions.of_scores(predictions.y[rows], predictions.scores[rows], True)
            )
        )
    entry = bootstrap_entry(grouped, 60)
    assert (entry["unit"], entry["units"], entry["undefined"]) == ("group", 10, {})
    for name in ("accuracy", "auroc", "log_loss", "kappa"):
        expected = np.quantile([each[name] for each in values], [0.025, 0.975])
        assert entry["intervals"][name] == pytest.approx(expected.tolist()), name
    assert entry["intervals"]["top5"] is None


RNG = np.random.default_rng(1)
TRUE, SAID = RNG.integers(0, 5, (7, 400)), RNG.integers(0, 6, (7, 400))


def counted() -> PixelCounts:
    counts = PixelCounts.empty(7, 6)
    for row in range(7):
        counts.add(counts.pixels[row], TRUE[row], SAID[row], counts.confusion)
        counts.add(counts.patches[row], TRUE[row], SAID[row])
    return counts


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


def test_the_interval_of_many_images_takes_little_memory() -> None:
    pixels = np.ones((20_000, 3, 2), np.int64)
    tracemalloc.start()
    pixel_interval(pixels, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 << 20  # the draws of all resamples would be 160 MB, and as much their counts
