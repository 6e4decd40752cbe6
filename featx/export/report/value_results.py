"""Results of a probe of numbers or of several labels of a row, for the report."""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.base import csv_line
from featx.export.report.probe_metrics import metric_texts
from featx.export.selection import as_utf8
from featx.store import layout

METRICS = {
    "regression": {"r2": "R²", "mae": "Mean absolute error", "spearman": "Spearman"},
    "multilabel": {"map": "mAP", "macro_f1": "Macro-F1"},
}
"""Task -> name in probe.json -> name for people of its metrics, the first one is the answer."""

POINTS_SHOWN = 1000
"""Maximum number of test rows in the plot of predicted against true values."""

LABELS_SHOWN = 40
"""Maximum number of labels in the table, those with most test rows."""

THRESHOLD = 0.5
"""Score from which a label counts as predicted."""


@dataclass(frozen=True)
class Scatter:
    """Predicted against true values of test rows.

    Attributes:
        points: (x, y) of each row in [0, 100], y downwards.
        low: smallest value of the axes.
        high: largest value.
        rows: number of test rows, of which at most POINTS_SHOWN are drawn.
    """

    points: list[tuple[float, float]]
    low: float
    high: float
    rows: int


@dataclass(frozen=True)
class LabelResult:
    """Predictions of one label.

    Attributes:
        name: the label.
        rows: number of test rows that have it.
        recall: share of them with a score of THRESHOLD or more, or None without any.
        precision: share of rows that have it among those with such a score, or None.
    """

    name: str
    rows: int
    recall: float | None
    precision: float | None


@dataclass(frozen=True)
class ValueResults:
    """Contents of the files of such a probe.

    Attributes:
        task: 'regression' or 'multilabel'.
        column: column that was predicted.
        layer: best layer.
        method: its method.
        metrics: (name for people, value) at the top, the answer first.
        interval: 95 % interval of the answer, or None.
        rows: number of test rows.
        layer_of_folds: (layer, number of folds that chose it), empty for one split.
        headers: names of the metrics.
        layers: (layer, method, width, values of the metrics).
        scatter: predicted against true numbers, or None.
        labels: results of each label; empty for numbers, or without predictions.csv.
        notes: notes of the job.
        repeated: (name for people, mean and standard deviation) of the metrics over the splits of
            several seeds; empty without.
        num_seeds: number of these splits, or 0.
    """

    task: str
    column: str
    layer: str
    method: str
    metrics: list[tuple[str, str]]
    interval: tuple[float, float] | None
    rows: int
    layer_of_folds: list[tuple[str, int]]
    headers: list[str]
    layers: list[tuple[str, str, int, list[str]]]
    scatter: Scatter | None
    labels: list[LabelResult]
    notes: tuple[str, ...]
    repeated: list[tuple[str, str]]
    num_seeds: int


def value_results(result: Mapping[str, Any], folder: Path) -> ValueResults:
    """Convert probe.json of such a probe, and read its predictions.

    Args:
        result: contents of probe.json.
        folder: folder of the store.

    Raises:
        LookupError, TypeError, ValueError, csv.Error: a file is malformed.
    """
    names = METRICS[str(result["task"])]
    interval = result["interval"]
    layers = [
        (
            as_utf8(str(layer)),
            str(method),
            int(about["features"]),
            metric_texts(about[method], names),
        )
        for layer, about in result["layers"].items()
        for method in ("linear", "knn")
        if method in about
    ]
    chosen = result.get("layer_of_folds") or [result["layer"]]
    truth, predicted = _predictions(result, folder, [str(layer) for layer in chosen])
    numbers = result["task"] == "regression"
    return ValueResults(
        task=str(result["task"]),
        column=as_utf8(str(result["split"]["label_column"])),
        layer=as_utf8(str(result["layer"])),
        method=str(result["method"]),
        metrics=list(zip(names.values(), metric_texts(result, names), strict=True)),
        interval=None if interval is None else (float(interval[0]), float(interval[1])),
        rows=int(result["rows"]),
        layer_of_folds=Counter(map(str, result.get("layer_of_folds", ()))).most_common(),
        headers=list(names.values()),
        layers=layers,
        scatter=_scatter(truth[:, 0], predicted[:, 0]) if numbers and len(truth) else None,
        labels=[] if numbers else _labels(result["targets"], truth, predicted),
        notes=tuple(as_utf8(str(note)) for note in result["notes_on_rows"]),
        repeated=_seed_metrics(result["seeds"], names),
        num_seeds=0 if result["seeds"] is None else len(result["seeds"]["seeds"]),
    )


