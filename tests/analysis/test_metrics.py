"""Metrics against scikit-learn, scipy's interval and numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as oracle

from featx.analysis.probe.class_metrics import prediction_metrics
from featx.analysis.probe.metrics import Predictions, wilson

pytestmark = pytest.mark.usefixtures("one_thread")


def made(num_rows: int = 400, num_classes: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and probabilities that know something of them; class 7 is never tested."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, num_classes - 1, num_rows)
    scores = rng.normal(size=(num_rows, num_classes))
    scores[np.arange(num_rows), y] += 1.5
    scores = np.exp(scores)
    return y, scores / scores.sum(1, keepdims=True)


def test_every_number_is_scikit_learns() -> None:
    y, scores = made()
    predicted = scores.argmax(1)
    found = prediction_metrics(Predictions.of_scores(y, scores, True))
    assert found["accuracy"] == pytest.approx(oracle.accuracy_score(y, predicted))
    labels = list(range(8))
    tested = labels[:7]
    recall = oracle.recall_score(y, predicted, labels=tested, average=None)
    assert found["recall"][:7] == pytest.approx(recall.tolist())
    assert found["recall"][7] is None
    assert found["balanced_accuracy"] == pytest.approx(recall.mean())
    precision = oracle.precision_score(y, predicted, labels=labels, average=None, zero_division=0)
    assert found["precision"] == pytest.approx(precision.tolist())
    assert found["confusion"] == oracle.confusion_matrix(y, predicted, labels=labels).tolist()
    assert found["support"] == np.bincount(y, minlength=8).tolist()
    top5 = oracle.top_k_accuracy_score(y, scores, k=5, labels=labels)
    assert found["top5"] == pytest.approx(top5)
    assert found["correct"] == (predicted == y).sum()


def test_calibration_error_by_hand() -> None:
    y, scores = made()
    scores[0] = np.eye(8)[0] * (1 + 1e-12)  # votes that sum to more than 1 by rounding
    assert 0 < calibration_error(y, scores) < 1
    # Two rows at 0.9, one of them right: |0.5 - 0.9|; two at 0.6, both right: |1 - 0.6|.
    scores = np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    assert calibration_error(np.array([0, 1, 0, 0]), scores) == pytest.approx(0.4)
    # All rows right, and all wrong: the confidence is off by 0.25 and 0.75 on average.
    assert calibration_error(np.zeros(4, int), scores) == pytest.approx(0.25)
    assert calibration_error(np.ones(4, int), scores) == pytest.approx(0.75)


def calibration_error(y: np.ndarray, scores: np.ndarray) -> float:
    found = prediction_metrics(Predictions.of_scores(y, scores, True))
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
        predictions = Predictions.of_scores(np.array(y), scores, True, most_ranked=most_ranked)
        found: float | None = prediction_metrics(predictions)["top5"]
        return found

    scores = np.zeros((2, 6))
    assert top5([4, 5], scores) == 0
    assert top5([0, 1], scores) == 0
    scores[:, 2:] = 0.25
    assert top5([4, 5], scores) == 1
    assert top5([0, 5], scores) == 0.5
    assert top5([0, 5], scores, most_ranked=4) is None
    five = prediction_metrics(Predictions.of_scores(np.array([0, 4]), np.eye(5)[[0, 4]], True))
    assert five["top5"] is None


def test_a_class_that_is_never_predicted_has_no_precision() -> None:
    found = prediction_metrics(
        Predictions.of_scores(np.array([0, 1]), np.array([[1.0, 0.0], [1.0, 0.0]]), True)
    )
    assert found["precision"] == [0.5, None]
    assert found["recall"] == [1.0, 0.0]
