"""Metrics of classifiers that scikit-learn computes, and the reasons where it cannot."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from featx.errors import MissingExtraError

LIBRARY_METRICS = (
    "balanced_accuracy", "top5", "calibration_error", "macro_f1", "auroc", "log_loss", "mcc",
    "kappa",
)  # fmt: skip
"""Names of the metrics in probe.json."""

TOP = 5
"""k of the top-k accuracy."""

CALIBRATION_BINS = 15
"""Number of bins of the calibration error."""


def require_scikit_learn() -> None:
    """Import the metrics of scikit-learn, which takes 0.9 s, before the first layer is timed."""
    try:
        importlib.import_module("sklearn.metrics")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'job=probe needs scikit-learn and scipy: pip install "featx[evaluation]".'
        ) from error


class UndefinedMetricError(ValueError):
    """A metric is not defined for some predictions; the message is the reason."""


def classification_metrics(
    y: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float64],
    probabilities: bool,
    most_ranked: int | None = None,
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Compute the metrics of LIBRARY_METRICS.

    balanced_accuracy is the mean recall of the tested classes. top5 is the share of rows whose true
    class is among the five with the largest scores, calibration_error the expected calibration
    error. macro_f1 is the mean F1 of the classes that are tested or predicted. auroc is the mean,
    over the tested classes, of the area under the ROC curve of the score of a class against the
    others. log_loss is the mean of -log of the probability of the true class (a probability counts
    as 2.2e-16 at least). mcc is Matthews' correlation, kappa Cohen's.

    Returns:
        name -> value, None if it is not available; and name -> reason for those.
    """
    from sklearn.metrics import cohen_kappa_score, f1_score, recall_score

    return compute_metrics(
        {
            "balanced_accuracy": lambda: recall_score(
                y, predicted, labels=np.unique(y), average="macro"
            ),
            "top5": lambda: _top5(y, scores, most_ranked),
            "calibration_error": lambda: _calibration_error(y, predicted, scores, probabilities),
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


def calibration_bin(confidence: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the bin of the calibration error of each row, as scikit-learn's calibration_curve.

    The bins have equal width over [0, 1] and are closed above.
    """
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1]
    bin_of_row: npt.NDArray[np.int64] = np.searchsorted(edges, confidence, side="left")
    return bin_of_row


def _top5(
    y: npt.NDArray[np.int64], scores: npt.NDArray[np.float64], most_ranked: int | None
) -> float:
    """Return the share of rows whose true class has fewer than five others with at least its score.

    scikit-learn ranks equal scores by the position of their classes. A slightly smaller score of
    the true class counts ties against a row, so that classes without a vote do not win.
    """
    from sklearn.metrics import top_k_accuracy_score

    rows, num_classes = np.arange(len(y)), scores.shape[1]
    if num_classes <= TOP:
        raise UndefinedMetricError(f"there are {num_classes} classes")
    if most_ranked is not None and most_ranked < TOP:
        raise UndefinedMetricError(f"k={most_ranked} neighbours rank fewer than {TOP} classes")
    lowered = scores.copy()
    lowered[rows, y] = np.nextafter(scores[rows, y], -np.inf)
    return float(top_k_accuracy_score(y, lowered, k=TOP, labels=np.arange(num_classes)))


def _calibration_error(
    y: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float64],
    probabilities: bool,
) -> float:
    """Return the expected calibration error: |accuracy - confidence| by bins, weighted by rows.

    C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017, equation 3.
    """
    from sklearn.calibration import calibration_curve

    if not probabilities:
        raise UndefinedMetricError("the method gives no probabilities")
    confidence = np.minimum(scores.max(1), 1.0)  # a sum of votes exceeds 1 by rounding
    accuracy, mean_confidence = calibration_curve(
        predicted == y, confidence, n_bins=CALIBRATION_BINS, pos_label=True
    )
    num_rows = np.bincount(calibration_bin(confidence))
    return float(np.abs(accuracy - mean_confidence) @ num_rows[num_rows > 0] / len(y))


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
