"""Names of the metrics of all tasks, predictions, and the intervals of metrics."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.base import rows_of_block
from featx.errors import MissingExtraError
from featx.types import Array

METHODS = ("linear", "knn", "ridge", "attentive")
"""Names of the methods, by which probe.json has the entries of a layer."""


@dataclass(frozen=True)
class Metric:
    """A metric that is one number, called `key` in probe.json; a share is shown in percent."""

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

CLASSIFICATION, REGRESSION, MULTILABEL = "classification", "regression", "multilabel"
"""Tasks of which new images can be predicted."""

LABEL_THRESHOLD = 0.5
"""Score from which a label of several counts as predicted."""

CLASS_METRICS = tuple(metric.key for metric in METRICS["classification"])

Ints = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.float64]


def require_scikit_learn() -> None:
    """Import the metrics of scikit-learn, which takes 0.9 s, before the first layer is timed."""
    try:
        importlib.import_module("sklearn.metrics")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'A probe needs scikit-learn and scipy: pip install "featx[evaluation]".'
        ) from error


INTERVAL_RESAMPLES = 1000
"""Number of resamples of the interval of the first metric, in probes without probe.bootstrap."""

Z_95 = 1.959963984540054
"""Half the width of the 95 % interval of the standard normal distribution."""


@dataclass(frozen=True)
class ProbePredictions:
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

    y: Array
    predicted: Array
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
    ) -> ProbePredictions:
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

    def accuracy_of(self, kept: npt.NDArray[np.bool_]) -> dict[str, object] | None:
        """Return rows, correct, accuracy and interval (95 %) on some rows as in probe.json; None if
        no row counts.
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


def join_predictions(parts: Sequence[ProbePredictions]) -> ProbePredictions:
    """Join the predictions on the test rows of one or several splits."""
    if len(parts) == 1:
        return parts[0]

    joined: dict[str, Any] = {}
    for name in ("y", "predicted", "p_true", "p_predicted", "groups", "scores"):
        values = [getattr(part, name) for part in parts]
        is_known = all(value is not None for value in values)
        joined[name] = np.concatenate(values) if is_known else None
    ranked = [part.most_ranked for part in parts if part.most_ranked is not None]
    return ProbePredictions(**joined, most_ranked=min(ranked, default=None))


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
    Return a number from 1 to n.

    Rows of one group tend to be right or wrong together. With p = r / n, and r_g of the n_g rows of
    each of G groups right, the variance of p is G / (G - 1) sum_g (r_g - p n_g)^2 / n^2, and that
    of m independent rows is p (1 - p) / m (J. N. K. Rao and A. J. Scott, A Simple Method for the
    Analysis of Clustered Binary Data, Biometrics 48, 1992). If all rows are right, or none is, the
    variance is unknown, and the result is the number of groups.
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


def mean_and_spread(values: list[float]) -> dict[str, object]:
    """Return mean, sample standard deviation (None for a single value), and the values."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "std": spread, "values": values}


def units_of_rows(groups: Ints | None, num_rows: int) -> Ints:
    """Return the unit of each row, (n,): its group, or the row itself."""
    if groups is None:
        return np.arange(num_rows)
    units: Ints = np.unique(groups, return_inverse=True)[1]
    return units


def drawn_counts(unit_of_row: Ints, resamples: int, num_weights: int) -> Iterator[Ints]:
    """Draw as many units with replacement as there are. Yield for some resamples at a time how
    often each unit was drawn, (b, units); they take half a block if a resample has `num_weights`
    float64 weights.

    The same rows get the same resamples, whatever the number in a block.
    """
    rng, num_units = np.random.default_rng(0), int(unit_of_row.max()) + 1
    block = rows_of_block(16 * num_weights)
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        drawn = rng.integers(num_units, size=(size, num_units))
        cells = drawn + num_units * np.arange(size)[:, None]  # of a table of resamples and units
        yield np.bincount(cells.ravel(), minlength=cells.size).reshape(cells.shape)


def interval_entry(values: Sequence[float | None], unit: str, num_units: int) -> dict[str, object]:
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
