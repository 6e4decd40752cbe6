"""Metrics of predicted classes: of the rows as they are, or of many resamples at once.

A resample is a weight of each row, the number of times that it was drawn. scikit-learn takes 130 to
300 times as long for the resamples of an interval; tests compare all numbers with its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.metrics import (
    CLASS_METRICS,
    Ints,
    Matrix,
    ProbePredictions,
    drawn_counts,
    effective_rows,
    units_of_rows,
    wilson,
)
from featx.types import Json

TOP = 5
"""k of the top-k accuracy."""

MAX_CONFUSION = 1000
"""Number of classes up to which probe.json has the confusion matrix, 10 MB of text for each layer
and method."""

CALIBRATION_BINS = 15
"""Number of bins of the calibration error."""

_EQUAL = 1e-12
"""Difference of metrics, relative to the larger of the metric and 1, that counts as rounding."""


def prediction_metrics(predictions: ProbePredictions) -> dict[str, Any]:
    """Compute all metrics of one test, as JSON types. Return rows; correct; accuracy; interval (95
    %, Wilson); effective_rows (of the interval); the metrics of `weighted_metrics` and
    calibration_bins; not_available (name of each metric that is None -> reason); precision, recall
    and support (lists with one entry per class, None for a class that was never predicted or never
    tested); and confusion: row i, column j counts rows of class i that were predicted as j, or None
    with more than MAX_CONFUSION classes.
    """
    y, scores = predictions.y, predictions.class_scores
    num_classes = scores.shape[1]
    predicted = predictions.predicted
    right, support, num_predicted = (
        np.bincount(classes, minlength=num_classes) for classes in (y[predicted == y], y, predicted)
    )
    has_matrix = num_classes <= MAX_CONFUSION
    correct = int(right.sum())
    effective = effective_rows(predicted == y, predictions.groups)
    found = weighted_metrics(predictions, np.ones((1, len(y))))
    values = {name: float(value[0]) for name, value in found.items()}
    undefined = [name for name in CLASS_METRICS if not np.isfinite(values[name])]
    reasons = _reasons(predictions)
    return {
        "rows": len(y),
        "correct": correct,
        "accuracy": correct / len(y),
        "interval": list(wilson(correct / len(y), effective)),
        "effective_rows": effective,
        **{name: None if name in undefined else value for name, value in values.items()},
        "calibration_bins": CALIBRATION_BINS,
        "not_available": {name: reasons[name] for name in undefined},
        "precision": _shares(right, num_predicted),
        "recall": _shares(right, support),
        "support": support.tolist(),
        "confusion": confusion_matrix(y, predicted, num_classes).tolist() if has_matrix else None,
    }


def bootstrap_entry(predictions: ProbePredictions, resamples: int) -> Json:
    """Compute the 95 % percentile interval of every metric.

    In each resample as many units are drawn with replacement as there are, a unit being a row or a
    group with all its rows, and all metrics are computed anew (B. Efron and R. Tibshirani, An
    Introduction to the Bootstrap, 1993, chapter 13). Return resamples; unit ('row' or 'group');
    units, their number; intervals, metric -> (low, high), None if the metric is not available or
    equal in all resamples, as an accuracy of 1 is, which tells nothing about its error; and
    undefined, metric -> number of resamples that are left out because it is not defined in them,
    for metrics with such resamples.
    """
    unit_of_row = units_of_rows(predictions.groups, len(predictions.y))
    numbers = max(predictions.class_scores.shape)  # the classes of a resample are counted as well
    blocks = [
        weighted_metrics(predictions, counts[:, unit_of_row].astype(np.float64))
        for counts in drawn_counts(unit_of_row, resamples, numbers)
    ]
    available, undefined = prediction_metrics(predictions), {}
    intervals: dict[str, list[float] | None] = dict.fromkeys(CLASS_METRICS)
    for name in CLASS_METRICS:
        if available[name] is None:
            continue
        values = np.concatenate([each[name] for each in blocks])
        values = values[~np.isnan(values)]
        if len(values) < resamples:
            undefined[name] = resamples - len(values)
        if len(values) and np.ptp(values) > _EQUAL * max(1.0, float(np.abs(values).max())):
            intervals[name] = np.quantile(values, [0.025, 0.975]).tolist()
    groups = predictions.groups
    return {
        "resamples": resamples,
        "unit": "row" if groups is None else "group",
        "units": len(predictions.y) if groups is None else len(np.unique(groups)),
        "intervals": intervals,
        "undefined": undefined,
    }


def confusion_matrix(y: Ints, predicted: Ints, num_classes: int) -> Ints:
    """Count predictions: row i, column j is the number of rows or pixels of class i predicted as
    j.
    """
    cells = np.bincount(y * num_classes + predicted, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes).astype(np.int64)


def _shares(parts: Ints, wholes: Ints) -> list[float | None]:
    """Return part / whole of each class, None where the whole is 0."""
    pairs = zip(parts.tolist(), wholes.tolist(), strict=True)
    return [part / whole if whole else None for part, whole in pairs]


def _reasons(predictions: ProbePredictions) -> dict[str, str]:
    """Return why a metric is undefined, if it is."""
    y, num_classes = predictions.y, predictions.class_scores.shape[1]
    one_class, no_probabilities = (
        "all test rows are of one class",
        "the method gives no probabilities",
    )
    top5 = f"k={predictions.most_ranked} neighbours rank fewer than {TOP} classes"
    log_loss = no_probabilities
    if predictions.p_true is not None:
        never = int((predictions.p_true == 0).sum())
        log_loss = f"it is infinite: the true class of {never} of {len(y)} rows has probability 0"
    one_predicted = len(np.unique(predictions.predicted)) < 2
    return {
        "top5": f"there are {num_classes} classes" if num_classes <= TOP else top5,
        "calibration_error": no_probabilities,
        "log_loss": log_loss,
        "auroc": one_class,
        "mcc": "all rows are predicted as one class" if one_predicted else one_class,
        "kappa": one_class,
    }


def weighted_metrics(predictions: ProbePredictions, weights: Matrix) -> dict[str, Matrix]:
    """Compute the metrics of rows with weights. Return metric of CLASS_METRICS -> (b,) values, one
    for each of b resamples of the (b, n) weights, NaN where it is not defined.

    balanced_accuracy is the mean recall of the tested classes, macro_f1 the mean F1 of those that
    are tested or predicted. top5 is the share of rows whose true class has fewer than five others
    with at least its score. calibration_error is |accuracy - confidence| by bins of equal width,
    closed above, weighted by rows (C. Guo et al., On Calibration of Modern Neural Networks, ICML
    2017, equation 3). log_loss is the mean of -log of the probability of the true class, which
    counts as 2.2e-16 at least. mcc is Matthews' correlation, kappa Cohen's.
    """
    y, scores, predicted = predictions.y, predictions.class_scores, predictions.predicted
    num_classes, total = scores.shape[1], weights.sum(1)
    support = _sum_by_group(weights, y, num_classes)
    num_predicted = _sum_by_group(weights, predicted, num_classes)
    right = _sum_by_group(weights * (predicted == y), y, num_classes)
    metrics = dict.fromkeys(CLASS_METRICS, np.full(len(weights), np.nan))
    metrics["accuracy"] = right.sum(1) / total
    metrics["balanced_accuracy"] = _mean_where(right / np.maximum(support, 1), support > 0)
    both = support + num_predicted
    metrics["macro_f1"] = _mean_where(2 * right / np.maximum(both, 1), both > 0)
    metrics |= _agreement(right.sum(1), support, num_predicted)
    if num_classes > TOP and (predictions.most_ranked or num_classes) >= TOP:
        true_scores = scores[np.arange(len(y)), y]
        is_within = (scores >= true_scores[:, None]).sum(1) <= TOP
        metrics["top5"] = weights @ is_within / total
    if predictions.p_true is not None:
        confidence, edges = scores.max(1), np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1]
        gaps = weights * ((predicted == y) - confidence)
        bin_gaps = _sum_by_group(gaps, np.searchsorted(edges, confidence), CALIBRATION_BINS)
        metrics["calibration_error"] = np.abs(bin_gaps).sum(1) / total
        metrics["log_loss"] = _log_loss(predictions.p_true, weights)
    metrics["auroc"] = _auroc(y, scores, weights, support)
    return metrics


def _sum_by_group(values: Matrix, group_of_row: npt.NDArray[np.integer], num_groups: int) -> Matrix:
    """Sum (b, n) values over the rows of each group, (b, count)."""
    order = np.argsort(group_of_row, kind="stable")
    group_ids, starts = np.unique(group_of_row[order], return_index=True)
    sums = np.zeros((len(values), num_groups))
    sums[:, group_ids] = np.add.reduceat(values[:, order], starts, axis=1)
    return sums


def _mean_where(values: Matrix, is_counted: npt.NDArray[np.bool_]) -> Matrix:
    """Return the mean of each row's values where there are some."""
    mean: Matrix = (values * is_counted).sum(1) / is_counted.sum(1)
    return mean


