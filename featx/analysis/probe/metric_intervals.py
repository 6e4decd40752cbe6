"""Bootstrap intervals of all metrics, with whole groups drawn (probe.bootstrap).

A resample is a weight of each row, the number of times that it was drawn. The metrics of many
resamples are computed together from these weights; tests compare them with those of
`prediction_metrics` for the drawn rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.metrics import (
    CALIBRATION_BINS,
    CLASS_METRICS,
    TOP,
    Ints,
    Matrix,
    Predictions,
    calibration_bin,
    prediction_metrics,
)

BLOCK_NUMBERS = 1 << 22
"""Largest number of weights that are held at a time: 32 MiB."""

INTERVAL_RESAMPLES = 1000
"""Number of resamples of the interval of the first metric, in probes without probe.bootstrap."""

_EQUAL = 1e-12
"""Difference of metrics, relative to the larger of the metric and 1, that counts as rounding."""


def bootstrap_entry(predictions: Predictions, resamples: int) -> dict[str, Any]:
    """Compute the 95 % percentile interval of every metric.

    In each resample as many units are drawn with replacement as there are, a unit being a row or a
    group with all its rows, and all metrics are computed anew (B. Efron and R. Tibshirani, An
    Introduction to the Bootstrap, 1993, chapter 13).

    Returns:
        resamples; unit ('row' or 'group'); units, their number; intervals, metric -> (low, high),
        None if the metric is not available or equal in all resamples, as an accuracy of 1 is, which
        tells nothing about its error; and undefined, metric -> number of resamples that are left
        out because it is not defined in them, for metrics with such resamples.
    """
    blocks = [resampled_metrics(predictions, each) for each in _weights(predictions, resamples)]
    available, defined = prediction_metrics(predictions), {}
    for name in CLASS_METRICS:
        values = np.concatenate([each[name] for each in blocks])
        if available[name] is not None:
            defined[name] = values[~np.isnan(values)]
    groups = predictions.groups
    return {
        "resamples": resamples,
        "unit": "row" if groups is None else "group",
        "units": len(predictions.y) if groups is None else len(np.unique(groups)),
        "intervals": {
            name: np.quantile(defined[name], [0.025, 0.975]).tolist()
            if name in defined and _differ(defined[name])
            else None
            for name in CLASS_METRICS
        },
        "undefined": {
            name: resamples - len(values)
            for name, values in defined.items()
            if len(values) < resamples
        },
    }


def resampled_metrics(predictions: Predictions, weights: Matrix) -> dict[str, Matrix]:
    """Compute the metrics of `prediction_metrics` for rows with weights.

    Returns:
        metric of CLASS_METRICS -> (b,) values, NaN where it is not defined.
    """
    y, scores, predicted = predictions.y, predictions.class_scores, predictions.predicted
    num_classes, total = scores.shape[1], weights.sum(1)
    support = _sum_by_group(weights, y, num_classes)
    num_predicted = _sum_by_group(weights, predicted, num_classes)
    right = _sum_by_group(weights * (predicted == y), y, num_classes)
    undefined = np.full(len(weights), np.nan)
    metrics = dict.fromkeys(CLASS_METRICS, undefined)
    metrics["accuracy"] = right.sum(1) / total
    metrics["balanced_accuracy"] = _mean_where(right / np.maximum(support, 1), support > 0)
    both = support + num_predicted
    metrics["macro_f1"] = _mean_where(2 * right / np.maximum(both, 1), both > 0)
    metrics |= _agreement(right.sum(1), support, num_predicted)
    if num_classes > TOP and (predictions.most_ranked or num_classes) >= TOP:
        metrics["top5"] = weights @ _is_within_top5(y, scores) / total
    if predictions.p_true is not None:
        gaps = weights * ((predicted == y) - scores.max(1))
        bin_gaps = _sum_by_group(gaps, calibration_bin(scores.max(1)), CALIBRATION_BINS)
        metrics["calibration_error"] = np.abs(bin_gaps).sum(1) / total
        metrics["log_loss"] = _log_loss(y, scores, weights)
    metrics["auroc"] = _auroc(y, scores, weights, support)
    return metrics


def _weights(predictions: Predictions, resamples: int) -> Iterator[Matrix]:
    """Yield weights of resamples in blocks, (b, n) each."""
    unit_of_row = units_of_rows(predictions.groups, len(predictions.y))
    for drawn in drawn_units(unit_of_row, resamples, BLOCK_NUMBERS // len(unit_of_row)):
        drawn += drawn.shape[1] * np.arange(len(drawn))[:, None]
        times = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        yield times[:, unit_of_row].astype(np.float64)


def units_of_rows(groups: Ints | None, num_rows: int) -> Ints:
    """Return the unit of each row, (n,): its group, or the row itself."""
    if groups is None:
        return np.arange(num_rows)
    units: Ints = np.unique(groups, return_inverse=True)[1]
    return units


def drawn_units(unit_of_row: Ints, resamples: int, block: int) -> Iterator[Ints]:
    """Yield the drawn units of some resamples at a time, (b, units).

    The same rows get the same resamples, whatever the number in a block.
    """
    rng, num_units = np.random.default_rng(0), int(unit_of_row.max()) + 1
    for start in range(0, resamples, max(1, block)):
        size = min(max(1, block), resamples - start)
        yield rng.integers(num_units, size=(size, num_units))


def interval_entry(values: Sequence[float | None], unit: str, num_units: int) -> dict[str, Any]:
    """Return the entries of probe.json about the interval of the metric of the answer.

    `interval` is None if the metric is undefined in a resample, or equal in all of them.
    """
    defined = [value for value in values if value is not None]
    has_interval = len(defined) == len(values) and len(set(defined)) > 1
    return {
        "interval": np.quantile(defined, [0.025, 0.975]).tolist() if has_interval else None,
        "resamples": len(values),
        "unit": unit,
        "units": num_units,
    }


def _differ(values: Matrix) -> bool:
    """Return whether values differ by more than rounding."""
    if not len(values):
        return False
    return float(np.ptp(values)) > _EQUAL * max(1.0, float(np.abs(values).max()))


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


def _is_within_top5(y: Ints, scores: Matrix) -> npt.NDArray[np.bool_]:
    """Return whether each row counts in the top-5 accuracy, (n,)."""
    true_scores = scores[np.arange(len(y)), y]
    is_within: npt.NDArray[np.bool_] = (scores >= true_scores[:, None]).sum(1) <= TOP
    return is_within


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


def _log_loss(y: Ints, scores: Matrix, weights: Matrix) -> Matrix:
    """Compute the mean of -log of the probability of the true class; NaN where it is infinite."""
    p_true = scores[np.arange(len(y)), y]
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
