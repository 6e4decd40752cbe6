"""Probe of numbers (regression) or of several labels of a row (multilabel)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from featx.analysis.probe.class_task import SCORE
from featx.analysis.probe.labelled_rows import TaskKind, open_other_store, valued_rows
from featx.analysis.probe.layer_rows import Problem
from featx.analysis.probe.methods import FittedProbe
from featx.analysis.probe.metrics import (
    INTERVAL_RESAMPLES,
    LABEL_THRESHOLD,
    Matrix,
    ProbePredictions,
    drawn_counts,
    interval_entry,
    join_predictions,
    units_of_rows,
)
from featx.analysis.probe.records import Record
from featx.analysis.probe.splits import RowSplits, Split, check_sizes
from featx.analysis.probe.task import RowTask
from featx.config import Config, listed_stores
from featx.errors import ConfigError, counted, first_names
from featx.store import FeatureStore
from featx.types import Json

_METHODS = ("linear", "knn")
"""Methods that predict numbers and several labels."""

_OF_CLASSES = ("shots", "bootstrap")
"""Options that have an effect on classification only."""

_NAMED = 5
"""Number of labels that a note names."""


class ValueTask(RowTask):
    """Task of predicting numbers, or several labels of each row."""

    chosen_by = "validation_loss"

    def __init__(
        self, config: Config, store: FeatureStore, kind: TaskKind, layers: Sequence[str]
    ) -> None:
        options = config.probe
        _check_options(config, kind)
        training, testing = valued_rows(store, options, kind), None
        if options.test_store is not None:
            other = open_other_store(store, options.test_store, layers)
            testing = valued_rows(other, options, kind, training.classes)
        super().__init__(config, kind, training, testing)
        self._is_regression = kind.name == "regression"
        self.columns = ["true", "predicted"]
        if not self._is_regression:
            self.columns = [
                f"{what}{name}" for what in ("true:", SCORE) for name in self.training.classes
            ]

    def check_splits(self, rows: RowSplits) -> None:
        column = self.config.probe.label_column
        check_sizes(rows, f"{len(self.training.rows)} rows with a value of {column}")

    def test(
        self, opened: Problem, seed: int, split: Split, method: str, fitted: FittedProbe
    ) -> ProbePredictions:
        groups = self.groups_of(seed, split)
        return ProbePredictions(opened.y[split.test], fitted.scores(split.test), groups=groups)

    def judge(self, folds: Sequence[ProbePredictions]) -> dict[str, Any]:
        joined = join_predictions(folds)
        values, reasons = value_metrics(self.kind.name, joined.y, joined.predicted)
        return {"rows": len(joined.y), **values, "not_available": reasons}

    @staticmethod
    def merit(validation: Mapping[str, float]) -> tuple[float, ...]:
        return (-validation["validation_loss"],)

    def first_metric(self, tested: ProbePredictions) -> float | None:
        return first_value_metric(self.kind.name, tested.y, tested.predicted)

    def result_entries(self, layer: str, tested: Sequence[ProbePredictions]) -> Json:
        joined = join_predictions(tested)
        # The bootstrap of the first metric draws rows, or groups with all their rows.
        unit_of_row = units_of_rows(joined.groups, len(joined.y))
        num_units, values = int(unit_of_row.max()) + 1, []
        for block in drawn_counts(unit_of_row, INTERVAL_RESAMPLES, num_units):
            for times in block:
                rows = np.repeat(np.arange(len(joined.y)), times[unit_of_row])
                sample = joined.y[rows], joined.predicted[rows]
                values.append(first_value_metric(self.kind.name, *sample))
        unit = "row" if joined.groups is None else "group"
        return {
            **interval_entry(values, unit, num_units),
            "targets": list(self.training.classes),
            "notes_on_rows": [*self.notes_on_rows(), *self._untrained_notes()],
        }

    def test_columns(self, record: Record[ProbePredictions], row: int) -> Iterator[list[object]]:
        tested = record.tested
        yield [*tested.y[row].tolist(), *tested.predicted[row].tolist()]

    def _untrained_notes(self) -> list[str]:
        """Return a note about labels of which a split has no example, or no counterexample.

        Their logistic regression has no minimum, and their probabilities say nothing.
        """
        if self._is_regression:
            return []
        splits = self.first_splits.splits
        shares = np.stack([self.targets[split.train].mean(0) for split in splits])
        unknown = np.flatnonzero(((shares == 0) | (shares == 1)).any(0)).tolist()
        if not unknown:
            return []
        names = first_names([self.training.classes[i] for i in unknown], _NAMED)
        subject = counted(len(unknown), "label is", "labels are")
        return [
            f"{subject} in none or in all of the training rows of a split, so that nothing is "
            f"learnt about them there: {names}"
        ]


def _check_options(config: Config, kind: TaskKind) -> None:
    for name in _OF_CLASSES:
        if getattr(config.probe, name) is not None:
            raise ConfigError(
                f"probe.{name} has an effect on classification only; this is {kind.name} "
                f"({kind.reason})."
            )
    if listed_stores(config.store or "")[1:]:
        raise ConfigError(
            f"store={config.store}: job=probe compares classes of two stores; this is {kind.name} "
            f"({kind.reason})."
        )
    if config.probe.calibration != "none":
        raise ConfigError(f"probe.calibration has an effect on classes only; this is {kind.name}.")
    if unsupported := set(config.probe.methods) - set(_METHODS):
        linear = "ridge" if kind.name == "regression" else "logistic"
        raise ConfigError(
            f"probe.method={', '.join(sorted(unsupported))} predicts classes; with {kind.name} "
            f"({kind.reason}) use linear, which is {linear} regression here, or knn."
        )


def value_metrics(
    task: str, truth: Matrix, predicted: Matrix
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Compute the metrics of numbers, (n, 1), or of labels, (n, T). Return name -> value, None if
    it is not available; and name -> reason for those.

    r2 is the coefficient of determination, mae the mean absolute error, spearman the rank
    correlation. map and macro_f1 are means over the labels that occur among the test rows.
    """
    from sklearn.metrics import average_precision_score, f1_score, mean_absolute_error

    def macro_f1(is_true: Matrix, scores: Matrix) -> float:
        return float(f1_score(is_true > 0, scores >= LABEL_THRESHOLD, zero_division=0))

    found: dict[str, float | str]
    if task == "regression":
        found = {
            "r2": _r2(truth, predicted),
            "mae": mean_absolute_error(truth[:, 0], predicted[:, 0]),
            "spearman": _spearman(truth[:, 0], predicted[:, 0]),
        }
    else:
        found = {
            "map": _mean_over_labels(truth, predicted, average_precision_score),
            "macro_f1": _mean_over_labels(truth, predicted, macro_f1),
        }
    values, reasons = dict[str, float | None](), dict[str, str]()
    for name, value in found.items():
        is_defined = not isinstance(value, str) and math.isfinite(value)
        values[name] = float(value) if is_defined else None
        if not is_defined:
            undefined = "it is not defined for these predictions"
            reasons[name] = value if isinstance(value, str) else undefined
    return values, reasons


