"""Metrics of predicted classes, numbers and labels, and the reasons where one is undefined."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.errors import MissingExtraError


@dataclass(frozen=True)
class Metric:
    """A metric that is one number.

    Attributes:
        key: name in probe.json.
        title: name for people.
        is_share: whether it is shown in percent.
    """

    key: str
    title: str
    is_share: bool = False


METRICS = {
    "classification": (
        Metric("accuracy", "accuracy", is_share=True),
        Metric("balanced_accuracy", "balanced accuracy", is_share=True),
        Metric("top5", "top-5", is_share=True),
        Metric("macro_f1", "macro-F1"),
        Metric("auroc", "AUROC"),
        Metric("log_loss", "log-loss"),
        Metric("mcc", "MCC"),
        Metric("kappa", "kappa"),
        Metric("calibration_error", "ECE"),
    ),
    "regression": (
        Metric("r2", "R2"),
        Metric("mae", "mean absolute error"),
        Metric("spearman", "Spearman"),
    ),
    "multilabel": (Metric("map", "mAP"), Metric("macro_f1", "macro-F1")),
    "segmentation": (
        Metric("miou", "mIoU"),
        Metric("pixel_accuracy", "pixel accuracy"),
        Metric("mean_accuracy", "mean accuracy"),
        Metric("patch_miou", "patch mIoU"),
    ),
}
"""Task -> its metrics in the order in which they are shown; the first one is that of the answer."""

CLASS_METRICS = tuple(metric.key for metric in METRICS["classification"])

Ints = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.float64]

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
    y: Ints, predicted: Ints, scores: Matrix, probabilities: bool, most_ranked: int | None = None
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Compute the metrics of CLASS_METRICS but the accuracy.

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


def calibration_bin(confidence: Matrix) -> Ints:
    """Return the bin of the calibration error of each row, as scikit-learn's calibration_curve.

    The bins have equal width over [0, 1] and are closed above.
    """
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1]
    bin_of_row: Ints = np.searchsorted(edges, confidence, side="left")
    return bin_of_row


def _top5(y: Ints, scores: Matrix, most_ranked: int | None) -> float:
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


def _calibration_error(y: Ints, predicted: Ints, scores: Matrix, probabilities: bool) -> float:
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


def _auroc(y: Ints, scores: Matrix) -> float:
    """Return the mean area under the ROC curve of each tested class against the others."""
    from sklearn.metrics import roc_auc_score

    tested = np.unique(y).tolist()
    if len(tested) < 2:
        raise UndefinedMetricError("all test rows are of one class")
    return float(np.mean([roc_auc_score(y == label, scores[:, label]) for label in tested]))


def _log_loss(y: Ints, scores: Matrix, probabilities: bool) -> float:
    """Return the mean of -log of the probability of the true class."""
    from sklearn.metrics import log_loss

    if not probabilities:
        raise UndefinedMetricError("the method gives no probabilities")
    if never := int((scores[np.arange(len(y)), y] == 0).sum()):
        raise UndefinedMetricError(
            f"it is infinite: the true class of {never} of {len(y)} rows has probability 0"
        )
    return float(log_loss(y, scores, labels=np.arange(scores.shape[1])))


def _mcc(y: Ints, predicted: Ints) -> float:
    """Return Matthews' correlation coefficient."""
    from sklearn.metrics import matthews_corrcoef

    if len(np.unique(predicted)) < 2:
        raise UndefinedMetricError("all rows are predicted as one class")
    return _of_several(y, predicted, matthews_corrcoef)


def _of_several(y: Ints, predicted: Ints, metric: Callable[[Ints, Ints], float]) -> float:
    """Return a metric that is undefined if all rows are of one class."""
    if len(np.unique(y)) < 2:
        raise UndefinedMetricError("all test rows are of one class")
    return float(metric(y, predicted))


