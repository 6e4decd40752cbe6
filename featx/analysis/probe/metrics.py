"""Metrics of predictions, from labels, scores and probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.library_metrics import (
    CALIBRATION_BINS,
    LIBRARY_METRICS,
    classification_metrics,
)

METRICS = ("accuracy", *LIBRARY_METRICS)
"""Names in probe.json of the metrics that are one number each."""

Z_95 = 1.959963984540054
"""Half the width of the 95 % interval of the standard normal distribution."""


@dataclass(frozen=True)
class ProbePredictions:
    """Predictions for rows that a probe was not fitted on.

    Attributes:
        y: (n,) true class of each row.
        scores: (n, C) scores, of which the largest is the prediction.
        probabilities: whether the scores of a row are probabilities and sum to 1.
        groups: (n,) group of each row, or None if every row is a group of its own.
        most_ranked: maximum number of classes that the scores of a row can rank: k for a kNN probe,
            None for all classes.
    """

    y: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    probabilities: bool
    groups: npt.NDArray[np.int64] | None = None
    most_ranked: int | None = None

    @property
    def predicted(self) -> npt.NDArray[np.int64]:
        """(n,) class with the largest score; the first of equal ones."""
        classes: npt.NDArray[np.int64] = self.scores.argmax(1)
        return classes

    @property
    def accuracy(self) -> float:
        """Share of rows with a correct prediction."""
        return float((self.predicted == self.y).mean())


def prediction_metrics(predictions: ProbePredictions) -> dict[str, Any]:
    """Compute all metrics of one test, as JSON types.

    Returns:
        rows; correct; accuracy; interval (95 %, Wilson); effective_rows (of the interval); the
        metrics of `classification_metrics` and calibration_bins; not_available (name of each metric
        that is None -> reason); precision, recall and support (lists with one entry per class, None
        for a class that was never predicted or never tested); and confusion: row i, column j counts
        rows of class i that were predicted as j.
    """
    y, scores = predictions.y, predictions.scores
    num_classes = scores.shape[1]
    matrix = confusion(y, predictions.predicted, num_classes)
    right, support, num_predicted = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    recall = [_share(a, b) for a, b in zip(right.tolist(), support.tolist(), strict=True)]
    precision = [_share(a, b) for a, b in zip(right.tolist(), num_predicted.tolist(), strict=True)]
    correct = int(right.sum())
    effective = effective_rows(predictions.predicted == y, predictions.groups)
    values, reasons = classification_metrics(
        y, predictions.predicted, scores, predictions.probabilities, predictions.most_ranked
    )
    return {
        "rows": len(y),
        "correct": correct,
        "accuracy": correct / len(y),
        "interval": list(wilson(correct / len(y), effective)),
        "effective_rows": effective,
        **values,
        "calibration_bins": CALIBRATION_BINS,
        "not_available": reasons,
        "precision": precision,
        "recall": recall,
        "support": support.tolist(),
        "confusion": matrix.tolist(),
    }


def join_predictions(folds: Sequence[ProbePredictions]) -> ProbePredictions:
    """Join the predictions on the test rows of several folds."""
    ranked = [each.most_ranked for each in folds if each.most_ranked is not None]
    groups = [each.groups for each in folds if each.groups is not None]
    return ProbePredictions(
        np.concatenate([each.y for each in folds]),
        np.concatenate([each.scores for each in folds]),
        folds[0].probabilities,
        np.concatenate(groups) if groups else None,
        min(ranked, default=None),
    )


def metrics_of_folds(folds: Sequence[ProbePredictions]) -> dict[str, Any]:
    """Compute the metrics of the rows of all folds together; several folds add an entry `folds`."""
    metrics = prediction_metrics(join_predictions(folds))
    if len(folds) > 1:
        metrics["folds"] = mean_and_spread([each.accuracy for each in folds])
    return metrics


def wilson(share: float, count: float) -> tuple[float, float]:
    """Compute the 95 % interval of a share p of n rows, (low, high).

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). E. B. Wilson, Probable Inference, the
    Law of Succession, and Statistical Inference, JASA 22 (1927).
    """
    square = Z_95**2 / count
    middle = share + square / 2
    half = Z_95 * math.sqrt(share * (1 - share) / count + square / (4 * count))
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    return (0.0 if share == 0 else low, 1.0 if share == 1 else high)


def effective_rows(
    right: npt.NDArray[np.bool_], groups: npt.NDArray[np.int64] | None = None
) -> float:
    """Compute how many independent rows would give the share of correct ones the same variance.

    Rows of one group tend to be right or wrong together. With p = r / n, and r_g of the n_g rows of
    each of G groups right, the variance of p is G / (G - 1) sum_g (r_g - p n_g)^2 / n^2, and that
    of m independent rows is p (1 - p) / m (J. N. K. Rao and A. J. Scott, A Simple Method for the
    Analysis of Clustered Binary Data, Biometrics 48, 1992). If all rows are right, or none is, the
    variance is unknown, and the result is the number of groups.

    Returns:
        m, from 1 to n.
    """
    n, share = len(right), float(right.mean())
    if groups is None:
        return float(n)
    _, group_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if share in (0, 1) or len(sizes) == 1:
        return float(len(sizes))
    off = np.bincount(group_of, weights=right) - share * sizes
    variance = len(sizes) / (len(sizes) - 1) * float(np.square(off).sum()) / n**2
    return min(float(n), max(1.0, share * (1 - share) / max(variance, 1e-300)))


def confusion(
    y: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], num_classes: int
) -> npt.NDArray[np.int64]:
    """Count predictions: row i, column j is the number of rows of class i that were predicted as j.

    Returns:
        (C, C) int64.
    """
    cells = np.bincount(y * num_classes + predicted, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes).astype(np.int64)


def mean_and_spread(values: list[float]) -> dict[str, Any]:
    """Return mean, sample standard deviation (None for a single value), and the values."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "std": spread, "values": values}


def _share(part: int, whole: int) -> float | None:
    """Return part / whole, or None if `whole` is 0."""
    return part / whole if whole else None
