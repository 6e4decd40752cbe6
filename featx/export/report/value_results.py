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

from featx.export.report.html import DASH
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


def value_results(found: Mapping[str, Any], folder: Path) -> ValueResults:
    """Convert probe.json of such a probe, and read its predictions.

    Args:
        found: contents of probe.json.
        folder: folder of the store.

    Raises:
        LookupError, TypeError, ValueError, csv.Error: a file is malformed.
    """
    names = METRICS[str(found["task"])]
    interval = found["interval"]
    layers = [
        (as_utf8(str(layer)), str(method), int(about["features"]), _values(about[method], names))
        for layer, about in found["layers"].items()
        for method in ("linear", "knn")
        if method in about
    ]
    chosen = found.get("layer_of_folds") or [found["layer"]]
    truth, predicted = _predictions(found, folder, [str(layer) for layer in chosen])
    numbers = found["task"] == "regression"
    return ValueResults(
        task=str(found["task"]),
        column=as_utf8(str(found["split"]["label_column"])),
        layer=as_utf8(str(found["layer"])),
        method=str(found["method"]),
        metrics=list(zip(names.values(), _values(found, names), strict=True)),
        interval=None if interval is None else (float(interval[0]), float(interval[1])),
        rows=int(found["rows"]),
        layer_of_folds=Counter(map(str, found.get("layer_of_folds", ()))).most_common(),
        headers=list(names.values()),
        layers=layers,
        scatter=_scatter(truth[:, 0], predicted[:, 0]) if numbers and len(truth) else None,
        labels=[] if numbers else _labels(found["targets"], truth, predicted),
        notes=tuple(as_utf8(str(note)) for note in found["notes_on_rows"]),
        repeated=_repeated(found["seeds"], names),
        num_seeds=0 if found["seeds"] is None else len(found["seeds"]["seeds"]),
    )


def _repeated(seeds: Mapping[str, Any] | None, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return mean and standard deviation of the metrics over several splits."""
    if seeds is None:
        return []
    found = {label: seeds["chosen"][name] for name, label in names.items()}
    return [
        (label, f"{float(each['mean']):.3f} ± {float(each['std']):.3f}")
        for label, each in found.items()
        if each is not None
    ]


def _values(about: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Return the metrics of an entry as text."""
    return [DASH if about[name] is None else f"{float(about[name]):.3f}" for name in names]


def _predictions(
    found: Mapping[str, Any], folder: Path, chosen: list[str]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Read the true and predicted values of the test rows, (n, T) each.

    Both are empty if the file is missing or does not belong to probe.json.

    Args:
        found: contents of probe.json.
        folder: folder of the store.
        chosen: layer of each fold, or the only one.
    """
    names = [str(name) for name in found["targets"]]
    empty = np.empty((0, len(names)))
    try:
        data = (folder / layout.PROBE_HEADS / layout.PROBE_PREDICTIONS).read_bytes()
    except OSError:
        return empty, empty
    if hashlib.sha256(data).hexdigest() != found["predictions"]["sha256"]:
        return empty, empty
    numbers = found["task"] == "regression"
    columns = ["true"] if numbers else [f"true:{name}" for name in names]
    others = ["predicted"] if numbers else [f"score:{name}" for name in names]
    truth, predicted = [], []
    for line in csv.DictReader(io.StringIO(data.decode("utf-8", "surrogateescape"), newline="")):
        layer = chosen[min(int(line["fold"] or 1), len(chosen)) - 1]
        asked = layer, found["method"], str(found["split"]["seed"])
        if (line["layer"], line["method"], line["seed"]) == asked:
            truth.append([float(line[name]) for name in columns])
            predicted.append([float(line[name]) for name in others])
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
    found = []
    for place, name in enumerate(names if len(truth) else []):
        has, said = truth[:, place] > 0, predicted[:, place] >= THRESHOLD
        right = int((has & said).sum())
        recall = right / int(has.sum()) if has.any() else None
        precision = right / int(said.sum()) if said.any() else None
        found.append(LabelResult(as_utf8(name), int(has.sum()), recall, precision))
    return sorted(found, key=lambda each: -each.rows)[:LABELS_SHOWN]