Z_95 = 1.959963984540054
"""Half the width of the 95 % interval of the standard normal distribution."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of one method on one layer for rows that it was not fitted on.

    Attributes:
        y: (n,) int64 true class of each row, or (n, T) float64 true values.
        predicted: (n,) predicted class, or (n, T) predicted values.
        p_true: (n,) probability of the true class in [0, 1], or None without probabilities.
        p_predicted: (n,) probability of the predicted class, or None without probabilities.
        groups: (n,) int64 group of each row, or None if every row is a group of its own.
        scores: (n, C) score of each class, or None if they are not kept.
        most_ranked: maximum number of classes that the scores of a row can rank: k for a kNN probe,
            None for all classes.
    """

    y: npt.NDArray[Any]
    predicted: npt.NDArray[Any]
    p_true: Matrix | None = None
    p_predicted: Matrix | None = None
    groups: Ints | None = None
    scores: Matrix | None = None
    most_ranked: int | None = None

    @classmethod
    def of_scores(
        cls,
        y: Ints,
        scores: Matrix,
        probabilities: bool,
        groups: Ints | None = None,
        most_ranked: int | None = None,
    ) -> Predictions:
        """Predict the class with the largest score, the first of equal ones."""
        predicted, rows = scores.argmax(1), np.arange(len(y))
        p_true = scores[rows, y] if probabilities else None
        p_predicted = scores[rows, predicted] if probabilities else None
        return cls(y, predicted, p_true, p_predicted, groups, scores, most_ranked)

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """(n,) bool, whether the prediction is the true class."""
        is_right: npt.NDArray[np.bool_] = self.predicted == self.y
        return is_right

    @property
    def accuracy(self) -> float:
        """Share of rows with a correct prediction."""
        return float(self.right.mean())

    @property
    def class_scores(self) -> Matrix:
        """Scores, which have been kept."""
        assert self.scores is not None, "the scores of these predictions are not kept"
        return self.scores

    def accuracy_of(self, kept: npt.NDArray[np.bool_]) -> dict[str, Any] | None:
        """Compute the accuracy on some of the rows.

        Returns:
            rows, correct, accuracy and interval (95 %) as in probe.json; None if no row counts.
        """
        right = self.right[kept]
        if not len(right):
            return None
        groups = None if self.groups is None else self.groups[kept]
        correct = int(right.sum())
        accuracy = correct / len(right)
        return {
            "rows": len(right),
            "correct": correct,
            "accuracy": accuracy,
            "interval": list(wilson(accuracy, effective_rows(right, groups))),
        }


def join_predictions(parts: Sequence[Predictions]) -> Predictions:
    """Join the predictions on the test rows of several splits."""

    def joined(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if any(value is None for value in values) else np.concatenate(values)

    ranked = [part.most_ranked for part in parts if part.most_ranked is not None]
    return Predictions(
        joined("y"),
        joined("predicted"),
        joined("p_true"),
        joined("p_predicted"),
        joined("groups"),
        joined("scores"),
        min(ranked, default=None),
    )


def prediction_metrics(predictions: Predictions) -> dict[str, Any]:
    """Compute all metrics of one test, as JSON types.

    Returns:
        rows; correct; accuracy; interval (95 %, Wilson); effective_rows (of the interval); the
        metrics of `classification_metrics` and calibration_bins; not_available (name of each metric
        that is None -> reason); precision, recall and support (lists with one entry per class, None
        for a class that was never predicted or never tested); and confusion: row i, column j counts
        rows of class i that were predicted as j.
    """
    y, scores = predictions.y, predictions.class_scores
    num_classes = scores.shape[1]
    matrix = confusion(y, predictions.predicted, num_classes)
    right, support, num_predicted = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    recall = [_share(a, b) for a, b in zip(right.tolist(), support.tolist(), strict=True)]
    precision = [_share(a, b) for a, b in zip(right.tolist(), num_predicted.tolist(), strict=True)]
    correct = int(right.sum())
    effective = effective_rows(predictions.predicted == y, predictions.groups)
    values, reasons = classification_metrics(
        y, predictions.predicted, scores, predictions.p_true is not None, predictions.most_ranked
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


def metrics_of_folds(folds: Sequence[Predictions]) -> dict[str, Any]:
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


def effective_rows(right: npt.NDArray[np.bool_], groups: Ints | None = None) -> float:
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


def confusion(y: Ints, predicted: Ints, num_classes: int) -> Ints:
    """Count predictions: row i, column j is the number of rows of class i predicted as j."""
    cells = np.bincount(y * num_classes + predicted, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes).astype(np.int64)


def mean_and_spread(values: list[float]) -> dict[str, Any]:
    """Return mean, sample standard deviation (None for a single value), and the values."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "std": spread, "values": values}


def _share(part: int, whole: int) -> float | None:
    """Return part / whole, or None if `whole` is 0."""
    return part / whole if whole else None
