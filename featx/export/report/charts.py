"""Contents of the page's charts and tables: what templates draw of the probe's results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from featx.export.report.predictions_file import ValuePredictions
from featx.export.report.probe_results import Probes

LAYERS_CHARTED = 20
"""Maximum number of layers in the chart of the result."""

CURVES = 8
"""Maximum number of lines in the few-shot chart."""

POINTS_SHOWN = 1000
"""Maximum number of test rows in the plot of predicted against true values."""

LABELS_SHOWN = 40
"""Maximum number of labels in the table, those with most test rows."""

_LABEL_THRESHOLD = 0.5
"""Score from which a label counts as predicted."""


@dataclass(frozen=True)
class ClassErrors:
    """One class with errors, for the table next to the confusion matrix.

    `recall` is None without a test row, `precision` without a prediction; `predicted` has the other
    classes with their numbers of rows, the most frequent first.
    """

    name: str
    rows: int
    recall: float | None
    precision: float | None
    predicted: list[tuple[str, int]]


def class_errors(probes: Probes) -> list[ClassErrors]:
    """Return the classes with an error, those with the lowest recall first."""
    counts = probes.confusion
    if probes.result is None or counts is None:
        return []
    classes, errors = probes.result["classes"], []
    for i, name in enumerate(classes):
        rows, predicted = int(counts[i].sum()), int(counts[:, i].sum())
        right = int(counts[i, i])
        if rows + predicted == 2 * right:
            continue
        others = [j for j in np.argsort(-counts[i]).tolist() if j != i and counts[i, j]]
        errors.append(
            ClassErrors(
                name,
                rows,
                right / rows if rows else None,
                right / predicted if predicted else None,
                [(classes[j], int(counts[i, j])) for j in others],
            )
        )
    return sorted(errors, key=lambda each: 1 if each.recall is None else each.recall)


def compared_layers(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the paired tests of the best layer with the others, the largest p-value first.

    Each has the name of the other layer as `layer`, and about it a `verdict`: 'equal' (cannot be
    told apart), 'worse' or 'better'.
    """
    tests = []
    for layer, test in result["paired_tests"].items():
        verdict = "worse" if test["first_only"] > test["second_only"] else "better"
        tests.append(
            {**test, "layer": layer, "verdict": verdict if test["told_apart"] else "equal"}
        )
    return sorted(tests, key=lambda test: -test["p_holm"])


def charted_layers(probes: Probes, layers: Sequence[str]) -> list[str]:
    """Return the layers in the chart of the result, in the order of the page.

    All layers, or those with the highest accuracy, among them the best one.
    """
    results = probes.of_best_method
    ranked = sorted(results, key=lambda name: (name != probes.layer, -results[name]["accuracy"]))
    place = {layer: i for i, layer in enumerate(layers)}
    return sorted(ranked[:LAYERS_CHARTED], key=lambda layer: place.get(layer, -1))


@dataclass(frozen=True)
class Line:
    """One line of the few-shot chart.

    `spreads` has (x, low y, high y) of each standard deviation, `label_y` the place of the name.
    """

    name: str
    best: bool
    points: list[tuple[float, float]]
    spreads: list[tuple[float, float, float]]
    label_y: float


@dataclass(frozen=True)
class LinePlot:
    """Accuracy over the number of training rows per class.

    `ticks` and `levels` have the place and the text of each mark on the axes, `chance` is the y of
    guessing.
    """

    ticks: list[tuple[float, str]]
    levels: list[tuple[float, str]]
    lines: list[Line]
    chance: float

    left, right, top, bottom = 40, 346, 14, 230
    width, height = 450, 272


def few_shot_plot(probes: Probes) -> LinePlot | None:
    """Arrange the few-shot chart of the first method; None without few-shot results."""
    results = {
        name: entry for name, entry in probes.of_best_method.items() if entry.get("few_shot")
    }
    if probes.result is None or not results:
        return None
    ranked = sorted(results, key=lambda name: -results[name]["accuracy"])[:CURVES]
    curves = []
    for layer, entry in results.items():
        if layer in ranked:
            few = [(each["mean"], each["std"] or 0.0) for each in entry["few_shot"].values()]
            curves.append((layer, layer == probes.layer, [*few, (entry["accuracy"], 0.0)]))
    ticks = [*next(iter(results.values()))["few_shot"], "all"]
    return line_plot(ticks, curves, 1 / len(probes.result["classes"]))


def line_plot(
    ticks: Sequence[str],
    curves: Sequence[tuple[str, bool, Sequence[tuple[float, float]]]],
    chance: float,
) -> LinePlot:
    """Arrange the few-shot chart, with labels that do not overlap."""
    frame = LinePlot
    step = (frame.right - frame.left - 20) / max(1, len(ticks) - 1)

    def y_of(share: float) -> float:
        return round(frame.bottom - (frame.bottom - frame.top) * min(1.0, max(0.0, share)), 1)

    xs = [round(frame.left + 10 + step * i, 1) for i in range(len(ticks))]
    label_y: dict[str, float] = {}
    previous = -math.inf
    for y, name in sorted((y_of(values[-1][0]), name) for name, _, values in curves):
        previous = label_y[name] = max(y, previous + 15)
    lines = []
    for name, best, values in curves:
        points = [(x, y_of(mean)) for x, (mean, _) in zip(xs, values, strict=True)]
        spreads = [
            (x, y_of(mean - spread), y_of(mean + spread))
            for x, (mean, spread) in zip(xs, values, strict=True)
            if spread
        ]
        lines.append(Line(name, best, points, spreads, label_y[name] + 4))
    levels = [(y_of(share), f"{100 * share:.0f}") for share in (0, 0.25, 0.5, 0.75, 1)]
    return LinePlot(list(zip(xs, ticks, strict=True)), levels, lines, y_of(chance))


@dataclass(frozen=True)
class Scatter:
    """Predicted against true values of test rows.

    Points are (x, y) in [0, 100], y downwards; at most POINTS_SHOWN of the rows are drawn.
    """

    points: list[tuple[float, float]]
    low: float
    high: float
    rows: int


def scatter_plot(values: ValuePredictions) -> Scatter | None:
    """Arrange predicted against true numbers on axes of one scale; None without predictions."""
    truth, predicted = values.truth[:, 0], values.predicted[:, 0]
    if not len(truth):
        return None
    low = float(min(truth.min(), predicted.min()))
    high = float(max(truth.max(), predicted.max()))
    rows = np.arange(len(truth))
    if len(rows) > POINTS_SHOWN:
        rows = np.sort(np.random.default_rng(0).choice(rows, POINTS_SHOWN, replace=False))
    x, y = (100 * (each[rows] - low) / ((high - low) or 1) for each in (truth, predicted))
    points = list(zip(x.round(2).tolist(), (100 - y).round(2).tolist(), strict=True))
    return Scatter(points, low, high, len(truth))


def label_results(names: Sequence[str], values: ValuePredictions) -> list[dict[str, Any]]:
    """Return name, rows, recall and precision of each label, the most frequent label first."""
    results: list[dict[str, Any]] = []
    for place, name in enumerate(names if len(values.truth) else ()):
        has_label = values.truth[:, place] > 0
        is_predicted = values.predicted[:, place] >= _LABEL_THRESHOLD
        right = int((has_label & is_predicted).sum())
        rows, predicted = int(has_label.sum()), int(is_predicted.sum())
        recall, precision = (right / count if count else None for count in (rows, predicted))
        results.append({"name": name, "rows": rows, "recall": recall, "precision": precision})
    return sorted(results, key=lambda each: -each["rows"])[:LABELS_SHOWN]