def _seed_metrics(
    seeds: Mapping[str, Any] | None, names: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return mean and standard deviation of the metrics over several splits."""
    if seeds is None:
        return []
    spreads = {label: seeds["chosen"][name] for name, label in names.items()}
    return [
        (label, f"{float(each['mean']):.3f} ± {float(each['std']):.3f}")
        for label, each in spreads.items()
        if each is not None
    ]


def _predictions(
    result: Mapping[str, Any], folder: Path, chosen: list[str]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Read the true and predicted values of the test rows, (n, T) each.

    Both are empty if the file is missing or does not belong to probe.json.

    Args:
        result: contents of probe.json.
        folder: folder of the store.
        chosen: layer of each fold, or the only one.
    """
    names = [str(name) for name in result["targets"]]
    empty = np.empty((0, len(names)))
    try:
        data = (folder / layout.PROBE_HEADS / layout.PROBE_PREDICTIONS).read_bytes()
    except OSError:
        return empty, empty
    if hashlib.sha256(data).hexdigest() != result["predictions"]["sha256"]:
        return empty, empty
    numbers = result["task"] == "regression"
    columns = ["true"] if numbers else csv_line(f"true:{name}" for name in names)
    predicted_columns = ["predicted"] if numbers else csv_line(f"score:{name}" for name in names)
    truth, predicted = [], []
    for line in csv.DictReader(io.StringIO(data.decode("utf-8", "surrogateescape"), newline="")):
        layer = chosen[min(int(line["fold"] or 1), len(chosen)) - 1]
        chosen_line = layer, result["method"], str(result["split"]["seed"])
        if (line["layer"], line["method"], line["seed"]) == chosen_line:
            truth.append([float(line[name]) for name in columns])
            predicted.append([float(line[name]) for name in predicted_columns])
    return (np.array(truth), np.array(predicted)) if truth else (empty, empty)


def _scatter(truth: npt.NDArray[np.float64], predicted: npt.NDArray[np.float64]) -> Scatter:
    """Arrange predicted against true numbers on axes of one scale."""
    low = float(min(truth.min(), predicted.min()))
    high = float(max(truth.max(), predicted.max()))
    rows = np.arange(len(truth))
    if len(rows) > POINTS_SHOWN:
        rows = np.sort(np.random.default_rng(0).choice(rows, POINTS_SHOWN, replace=False))
    x, y = (100 * (values[rows] - low) / ((high - low) or 1) for values in (truth, predicted))
    points = list(zip(x.round(2).tolist(), (100 - y).round(2).tolist(), strict=True))
    return Scatter(points, low, high, len(truth))


def _labels(
    names: list[str], truth: npt.NDArray[np.float64], predicted: npt.NDArray[np.float64]
) -> list[LabelResult]:
    """Count right and wrong predictions of each label, the most frequent label first."""
    results = []
    for place, name in enumerate(names if len(truth) else []):
        has_label, is_predicted = truth[:, place] > 0, predicted[:, place] >= THRESHOLD
        right = int((has_label & is_predicted).sum())
        recall = right / int(has_label.sum()) if has_label.any() else None
        precision = right / int(is_predicted.sum()) if is_predicted.any() else None
        results.append(LabelResult(as_utf8(name), int(has_label.sum()), recall, precision))
    return sorted(results, key=lambda each: -each.rows)[:LABELS_SHOWN]