def _agreement(right: Matrix, support: Matrix, num_predicted: Matrix) -> dict[str, Matrix]:
    """Compute Matthews' correlation and Cohen's kappa from the margins of the confusion matrix.

    With c of s rows right, t rows of a class and p predicted as it,

        mcc   = (c s - sum t p) / sqrt((s^2 - sum p^2) (s^2 - sum t^2))
        kappa = (c s - sum t p) / (s^2 - sum t p)

    (J. Gorodkin, Comparing Two K-Category Assignments by a K-Category Correlation Coefficient,
    2004). Both are undefined if all rows are of one class, mcc also if all are predicted as one.
    """
    square = support.sum(1) ** 2
    chance = (support * num_predicted).sum(1)
    above = right * support.sum(1) - chance
    true_term, predicted_term = square - (support**2).sum(1), square - (num_predicted**2).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mcc = np.where(
            (true_term > 0) & (predicted_term > 0),
            above / np.sqrt(true_term * predicted_term),
            np.nan,
        )
        kappa = np.where(true_term > 0, above / (square - chance), np.nan)
    return {"mcc": mcc, "kappa": kappa}


def _log_loss(p_true: Matrix, weights: Matrix) -> Matrix:
    """Compute the mean of -log of the probability of the true class; NaN where it is infinite."""
    smallest = np.finfo(np.float64).eps
    losses = -np.log(np.clip(p_true, smallest, 1 - smallest))
    means: Matrix = weights @ losses / weights.sum(1)
    means[weights @ (p_true == 0) > 0] = np.nan
    return means


