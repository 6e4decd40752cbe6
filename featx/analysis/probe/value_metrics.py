"""Metrics of predicted numbers and of predicted labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.library_metrics import UndefinedMetricError, compute_metrics

REGRESSION_METRICS = ("r2", "mae", "spearman")
MULTILABEL_METRICS = ("map", "macro_f1")

THRESHOLD = 0.5
"""Score from which a label counts as predicted in macro_f1."""

Matrix = npt.NDArray[np.float64]


def regression_metrics(
    truth: Matrix, predicted: Matrix
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Compute R2, the mean absolute error and Spearman's rank correlation.

    Returns:
        name -> value, None if it is not available; and name -> reason for those.
    """
    from scipy.stats import spearmanr
    from sklearn.metrics import mean_absolute_error

    a, b = truth[:, 0], predicted[:, 0]

    def spearman() -> float:
        if np.ptp(a) == 0 or np.ptp(b) == 0:
            which = "have" if np.ptp(a) == 0 else "are predicted with"
            raise UndefinedMetricError(f"the test rows {which} a single value")
        return float(spearmanr(a, b).statistic)

    return compute_metrics(
        {
            "r2": lambda: _r2(truth, predicted),
            "mae": lambda: mean_absolute_error(a, b),
            "spearman": spearman,
        }
    )


def multilabel_metrics(
    truth: Matrix, predicted: Matrix
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Compute mean average precision and macro-F1 over the labels that occur among the test rows.

    Returns:
        name -> value, None if it is not available; and name -> reason for those.
    """
    from sklearn.metrics import average_precision_score, f1_score

    def macro_f1(is_true: Matrix, scores: Matrix) -> float:
        return float(f1_score(is_true > 0, scores >= THRESHOLD, zero_division=0))

    return compute_metrics(
        {
            "map": lambda: _mean_over_labels(truth, predicted, average_precision_score),
            "macro_f1": lambda: _mean_over_labels(truth, predicted, macro_f1),
        }
    )


def first_regression_metric(truth: Matrix, predicted: Matrix) -> float | None:
    """Compute the first metric of `regression_metrics` alone, for many resamples or splits."""
    from sklearn import config_context

    # scikit-learn checks each of its arguments, which takes longer than the metric of a few rows;
    # these are correct by construction.
    with config_context(assume_finite=True, skip_parameter_validation=True):
        values, _ = compute_metrics({"r2": lambda: _r2(truth, predicted)})
    return values["r2"]


def first_multilabel_metric(truth: Matrix, predicted: Matrix) -> float | None:
    """Compute the first metric of `multilabel_metrics` alone, for many resamples or splits."""
    values, _ = compute_metrics(
        {"map": lambda: _mean_over_labels(truth, predicted, _average_precision)}
    )
    return values["map"]


def _r2(truth: Matrix, predicted: Matrix) -> float:
    """Return the coefficient of determination."""
    from sklearn.metrics import r2_score

    if np.ptp(truth) == 0:
        raise UndefinedMetricError("the test rows have a single value")
    return float(r2_score(truth, predicted))


def _average_precision(truth: Matrix, scores: Matrix) -> float:
    """Return scikit-learn's average_precision_score for a resample, sum_k (R_k - R_(k-1)) P_k.

    P_k and R_k are precision and recall of the rows with a score of at least the k-th largest of
    the distinct scores. An interval needs it for 1000 resamples of each label; scikit-learn takes
    34 times as long for 100 rows and 7 times as long for 10,000.
    """
    order = np.argsort(-scores)
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    num_true = np.cumsum(truth[order])[ends]
    return float((np.diff(num_true, prepend=0) * num_true / (ends + 1)).sum() / num_true[-1])


def _mean_over_labels(
    truth: Matrix, predicted: Matrix, metric: Callable[[Matrix, Matrix], float]
) -> float:
    """Return the mean of a metric over the labels that occur among the test rows."""
    tested = np.flatnonzero(truth.any(0)).tolist()
    if not tested:
        raise UndefinedMetricError("no test row has a label")
    return float(np.mean([metric(truth[:, i], predicted[:, i]) for i in tested]))
