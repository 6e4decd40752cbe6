"""Predictions for the test rows without the scores of all classes, and their file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.metrics import ProbePredictions, effective_rows, wilson
from featx.analysis.probe.splits import Places, Split
from featx.base import csv_bytes

COLUMNS = (
    "layer", "method", "seed", "fold", "split", "key", "group", "true", "predicted", "p_true",
    "p_predicted", "near_duplicate",
)  # fmt: skip
"""First columns of predictions.csv; one column per class follows."""

SCORE = "score:"
"""Beginning of the name of the column of a class, which its name follows."""

MAX_SCORES = 1 << 24
"""Number of scores up to which predictions.csv has a column per class, about 300 MB."""


@dataclass(frozen=True)
class TestedSplits:
    """Splits that one seed made, and the predictions for their test rows.

    Attributes:
        seed: the seed.
        splits: one split, or one per fold.
        groups: (N,) group of each place, or None if every row is a group of its own.
        tested: (layer, method) -> predictions for the test rows of all splits.
        near_duplicates: test place -> training place that is almost equal to it.
    """

    seed: int
    splits: Sequence[Split]
    groups: npt.NDArray[np.int64] | None
    tested: Mapping[tuple[str, str], RowPredictions]
    near_duplicates: Mapping[int, int]


@dataclass(frozen=True)
class RowPredictions:
    """Predictions of one method on one layer for the test rows of all splits, one after the other.

    Attributes:
        y: (n,) int64 true class of each row.
        predicted: (n,) int64 predicted class.
        p_true: (n,) probability of the true class in [0, 1], or None without probabilities.
        p_predicted: (n,) probability of the predicted class, or None without probabilities.
        groups: (n,) int64 group of each row, or None if every row is a group of its own.
        scores: (n, C) score of each class, or None if there are too many to keep.
    """

    y: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    p_true: npt.NDArray[np.float64] | None
    p_predicted: npt.NDArray[np.float64] | None
    groups: npt.NDArray[np.int64] | None
    scores: npt.NDArray[np.float64] | None = None

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """(n,) bool, whether the prediction is the true class."""
        is_right: npt.NDArray[np.bool_] = self.predicted == self.y
        return is_right

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


def join_folds(folds: Sequence[ProbePredictions], keep_scores: bool = False) -> RowPredictions:
    """Join the predictions of all splits."""
    y = np.concatenate([each.y for each in folds])
    predicted = np.concatenate([each.predicted for each in folds])
    groups = [each.groups for each in folds if each.groups is not None]
    p_true: npt.NDArray[np.float64] | None = None
    p_predicted: npt.NDArray[np.float64] | None = None
    if folds[0].probabilities:
        scores = [(each.scores, np.arange(len(each.y)), each) for each in folds]
        p_true = np.concatenate([matrix[rows, each.y] for matrix, rows, each in scores])
        p_predicted = np.concatenate(
            [matrix[rows, each.predicted] for matrix, rows, each in scores]
        )
    return RowPredictions(
        y,
        predicted,
        p_true,
        p_predicted,
        np.concatenate(groups) if groups else None,
        np.concatenate([each.scores for each in folds]) if keep_scores else None,
    )


def predictions_csv(
    keys: npt.NDArray[Any],
    y: npt.NDArray[np.int64],
    classes: Sequence[str],
    seed_splits: Sequence[TestedSplits],
) -> bytes:
    """Return the file predictions.csv.

    It has one line for each seed, layer, method and test row. Rows that are in no test set of a
    seed come before, in one line without a layer, so that the file names the split of every row.
    Numbers are written such that they are read back without a difference.
    """
    names = list(classes)
    has_scores = all(
        rows.scores is not None for each in seed_splits for rows in each.tested.values()
    )
    header = [f"{SCORE}{name}" for name in names] if has_scores else []

    def lines() -> Iterator[Sequence[Any]]:
        yield [*COLUMNS, *header]
        for each in seed_splits:
            for place, role in _never_tested(each.splits, len(y)):
                group = "" if each.groups is None else int(each.groups[place])
                line = ["", "", each.seed, "", role, keys[place], group, names[y[place]]]
                yield [*line, "", "", "", "", *[""] * len(header)]
            for layer, method in each.tested:
                for line in _test_lines(each, keys, names, layer, method):
                    yield [layer, method, each.seed, *line]

    return csv_bytes(lines())


def _test_lines(
    seed_split: TestedSplits, keys: npt.NDArray[Any], names: Sequence[str], layer: str, method: str
) -> Iterator[list[Any]]:
    """Yield the columns of each test row of one layer and method, beginning with the fold."""
    splits, rows = seed_split.splits, seed_split.tested[layer, method]
    places = np.concatenate([split.test for split in splits]).tolist()
    folds = np.repeat(np.arange(1, len(splits) + 1), [len(split.test) for split in splits]).tolist()
    for i, place in enumerate(places):
        near = seed_split.near_duplicates.get(place)
        yield [
            folds[i] if len(splits) > 1 else "",
            "test",
            keys[place],
            "" if rows.groups is None else int(rows.groups[i]),
            names[rows.y[i]],
            names[rows.predicted[i]],
            "" if rows.p_true is None else float(rows.p_true[i]),
            "" if rows.p_predicted is None else float(rows.p_predicted[i]),
            "" if near is None else keys[near],
            *(() if rows.scores is None else rows.scores[i].tolist()),
        ]


def _never_tested(splits: Sequence[Split], num_places: int) -> Iterator[tuple[int, str]]:
    """Yield the places that no split tests, and their role: 'train' or 'validation'.

    Validation rows of a fold are test rows of another one, so with several folds the role of a row
    that is never tested is 'train'.
    """
    is_tested = np.zeros(num_places, bool)
    is_used = np.zeros(num_places, bool)
    for split in splits:
        is_tested[split.test] = True
        is_used[split.train] = True
    validation_places: Places = splits[0].validation if len(splits) == 1 else np.empty(0, np.int64)
    validation = np.zeros(num_places, bool)
    validation[validation_places] = True
    for place in np.flatnonzero(is_used & ~is_tested).tolist():
        yield place, "validation" if validation[place] else "train"
