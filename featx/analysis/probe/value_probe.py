"""Probe that predicts numbers (regression) or several labels of a row (multilabel)."""

from __future__ import annotations

import csv
import io
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe.labelled_rows import Features, layer_rows
from featx.analysis.probe.logistic_regression import threads_for
from featx.analysis.probe.output_files import write_result
from featx.analysis.probe.result import run_entries, store_entries
from featx.analysis.probe.row_predictions import SCORE
from featx.analysis.probe.row_splits import RowSplits, missing_group_notes, split_rows
from featx.analysis.probe.value_methods import FittedValues, ValueProblem, fit_values
from featx.analysis.probe.value_metrics import (
    MULTILABEL_METRICS,
    REGRESSION_METRICS,
    multilabel_metrics,
    regression_metrics,
    require_scikit_learn,
)
from featx.analysis.probe.values import TaskKind, Values, valued_rows
from featx.base import WIDTH, choose_device, exact_cuda
from featx.config import Config
from featx.errors import ConfigError, DataError
from featx.store import FeatureStore, matching_layers

METHODS = ("linear", "knn")
"""Methods that predict numbers and several labels."""

RESAMPLES = 1000
"""Number of bootstrap resamples of the interval of the first metric."""

_OF_CLASSES = ("test_store", "shots", "seeds", "bootstrap", "compare_store")
"""Options that have an effect on classification only."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ValueTask:
    """Targets and splits, which are the same for all layers.

    Attributes:
        kind: 'regression' or 'multilabel'.
        values: rows and targets.
        rows: splits.
        seed: seed of the splits.
    """

    kind: TaskKind
    values: Values
    rows: RowSplits
    seed: int

    @property
    def test_places(self) -> npt.NDArray[np.int64]:
        """(n,) test places of all splits, one after the other."""
        return np.concatenate([split.test for split in self.rows.splits])

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics; the first one is that of the answer."""
        return REGRESSION_METRICS if self.kind.name == "regression" else MULTILABEL_METRICS

    def judge(
        self, places: npt.NDArray[np.int64], predicted: Matrix, only: str | None = None
    ) -> dict[str, Any]:
        """Compute the metrics of some places, with `not_available` for the others.

        Args:
            places: (n,) places.
            predicted: (n, T) predictions.
            only: name of the only metric to compute; None for all.
        """
        metrics = regression_metrics if self.kind.name == "regression" else multilabel_metrics
        found, reasons = metrics(self.values.values[places], predicted, only)
        return {**found, "not_available": reasons}


def run_value_probe(
    config: Config, store: FeatureStore, kind: TaskKind, log: Callable[[str], None]
) -> dict[str, Any]:
    """Fit and test the probes, and write probe.json and the predictions; heads are not written.

    Args:
        config: checked config with job=probe.
        store: the store.
        kind: 'regression' or 'multilabel'.
        log: called with a line of text after each layer.

    Returns:
        contents of probe.json (docs/probe.md).

    Raises:
        FeatxError: the store or the options do not allow such a probe.
    """
    started_at = time.perf_counter()
    _check(config, kind)
    layers = matching_layers(store, config.layers)
    device = choose_device(config.device)
    values = valued_rows(store, config.probe, kind)
    task = ValueTask(kind, values, split_rows(config, values.labelled), config.seed)
    _check_splits(task, config)
    found: dict[str, dict[str, Any]] = {}
    fits: dict[tuple[str, str], list[FittedValues]] = {}
    for layer in layers:
        rows = layer_rows(values.labelled, layer)
        with torch.no_grad(), exact_cuda:
            features = Features([rows], device, config.probe.memory_gib * (1 << 30))
            found[layer] = {"features": features.width, "streamed": features.whole is None}
            for method in config.probe.methods:
                found[layer][method], fits[layer, method] = _probe(config, task, features, method)
        shown = [
            f"{method} {name} {_text(found[layer][method][name])}"
            for method in config.probe.methods
            for name in task.metrics[:1]
        ]
        text = f"{layer}: {features.width} features; {', '.join(shown)}"
        log(textwrap.fill(text, WIDTH, subsequent_indent="  "))
    result = _result(config, task, found, fits, time.perf_counter() - started_at)
    write_result(store, result, _predictions_csv(task, fits))
    return result


def _text(value: float | None) -> str:
    """Format a metric; '-' if it is not available."""
    return "-" if value is None else f"{value:.3f}"


def _check(config: Config, kind: TaskKind) -> None:
    """Refuse options and methods of classification.

    Raises:
        ConfigError: there is one.
        MissingExtraError: scikit-learn is not installed.
    """
    require_scikit_learn(kind.name)
    for name in _OF_CLASSES:
        if getattr(config.probe, name) is not None:
            raise ConfigError(
                f"probe.{name} has an effect on classification only; this is {kind.name} "
                f"({kind.reason})."
            )
    if config.probe.calibration != "none":
        raise ConfigError(f"probe.calibration has an effect on classes only; this is {kind.name}.")
    if others := set(config.probe.methods) - set(METHODS):
        raise ConfigError(
            f"probe.method={', '.join(sorted(others))} predicts classes; with {kind.name} "
            f"({kind.reason}) use linear, which is ridge regression for numbers, or knn."
        )


