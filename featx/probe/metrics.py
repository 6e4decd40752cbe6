"""How good predictions are: numbers from labels, scores and probabilities; numpy only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Z_95 = 1.959963984540054
"""Half the width of a 95 % interval of the normal distribution, in standard deviations."""

CALIBRATION_BINS = 15
TOP = 5


@dataclass(frozen=True)
class Predictions:
    """What a probe said of rows that it was not fitted on.

    Attributes:
        y: (n,) the true class of each row.
        scores: (n, C) larger is likelier; the largest one is the prediction.
        probabilities: whether the scores of a row are probabilities and sum to 1.
    """

    y: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    probabilities: bool

    @property
    def predicted(self) -> npt.NDArray[np.int64]:
        """(n,) the class with the largest score, the first of equals."""
        found: npt.NDArray[np.int64] = self.scores.argmax(1)
        return found

    @property
    def accuracy(self) -> float:
        """Share of rows whose prediction is right."""
        return float((self.predicted == self.y).mean())


def judged(predictions: Predictions) -> dict[str, Any]:
    """Every number of one test, JSON types.

    Returns:
        rows, correct, accuracy, interval (95 %, Wilson), balanced_accuracy (mean recall of the
        classes that were tested), top5 (None with five classes or fewer, where it says nothing),
        calibration_error (None without probabilities), precision, recall, support (lists, a class
        each; None where a class was never predicted or never tested) and confusion: row i, column j
        counts rows of class i that were taken for j.
    """
    y, scores = predictions.y, predictions.scores
    num_classes = scores.shape[1]
    matrix = confusion(y, predictions.predicted, num_classes)
    right, support, said = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    recall = [_share(a, b) for a, b in zip(right.tolist(), support.tolist(), strict=True)]
    precision = [_share(a, b) for a, b in zip(right.tolist(), said.tolist(), strict=True)]
    correct = int(right.sum())
    tested = [value for value in recall if value is not None]
    return {
        "rows": len(y),
        "correct": correct,
        "accuracy": correct / len(y),
        "interval": list(wilson(correct, len(y))),
        "balanced_accuracy": float(np.mean(tested)),
        "top5": top_k(y, scores, TOP) if num_classes > TOP else None,
        "calibration_error": calibration_error(y, scores) if predictions.probabilities else None,
        "precision": precision,
        "recall": recall,
        "support": support.tolist(),
        "confusion": matrix.tolist(),
    }


def wilson(correct: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share, (low, high).

    With p = correct / n: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). E. B. Wilson,
    Probable Inference, the Law of Succession, and Statistical Inference, JASA 22 (1927).
    """
    share, square = correct / count, Z_95**2 / count
    middle = share + square / 2
    half = Z_95 * math.sqrt(share * (1 - share) / count + square / (4 * count))
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    return (0.0 if correct == 0 else low, 1.0 if correct == count else high)


def confusion(
    y: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], num_classes: int
) -> npt.NDArray[np.int64]:
    """(C, C) int64: row i, column j counts rows of class i that were taken for j."""
    cells = np.bincount(y * num_classes + predicted, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes).astype(np.int64)


def top_k(y: npt.NDArray[np.int64], scores: npt.NDArray[np.float64], k: int) -> float:
    """Share of rows whose true class is among the k largest scores; of equals the first counts."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return float((order == y[:, None]).any(1).mean())


def calibration_error(
    y: npt.NDArray[np.int64], scores: npt.NDArray[np.float64], bins: int = CALIBRATION_BINS
) -> float:
    """Expected calibration error: |accuracy - confidence| by bins of confidence, weighted by rows.

    Bins of equal width over [0, 1], closed above. C. Guo et al., On Calibration of Modern Neural
    Networks, ICML 2017, equation 3.
    """
    confidence = scores.max(1)
    right = scores.argmax(1) == y
    edges = np.linspace(0, 1, bins + 1)[1:-1]
    bin_of = np.searchsorted(edges, confidence, side="left")
    gap = np.bincount(bin_of, weights=right - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(y))


def mean_and_spread(values: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (None of a single value), and the values."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "std": spread, "values": values}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
