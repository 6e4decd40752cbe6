"""Charts and tables of the probe's results and of layer similarity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from featx.export.report.layer_similarity import LayerSimilaritySection
from featx.export.report.matrices import (
    Cell,
    LinePlot,
    MatrixPlot,
    cell,
    label,
    line_plot,
    matrix_plot,
)
from featx.export.report.probe_results import Probes

CLASSES_SHOWN = 20
"""Maximum number of classes in the confusion matrix, and of classes in the table next to it."""

LAYERS_CHARTED = 20
"""Maximum number of layers in the chart of the result."""

CURVES = 8
"""Maximum number of lines in the few-shot chart."""

LAYERS_IN_CKA = 24
"""Maximum number of layers in the CKA matrix."""


@dataclass(frozen=True)
class ClassErrors:
    """One class with errors, for the table next to the confusion matrix.

    Attributes:
        name: name of the class.
        rows: number of its test rows.
        recall: share of them that were predicted right, or None without any.
        precision: share of right ones among the predictions of the class, or None without any.
        predicted: (other class, number of rows), the most frequent first.
    """

    name: str
    rows: int
    recall: float | None
    precision: float | None
    predicted: list[tuple[str, int]]


def confusion_plot(probes: Probes) -> MatrixPlot | None:
    """Arrange the confusion matrix; with many classes, only those with most errors.

    Args:
        probes: contents of the probe's files.

    Returns:
        the matrix, or None without results.
    """
    counts = probes.confusion
    if not counts.size:
        return None
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")
    chosen = np.sort(order[:CLASSES_SHOWN]).tolist()
    tested = counts.sum(1)
    largest = max(1, int(wrong.max()))
    labels, cells = [], []
    for row, i in enumerate(chosen):
        labels.append(label(probes.classes[i], f"{counts[i, i]} of {tested[i]}"))
        cells += [
            _confusion_cell(probes, (row, column), (i, j), int(tested[i]), largest)
            for column, j in enumerate(chosen)
            if counts[i, j]
        ]
    return matrix_plot(labels, cells)


def _confusion_cell(
    probes: Probes, place: tuple[int, int], classes: tuple[int, int], tested: int, largest: int
) -> Cell:
    """Return one cell of the confusion matrix.

    Args:
        probes: contents of the probe's files.
        place: row and column in the plot.
        classes: true and predicted class.
        tested: number of test rows of the true class.
        largest: largest number of rows in a cell of errors.
    """
    true, predicted = (probes.classes[i] for i in classes)
    count = int(probes.confusion[classes])
    title = f"{true} predicted as {predicted}: {count} of {tested}"
    if classes[0] == classes[1]:
        return cell(*place, str(count), title, "right", count / tested)
    return cell(*place, str(count), title, "wrong", 0.25 + 0.75 * count / largest)


def class_errors(probes: Probes) -> list[ClassErrors]:
    """Return the classes with an error, those with the lowest recall first.

    Args:
        probes: contents of the probe's files.
    """
    counts = probes.confusion
    errors = []
    for i, name in enumerate(probes.classes):
        rows, predicted = int(counts[i].sum()), int(counts[:, i].sum())
        right = int(counts[i, i])
        if rows + predicted == 2 * right:
            continue
        counts_of_others = [
            (probes.classes[j], int(counts[i, j])) for j in np.argsort(-counts[i]).tolist()
        ]
        errors.append(
            ClassErrors(
                name,
                rows,
                right / rows if rows else None,
                right / predicted if predicted else None,
                [(other, times) for other, times in counts_of_others if times and other != name],
            )
        )
    return sorted(errors, key=lambda each: 1 if each.recall is None else each.recall)


def cka_plot(section: LayerSimilaritySection) -> MatrixPlot | None:
    """Arrange debiased CKA; colours span the values that occur, and the diagonal is empty.

    Args:
        section: similarity of the layers.

    Returns:
        the matrix, or None if nothing was compared or there are too many layers.
    """
    layers, values = section.layers, section.debiased
    if not values or len(layers) > LAYERS_IN_CKA:
        return None
    pairs = [(i, j) for i in range(len(layers)) for j in range(len(layers)) if i != j]
    available = [value for i, j in pairs if (value := values[i][j]) is not None]
    low, high = min(available, default=0.0), max(available, default=1.0)
    cells = []
    for i, j in pairs:
        value = values[i][j]
        if value is not None:
            strength = (value - low) / (high - low) if high > low else 0.5
            title = f"{layers[i]} and {layers[j]}: {value:.2f}"
            cells.append(cell(i, j, f"{value:.2f}".lstrip("0"), title, "right", strength))
    return matrix_plot([label(name) for name in layers], cells)


def few_shot_plot(probes: Probes) -> LinePlot | None:
    """Arrange the few-shot chart of the first method.

    Args:
        probes: contents of the probe's files.

    Returns:
        the chart, or None without few-shot results.
    """
    results = [each for each in probes.of_method(probes.method) if each.few]
    if not results:
        return None
    chosen = sorted(results, key=lambda each: -each.accuracy)[:CURVES]
    ticks = [shots for shots, _, _ in results[0].few] + ["all"]
    curves = [
        (
            each.layer,
            each.best,
            [*((mean, spread or 0.0) for _, mean, spread in each.few), (each.accuracy, 0.0)],
        )
        for each in results
        if each in chosen
    ]
    return line_plot(ticks, curves, probes.chance)


def charted_layers(probes: Probes, layers: Sequence[str]) -> list[str]:
    """Return the layers in the chart of the result: all, or those with the highest accuracy.

    Args:
        probes: contents of the probe's files.
        layers: layers of the page, in whose order they are drawn.
    """
    results = probes.of_method(probes.method)
    best = sorted(results, key=lambda each: (not each.best, -each.accuracy))[:LAYERS_CHARTED]
    place = {layer: i for i, layer in enumerate(layers)}
    return sorted((each.layer for each in best), key=lambda layer: place.get(layer, -1))
