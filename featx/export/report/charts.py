"""Charts, heat maps and tables of the page: what templates draw of the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from featx.analysis.probe import LABEL_THRESHOLD, METRICS, metrics_table, pixel_classes_table
from featx.base import Table, percent_text
from featx.export.report.probe_results import Probes, ValuePredictions
from featx.types import Json

LAYERS_CHARTED = 20
"""Maximum number of layers in the chart of the result."""

CURVES = 8
"""Maximum number of lines in the few-shot chart."""

POINTS_SHOWN = 1000
"""Maximum number of test rows in the plot of predicted against true values."""

LABELS_SHOWN = 40
"""Maximum number of labels in the table, those with most test rows, or of classes of pixels."""

CLASSES_SHOWN = 20
"""Maximum number of classes in the confusion matrix, and of classes in the table next to it."""

LAYERS_IN_CKA = 24
"""Maximum number of layers in the CKA matrix."""

LABEL_LENGTH = 16
"""Maximum number of characters of a label."""

_CELL = 34
"""Side of a cell, in units of the style sheet, as all lengths here."""


def probe_contents(probes: Probes, layers: Sequence[str]) -> Json:
    """Return what templates show of the result of job=probe, by the names that they use."""
    result, task = probes.result, probes.task
    if result is None:
        return {"curves": None}
    metrics = METRICS[task]
    if task == "classification":
        return {
            "metrics": metrics,
            "metrics_table": metrics_table(result, ("method",), metrics),
            "confusion": confusion_map(probes),
            "class_errors": class_errors(probes),
            "compared": compared_layers(result),
            "charted": charted_layers(probes, layers),
            "curves": few_shot_plot(probes),
        }
    scatter, parts, columns = None, None, ("method", "width", "chosen")
    if task == "segmentation":
        columns = ("width", "patches", "l2")
        note = f"The {LABELS_SHOWN} classes with most test pixels of {{count}}."
        parts = pixel_classes_table(result, LABELS_SHOWN, note)
    elif probes.values is not None and len(probes.values.truth):
        if task == "regression":
            scatter = scatter_plot(probes.values)
        else:
            parts = labels_table(result["targets"], probes.values)
    return {
        "metrics": metrics,
        "metrics_table": metrics_table(result, columns, metrics),
        "scatter": scatter,
        "parts": parts,
        "curves": None,
    }


def class_errors(probes: Probes) -> list[Json]:
    """Return the classes with an error, those with the lowest recall first.

    Each has name, rows, recall (None without a test row), precision (None without a prediction),
    and predicted: the other classes with their numbers of rows, the most frequent first.
    """
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
            {
                "name": name,
                "rows": rows,
                "recall": right / rows if rows else None,
                "precision": right / predicted if predicted else None,
                "predicted": [(classes[j], int(counts[i, j])) for j in others],
            }
        )
    return sorted(errors, key=lambda each: 1 if each["recall"] is None else each["recall"])


def compared_layers(result: Json) -> list[dict[str, object]]:
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


def few_shot_plot(probes: Probes) -> Json | None:
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
) -> Json:
    """Arrange the few-shot chart, with labels that do not overlap. `curves` have a name, whether it
    is the best, and mean and standard deviation at each tick. Return the frame (left, right,
    bottom, width, height); ticks and levels with the place and the text of each mark on the axes;
    chance, the y of guessing; and lines. A line has name, best, points, spreads ((x, low y, high y)
    of each standard deviation) and label_y.
    """
    left, right, top, bottom = 40, 346, 14, 230
    step = (right - left - 20) / max(1, len(ticks) - 1)

    def y_of(share: float) -> float:
        return round(bottom - (bottom - top) * min(1.0, max(0.0, share)), 1)

    xs = [round(left + 10 + step * i, 1) for i in range(len(ticks))]
    label_y: dict[str, float] = {}
    previous = -math.inf
    for y, name in sorted((y_of(values[-1][0]), name) for name, _, values in curves):
        previous = label_y[name] = max(y, previous + 15)
    lines = [
        {
            "name": name,
            "best": best,
            "points": [(x, y_of(mean)) for x, (mean, _) in zip(xs, values, strict=True)],
            "spreads": [
                (x, y_of(mean - spread), y_of(mean + spread))
                for x, (mean, spread) in zip(xs, values, strict=True)
                if spread
            ],
            "label_y": label_y[name] + 4,
        }
        for name, best, values in curves
    ]
    return {
        "left": left,
        "right": right,
        "bottom": bottom,
        "width": 450,
        "height": 272,
        "ticks": list(zip(xs, ticks, strict=True)),
        "levels": [(y_of(share), f"{100 * share:.0f}") for share in (0, 0.25, 0.5, 0.75, 1)],
        "lines": lines,
        "chance": y_of(chance),
    }


def scatter_plot(values: ValuePredictions) -> dict[str, object]:
    """Arrange predicted against true numbers on axes of one scale.

    Returns points as (x, y) in [0, 100], y downwards, of at most POINTS_SHOWN of the rows; low and
    high, the ends of the axes; and rows, the number of all.
    """
    truth, predicted = values.truth[:, 0], values.predicted[:, 0]
    low = float(min(truth.min(), predicted.min()))
    high = float(max(truth.max(), predicted.max()))
    rows = np.arange(len(truth))
    if len(rows) > POINTS_SHOWN:
        rows = np.sort(np.random.default_rng(0).choice(rows, POINTS_SHOWN, replace=False))
    x, y = (100 * (each[rows] - low) / ((high - low) or 1) for each in (truth, predicted))
    points = list(zip(x.round(2).tolist(), (100 - y).round(2).tolist(), strict=True))
    return {"points": points, "low": low, "high": high, "rows": len(truth)}


def labels_table(names: Sequence[str], values: ValuePredictions) -> Table:
    """Make a table of recall and precision of each label, the most frequent label first."""
    has_label, is_predicted = values.truth > 0, values.predicted >= LABEL_THRESHOLD
    right, rows, predicted = (
        each.sum(0).tolist() for each in (has_label & is_predicted, has_label, is_predicted)
    )
    order = sorted(range(len(names)), key=lambda i: -rows[i])[:LABELS_SHOWN]
    cells = []
    for i in order:
        shares = (right[i] / of[i] if of[i] else None for of in (rows, predicted))
        cells.append((names[i], str(rows[i]), *map(percent_text, shares)))
    return Table(("label", "test images", "recall", "precision"), cells)


def heat_map(
    names: list[str], below: list[str], cells: Mapping[tuple[int, int], dict[str, str]]
) -> dict[str, object]:
    """Arrange a square heat map, which is a table. Return the same, with labels (names of at most
    LABEL_LENGTH characters, without the middle of longer ones) and style (CSS variables of the
    geometry).

    Args:
        below: second lines of the row labels.
        cells: row and column -> text, title, kind ('right' is blue, 'wrong' orange) and style (CSS
            variable of the strength of the colour). Others are empty.
    """
    half = (LABEL_LENGTH - 1) // 2
    labels = [
        name if len(name) <= LABEL_LENGTH else f"{name[: LABEL_LENGTH - 1 - half]}…{name[-half:]}"
        for name in names
    ]
    longest = max(map(len, (*labels, *below)), default=0)
    left, top = 16 + 8 * longest, 20 + 7 * longest
    # The rotated label of the last column reaches beyond the cells.
    beyond = max(8, int(0.7 * top) - _CELL // 2)
    style = f"--left:{left};--top:{top};--width:{left + _CELL * len(names) + beyond}"
    return {"names": names, "below": below, "cells": cells, "labels": labels, "style": style}


def _cell(kind: str, text: str, title: str, share: float) -> dict[str, str]:
    """Describe a cell; the style sheet has the colours of the smallest and the largest share."""
    return {"kind": kind, "text": text, "title": title, "style": f"--share:{share:.4g}"}


def confusion_map(probes: Probes) -> Json | None:
    """Arrange the confusion matrix; with many classes, only those with most errors."""
    counts = probes.confusion
    if probes.result is None or counts is None or not counts.size:
        return None
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")
    chosen = np.sort(order[:CLASSES_SHOWN]).tolist()
    names = [probes.result["classes"][i] for i in chosen]
    tested, largest = counts.sum(1), max(1, int(wrong.max()))
    cells = {}
    for row, i in enumerate(chosen):
        for column, j in enumerate(chosen):
            if count := int(counts[i, j]):
                title = f"{names[row]} predicted as {names[column]}: {count} of {tested[i]}"
                kind = "right" if i == j else "wrong"
                share = count / tested[i] if i == j else 0.25 + 0.75 * count / largest
                cells[row, column] = _cell(kind, str(count), title, float(share))
    return heat_map(names, [f"{counts[i, i]} of {tested[i]}" for i in chosen], cells)


def cka_map(similarity: Json) -> dict[str, object] | None:
    """Arrange debiased CKA; colours span the values that occur, and the diagonal is empty.

    None if nothing was compared or there are too many layers.
    """
    layers = similarity["layers"]
    if not similarity["debiased"] or len(layers) > LAYERS_IN_CKA:
        return None
    values = {
        (i, j): value
        for i, row in enumerate(similarity["debiased"])
        for j, value in enumerate(row)
        if i != j and value is not None
    }
    low, high = min(values.values(), default=0.0), max(values.values(), default=1.0)
    cells = {}
    for (i, j), value in values.items():
        share = (value - low) / (high - low) if high > low else 0.5
        title = f"{layers[i]} and {layers[j]}: {value:.2f}"
        cells[i, j] = _cell("right", f"{value:.2f}".lstrip("0"), title, share)
    return heat_map(list(layers), [""] * len(layers), cells)