def first_value_metric(task: str, truth: Matrix, predicted: Matrix) -> float | None:
    """Compute the first metric of `value_metrics` alone, for many resamples or splits."""
    from sklearn import config_context

    # scikit-learn checks each of its arguments, which takes longer than the metric of a few rows;
    # these are correct by construction.
    with config_context(assume_finite=True, skip_parameter_validation=True):
        if task == "regression":
            value = _r2(truth, predicted)
        else:
            value = _mean_over_labels(truth, predicted, _average_precision)
    return None if isinstance(value, str) or not math.isfinite(value) else value


def _spearman(truth: Matrix, predicted: Matrix) -> float | str:
    """Return the rank correlation, or the reason why it is not defined."""
    from scipy.stats import spearmanr

    if np.ptp(truth) == 0 or np.ptp(predicted) == 0:
        which = "have" if np.ptp(truth) == 0 else "are predicted with"
        return f"the test rows {which} a single value"
    return float(spearmanr(truth, predicted).statistic)


def _r2(truth: Matrix, predicted: Matrix) -> float | str:
    from sklearn.metrics import r2_score

    if np.ptp(truth) == 0:
        return "the test rows have a single value"
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
) -> float | str:
    """Return the mean of a metric over the labels that occur among the test rows."""
    tested = np.flatnonzero(truth.any(0)).tolist()
    if not tested:
        return "no test row has a label"
    return float(np.mean([metric(truth[:, i], predicted[:, i]) for i in tested]))
