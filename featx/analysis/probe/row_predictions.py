"""Predictions for the test rows without the scores of all classes, and the file that keeps them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.metrics import Predictions, effective_rows, wilson
from featx.analysis.probe.splits import Places, Split

COLUMNS = (
    "layer", "method", "fold", "split", "key", "true", "predicted", "p_true", "p_predicted",
)  # fmt: skip
"""Columns of predictions.csv."""


@dataclass(frozen=True)
class RowPredictions:
    """Predictions of one method on one layer for the test rows of all splits, one after the other.

    Attributes:
        y: (n,) int64 true class of each row.
        predicted: (n,) int64 predicted class.
        p_true: (n,) probability of the true class in [0, 1], or None without probabilities.
        p_predicted: (n,) probability of the predicted class, or None without probabilities.
        groups: (n,) int64 group of each row, or None if every row is a group of its own.
    """

    y: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    p_true: npt.NDArray[np.float64] | None
    p_predicted: npt.NDArray[np.float64] | None
    groups: npt.NDArray[np.int64] | None

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """(n,) bool, whether the prediction is the true class."""
        found: npt.NDArray[np.bool_] = self.predicted == self.y
        return found

    def accuracy_of(self, kept: npt.NDArray[np.bool_]) -> dict[str, Any] | None:
        """Compute the accuracy on some of the rows.

        Args:
            kept: (n,) whether a row counts.

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


def join_folds(folds: Sequence[Predictions]) -> RowPredictions:
    """Join the predictions of all splits.

    Args:
        folds: predictions for the test rows of each split.
    """
    y = np.concatenate([each.y for each in folds])
    predicted = np.concatenate([each.predicted for each in folds])
    groups = [each.groups for each in folds if each.groups is not None]
    p_true: npt.NDArray[np.float64] | None = None
    p_predicted: npt.NDArray[np.float64] | None = None
    if folds[0].probabilities:
        scores = [(each.scores, np.arange(len(each.y)), each) for each in folds]
        p_true = np.concatenate([found[rows, each.y] for found, rows, each in scores])
        p_predicted = np.concatenate([found[rows, each.predicted] for found, rows, each in scores])
    joined = np.concatenate(groups) if groups else None
    return RowPredictions(y, predicted, p_true, p_predicted, joined)


def predictions_csv(
    splits: Sequence[Split],
    keys: npt.NDArray[Any],
    y: npt.NDArray[np.int64],
    classes: Sequence[str],
    tested: Mapping[tuple[str, str], RowPredictions],
) -> bytes:
    """Return the file predictions.csv.

    It has one line for each layer, method and test row. Rows that are in no test set come first,
    in one line without a layer, so that the file names the split of every row.

    Args:
        splits: one split, or one per fold.
        keys: (N,) key of each place.
        y: (N,) class of each place.
        classes: class names.
        tested: (layer, method) -> predictions for the test rows of all splits.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(COLUMNS)
    names = list(classes)
    for place, role in _never_tested(splits, len(y)):
        writer.writerow(["", "", "", role, keys[place], names[y[place]], "", "", ""])
    places = np.concatenate([split.test for split in splits])
    test_keys = keys[places].tolist()
    several = len(splits) > 1
    fold_of = np.repeat(np.arange(1, len(splits) + 1), [len(split.test) for split in splits])
    folds = fold_of.tolist() if several else [""] * len(places)
    for (layer, method), rows in tested.items():
        p_true, p_predicted = (
            _texts(rows.p_true, len(places)),
            _texts(rows.p_predicted, len(places)),
        )
        columns = zip(
            folds, test_keys, rows.y.tolist(), rows.predicted.tolist(), p_true, p_predicted,
            strict=True,
        )  # fmt: skip
        for fold, key, true, predicted, of_true, of_predicted in columns:
            writer.writerow(
                [layer, method, fold, "test", key, names[true], names[predicted], of_true,
                 of_predicted]
            )  # fmt: skip
    return buffer.getvalue().encode("utf-8", "surrogateescape")


def _never_tested(splits: Sequence[Split], num_places: int) -> Iterator[tuple[int, str]]:
    """Yield the places that no split tests, and their role: 'train' or 'validation'.

    Validation rows of a fold are test rows of another one, so with several folds the role of a row
    that is never tested is 'train'.
    """
    tested = np.zeros(num_places, bool)
    used = np.zeros(num_places, bool)
    for split in splits:
        tested[split.test] = True
        used[split.train] = True
    chosen: Places = splits[0].validation if len(splits) == 1 else np.empty(0, np.int64)
    validation = np.zeros(num_places, bool)
    validation[chosen] = True
    for place in np.flatnonzero(used & ~tested).tolist():
        yield place, "validation" if validation[place] else "train"


def _texts(values: npt.NDArray[np.float64] | None, count: int) -> Iterable[str]:
    """Return probabilities with six digits, or empty texts if there are none."""
    if values is None:
        return [""] * count
    return [f"{value:.6f}" for value in values.tolist()]