def _auroc(y: Ints, scores: Matrix, weights: Matrix, support: Matrix) -> Matrix:
    """Compute the mean area under the ROC curve of each tested class against the others.

    The area is the share of pairs of a row of the class and one of the others in which the first
    has the larger score, ties counting half. With the weights w of the m rows of the class and the
    sum A of the weights of all rows with a smaller score, plus half of those with the same, it is
    (sum w A - m^2 / 2) / (m (n - m)), since the pairs within the class sum to m^2 / 2.
    """
    total = support.sum(1)
    areas = np.zeros(len(weights))
    row_weights = np.ascontiguousarray(weights.T)
    below = np.zeros((len(y) + 1, len(weights)))
    for label in np.unique(y).tolist():
        order = np.argsort(scores[:, label])
        ranked = scores[order, label]
        np.cumsum(row_weights[order], axis=0, out=below[1:])
        members = np.flatnonzero(y == label)
        first = np.searchsorted(ranked, scores[members, label], side="left")
        last = np.searchsorted(ranked, scores[members, label], side="right")
        sums = (row_weights[members] * (below[first] + below[last])).sum(0) / 2
        count = support[:, label]
        pairs = count * (total - count)
        areas += (sums - count**2 / 2) / np.where(pairs > 0, pairs, 1)
    num_tested = (support > 0).sum(1)
    return np.where(num_tested > 1, areas / num_tested, np.nan)
