"""Metrics of classifiers that scikit-learn computes, and the reasons where it cannot."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

LIBRARY_METRICS = ("macro_f1", "auroc", "log_loss", "mcc", "kappa")
"""Names of the metrics in probe.json."""

NOT_INSTALLED = 'scikit-learn is not installed: pip install "featx[evaluation]"'
"""Reason for the absence of all metrics without the extra."""


def has_scikit_learn() -> bool:
    """Return whether scikit-learn can be imported, without importing it."""
    return importlib.util.find_spec("sklearn") is not None


class UndefinedMetricError(ValueError):
    """A metric is not defined for some predictions; the message is the reason."""


def classification_metrics(
    y: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float64],
    probabilities: bool,
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Compute the metrics of LIBRARY_METRICS.

    macro_f1 is the mean F1 of the classes that are tested or predicted. auroc is the mean, over the
    tested classes, of the area under the ROC curve of the score of a class against the others.
    log_loss is the mean of -log of the probability of the true class (a probability counts as
    2.2e-16 at least). mcc is Matthews' correlation, kappa Cohen's.

    Args:
        y: (n,) true class of each row.
        predicted: (n,) predicted class.
        scores: (n, C) scores.
        probabilities: whether the scores of a row are probabilities and sum to 1.

    Returns:
        name -> value, None if it is not available; and name -> reason for those.
    """
    if not has_scikit_learn():
        return dict.fromkeys(LIBRARY_METRICS), dict.fromkeys(LIBRARY_METRICS, NOT_INSTALLED)
    from sklearn.metrics import cohen_kappa_score, f1_score

    return compute_metrics(
        {
            "macro_f1": lambda: f1_score(y, predicted, average="macro", zero_division=0),
            "auroc": lambda: _auroc(y, scores),
            "log_loss": lambda: _log_loss(y, scores, probabilities),
            "mcc": lambda: _mcc(y, predicted),
            "kappa": lambda: _of_several(y, predicted, cohen_kappa_score),
        }
    )


def compute_metrics(
    metrics: Mapping[str, Callable[[], float]],
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Compute metrics, each of which may be undefined.

    Args:
        metrics: name -> function that returns the value or raises UndefinedMetricError.

    Returns:
        name -> value, None if it is not available; and name -> reason for those.
    """
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for name, metric in metrics.items():
        try:
            value = float(metric())
            if not math.isfinite(value):
                raise UndefinedMetricError("it is not defined for these predictions")
            values[name] = value
        except UndefinedMetricError as reason:
            values[name], reasons[name] = None, str(reason)
    return values, reasons


def _auroc(y: npt.NDArray[np.int64], scores: npt.NDArray[np.float64]) -> float:
    """Return the mean area under the ROC curve of each tested class against the others."""
    from sklearn.metrics import roc_auc_score

    tested = np.unique(y).tolist()
    if len(tested) < 2:
        raise UndefinedMetricError("all test rows are of one class")
    return float(np.mean([roc_auc_score(y == label, scores[:, label]) for label in tested]))


def _log_loss(
    y: npt.NDArray[np.int64], scores: npt.NDArray[np.float64], probabilities: bool
) -> float:
    """Return the mean of -log of the probability of the true class."""
    from sklearn.metrics import log_loss

    if not probabilities:
        raise UndefinedMetricError("the method gives no probabilities")
    if never := int((scores[np.arange(len(y)), y] == 0).sum()):
        raise UndefinedMetricError(
            f"it is infinite: the true class of {never} of {len(y)} rows has probability 0"
        )
    return float(log_loss(y, scores, labels=np.arange(scores.shape[1])))


def _mcc(y: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64]) -> float:
    """Return Matthews' correlation coefficient."""
    from sklearn.metrics import matthews_corrcoef

    if len(np.unique(predicted)) < 2:
        raise UndefinedMetricError("all rows are predicted as one class")
    return _of_several(y, predicted, matthews_corrcoef)


def _of_several(
    y: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    metric: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], float],
) -> float:
    """Return a metric that is undefined if all rows are of one class."""
    if len(np.unique(y)) < 2:
        raise UndefinedMetricError("all test rows are of one class")
    return float(metric(y, predicted))
