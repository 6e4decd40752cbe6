"""Metrics of predicted numbers and of predicted labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.library_metrics import (
    UndefinedMetricError,
    compute_metrics,
    has_scikit_learn,
)
from featx.errors import MissingExtraError

REGRESSION_METRICS = ("r2", "mae", "spearman")
MULTILABEL_METRICS = ("map", "macro_f1")

THRESHOLD = 0.5
"""Score from which a label counts as predicted in macro_f1."""

Matrix = npt.NDArray[np.float64]


def require_scikit_learn(task: str) -> None:
    """Check that the metrics of a task can be computed.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    if not has_scikit_learn():
        raise MissingExtraError(
            f'probe.task={task} needs scikit-learn: pip install "featx[evaluation]".'
        )


def regression_metrics(
    truth: Matrix, predicted: Matrix, only: str | None = None
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Compute R2, the mean absolute error and Spearman's rank correlation.

    Args:
        truth: (n, 1) numbers.
        predicted: (n, 1) numbers.
        only: name of the only metric to compute; None for all.

    Returns:
        name -> value, None if it is not available; and name -> reason for those.
    """
    from scipy.stats import spearmanr
    from sklearn.metrics import mean_absolute_error, r2_score

    a, b = truth[:, 0], predicted[:, 0]

    def r2() -> float:
        if np.ptp(a) == 0:
            raise UndefinedMetricError("the test rows have a single value")
        return float(r2_score(a, b))

    def spearman() -> float:
        if np.ptp(a) == 0 or np.ptp(b) == 0:
            which = "have" if np.ptp(a) == 0 else "are predicted with"
            raise UndefinedMetricError(f"the test rows {which} a single value")
        return float(spearmanr(a, b).statistic)

    return _compute(
        {"r2": r2, "mae": lambda: mean_absolute_error(a, b), "spearman": spearman}, only
    )


def multilabel_metrics(
    truth: Matrix, predicted: Matrix, only: str | None = None
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Compute mean average precision and macro-F1 over the labels that occur among the test rows.

    Args:
        truth: (n, T), 1 for each label of a row and 0 for others.
        predicted: (n, T) scores in [0, 1].
        only: as for `regression_metrics`.

    Returns:
        name -> value, None if it is not available; and name -> reason for those.
    """
    from sklearn.metrics import f1_score

    tested = np.flatnonzero(truth.any(0)).tolist()

    def mean_average_precision() -> float:
        return _mean([_average_precision(truth[:, i], predicted[:, i]) for i in tested])

    def macro_f1() -> float:
        is_predicted = predicted >= THRESHOLD
        return _mean(
            [f1_score(truth[:, i] > 0, is_predicted[:, i], zero_division=0) for i in tested]
        )

    return _compute({"map": mean_average_precision, "macro_f1": macro_f1}, only)


def _average_precision(truth: Matrix, scores: Matrix) -> float:
    """Return the average precision of one label, sum_k (R_k - R_(k-1)) P_k.

    P_k and R_k are precision and recall of the rows with a score of at least the k-th largest of
    the distinct scores. average_precision_score gives the same number in ten times the time, and
    the interval of a probe needs it for 1000 resamples of each label.

    Args:
        truth: (n,) 1 for rows with the label, of which there is one at least, and 0 for others.
        scores: (n,) scores.
    """
    order = np.argsort(-scores)
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    num_true = np.cumsum(truth[order])[ends]
    return float((np.diff(num_true, prepend=0) * num_true / (ends + 1)).sum() / num_true[-1])


def _compute(
    metrics: Mapping[str, Callable[[], float]], only: str | None
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Compute all metrics, or one of them.

    scikit-learn checks each of its arguments, which takes longer than the metric of a few rows;
    these are correct by construction.
    """
    from sklearn import config_context

    with config_context(assume_finite=True, skip_parameter_validation=True):
        return compute_metrics(metrics if only is None else {only: metrics[only]})


def _mean(of_labels: list[float]) -> float:
    """Return the mean over the labels that are tested."""
    if not of_labels:
        raise UndefinedMetricError("no test row has a label")
    return float(np.mean(of_labels))
