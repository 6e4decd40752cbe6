"""Task of a probe of numbers or of several labels: targets, splits and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.row_splits import RowSplits
from featx.analysis.probe.value_metrics import (
    MULTILABEL_METRICS,
    REGRESSION_METRICS,
    first_multilabel_metric,
    first_regression_metric,
    multilabel_metrics,
    regression_metrics,
)
from featx.analysis.probe.values import TaskKind, Values
from featx.config import Config
from featx.errors import ConfigError, DataError, counted

METHODS = ("linear", "knn")
"""Methods that predict numbers and several labels."""

_OF_CLASSES = ("shots", "bootstrap", "compare_store")
"""Options that have an effect on classification only."""

_NAMED = 5
"""Number of labels that a note names."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ValueTask:
    """Targets and splits, which are the same for all layers.

    Attributes:
        kind: 'regression' or 'multilabel'.
        values: rows of the store and their targets.
        testing: rows of another store, or None if test rows come from the same store.
        rows: splits.
        seed: seed of the splits.
    """

    kind: TaskKind
    values: Values
    testing: Values | None
    rows: RowSplits
    seed: int

    @property
    def stores(self) -> list[Values]:
        """Rows of the store, then those of the other one, if any."""
        return [self.values] if self.testing is None else [self.values, self.testing]

    @property
    def targets(self) -> Matrix:
        """(N, T) targets of all places, training rows first."""
        return np.concatenate([each.values for each in self.stores])

    @property
    def keys(self) -> npt.NDArray[np.str_]:
        """(N,) key of each place."""
        keys = [each.labelled.store.keys[each.labelled.rows] for each in self.stores]
        return np.concatenate(keys)

    @property
    def test_places(self) -> npt.NDArray[np.int64]:
        """(n,) test places of all splits, one after the other."""
        return np.concatenate([split.test for split in self.rows.splits])

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics; the first one is that of the answer."""
        return REGRESSION_METRICS if self.kind.name == "regression" else MULTILABEL_METRICS

    def judge(self, places: npt.NDArray[np.int64], predicted: Matrix) -> dict[str, Any]:
        """Compute the metrics of some places, with `not_available` for the others."""
        metrics = regression_metrics if self.kind.name == "regression" else multilabel_metrics
        values, reasons = metrics(self.targets[places], predicted)
        return {**values, "not_available": reasons}

    def first_metric(self, truth: Matrix, predicted: Matrix) -> float | None:
        """Compute the first metric alone, for many resamples or splits; None if it is undefined."""
        if self.kind.name == "regression":
            return first_regression_metric(truth, predicted)
        return first_multilabel_metric(truth, predicted)


def check_options(config: Config, kind: TaskKind) -> None:
    """Refuse options and methods of classification."""
    for name in _OF_CLASSES:
        if getattr(config.probe, name) is not None:
            raise ConfigError(
                f"probe.{name} has an effect on classification only; this is {kind.name} "
                f"({kind.reason})."
            )
    if config.probe.calibration != "none":
        raise ConfigError(f"probe.calibration has an effect on classes only; this is {kind.name}.")
    if unsupported := set(config.probe.methods) - set(METHODS):
        linear = "ridge" if kind.name == "regression" else "logistic"
        raise ConfigError(
            f"probe.method={', '.join(sorted(unsupported))} predicts classes; with {kind.name} "
            f"({kind.reason}) use linear, which is {linear} regression here, or knn."
        )


def check_splits(task: ValueTask, config: Config) -> None:
    """Check that no set of rows is empty."""
    for split in task.rows.splits:
        if min(len(split.fit), len(split.validation), len(split.test)) == 0:
            raise DataError(
                f"{len(task.values.values)} rows with a value of {config.probe.label_column} are "
                "too few to be divided into training, validation and test rows."
            )


def untrained_label_notes(task: ValueTask) -> list[str]:
    """Return a note about labels of which a split has no example, or no counterexample, to fit on.

    Their logistic regression has no minimum, and their probabilities say nothing.
    """
    if task.kind.name != "multilabel":
        return []
    shares = np.stack([task.targets[split.train].mean(0) for split in task.rows.splits])
    unknown = np.flatnonzero(((shares == 0) | (shares == 1)).any(0)).tolist()
    if not unknown:
        return []
    more = f" and {len(unknown) - _NAMED} more" if unknown[_NAMED:] else ""
    names = ", ".join(task.values.names[i] for i in unknown[:_NAMED]) + more
    subject = counted(len(unknown), "label is", "labels are")
    return [
        f"{subject} in none or in all of the training rows of a split, so that nothing is learnt "
        f"about them there: {names}"
    ]