def _check_splits(task: ValueTask, config: Config) -> None:
    """Check that no set of rows is empty.

    Raises:
        DataError: one is.
    """
    for split in task.rows.splits:
        if min(len(split.fit), len(split.validation), len(split.test)) == 0:
            raise DataError(
                f"{len(task.values.values)} rows with a value of {config.probe.label_column} are "
                "too few to be divided into training, validation and test rows."
            )


def _probe(
    config: Config, task: ValueTask, features: Features, method: str
) -> tuple[dict[str, Any], list[FittedValues]]:
    """Probe one layer with one method.

    Returns:
        the entry in probe.json, and the fits of all splits.
    """
    started_at = time.perf_counter()
    multilabel = task.kind.name == "multilabel"
    problem = ValueProblem(features, task.values.values, multilabel, config.probe)
    with threads_for(len(features) * features.width, features.device):
        fits = [fit_values(problem, method, split) for split in task.rows.splits]
    places = task.test_places
    name = "k" if method == "knn" else "l2"
    about = {
        "rows": len(places),
        **task.judge(places, np.concatenate([fit.predicted for fit in fits])),
        "validation_loss": float(np.mean([fit.validation_loss for fit in fits])),
        name: [fit.chosen for fit in fits] if len(fits) > 1 else fits[0].chosen,
        "sweep": [fit.sweep for fit in fits] if len(fits) > 1 else fits[0].sweep,
        "notes": list(dict.fromkeys(note for fit in fits for note in fit.notes)),
        "seconds": round(time.perf_counter() - started_at, 3),
    }
    return about, fits


def _result(
    config: Config,
    task: ValueTask,
    found: dict[str, dict[str, Any]],
    fits: Mapping[tuple[str, str], list[FittedValues]],
    seconds: float,
) -> dict[str, Any]:
    """Assemble probe.json.

    With several folds each chooses its layer on its own validation rows (nested validation).
    """
    method = config.probe.methods[0]
    best = min(found, key=lambda layer: found[layer][method]["validation_loss"])
    folds = range(len(task.rows.splits))
    chosen = [
        min(found, key=lambda layer: fits[layer, method][fold].validation_loss) for fold in folds
    ]
    predicted = np.concatenate([fits[chosen[fold], method][fold].predicted for fold in folds])
    nested = {}
    if len(folds) > 1 and len(found) > 1:
        nested = {"layer_of_folds": chosen, **task.judge(task.test_places, predicted)}
    return {
        **store_entries(task.values.labelled.store),
        "task": task.kind.name,
        "task_reason": task.kind.reason,
        "layer": best,
        "method": method,
        **found[best][method],
        **nested,
        **_interval(task, predicted),
        "targets": list(task.values.names),
        "rows_labelled": len(task.values.values),
        "split": task.rows.as_dict(config),
        "chosen_by": "validation_loss",
        "notes_on_rows": [
            *task.values.labelled.notes,
            *task.rows.notes,
            *missing_group_notes(task.rows, config.probe.group_column),
        ],
        **run_entries(config, seconds),
        "head": None,
        "layers": found,
    }


def _interval(task: ValueTask, predicted: Matrix) -> dict[str, Any]:
    """Return the 95 % percentile interval of the first metric by the bootstrap of rows or groups.

    Its entries are `interval`, `resamples`, `unit` and `units`. `interval` is None if the metric is
    undefined in a resample, or equal in all of them.
    """
    places, groups = task.test_places, task.rows.groups
    of_row = np.arange(len(places))
    if groups is not None:
        of_row = np.unique(groups[places], return_inverse=True)[1]
    order = np.argsort(of_row, kind="stable")
    units = np.split(order, np.cumsum(np.bincount(of_row))[:-1])
    rng = np.random.default_rng(0)  # the same numbers for the same predictions
    found, first = [], task.metrics[0]
    for _ in range(RESAMPLES):
        drawn = np.concatenate([units[i] for i in rng.integers(len(units), size=len(units))])
        found.append(task.judge(places[drawn], predicted[drawn], first)[first])
    interval = None
    if None not in found and len(set(found)) > 1:
        interval = np.quantile(found, [0.025, 0.975]).tolist()
    unit = "row" if groups is None else "group"
    return {"interval": interval, "resamples": RESAMPLES, "unit": unit, "units": len(units)}


def _predictions_csv(task: ValueTask, fits: Mapping[tuple[str, str], list[FittedValues]]) -> bytes:
    """Return predictions.csv: one line for each layer, method and test row."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    if task.kind.name == "regression":
        columns = ["true", "predicted"]
    else:
        columns = [f"{what}{name}" for what in ("true:", SCORE) for name in task.values.names]
    writer.writerow(["layer", "method", "seed", "fold", "split", "key", "group", *columns])
    labelled, groups = task.values.labelled, task.rows.groups
    keys, seed = labelled.store.keys[labelled.rows], task.seed
    several = len(task.rows.splits) > 1
    for (layer, method), of_folds in fits.items():
        for fold, (split, fit) in enumerate(zip(task.rows.splits, of_folds, strict=True), 1):
            for place, predicted in zip(split.test.tolist(), fit.predicted.tolist(), strict=True):
                group = "" if groups is None else int(groups[place])
                line = [layer, method, seed, fold if several else "", "test", keys[place], group]
                writer.writerow([*line, *task.values.values[place].tolist(), *predicted])
    return buffer.getvalue().encode("utf-8", "surrogateescape")
