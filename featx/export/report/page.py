"""Contents of a report, and their rendering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.export.report.embedding_plots import LayerPlot, Matrix, perplexity_of
from featx.export.report.failures import Reason
from featx.export.report.html import render_page
from featx.export.report.layer_similarity import LayerSimilaritySection
from featx.export.report.layer_statistics import LayerStatistics
from featx.export.report.matrices import (
    Cell,
    LinePlot,
    MatrixPlot,
    cell,
    label,
    line_plot,
    matrix_plot,
)
from featx.export.report.nearest_neighbours import Neighbours
from featx.export.report.probe_results import ROLES, ErrorRow, Probes
from featx.export.report.provenance import Provenance
from featx.export.report.redaction import without_folder, without_folders
from featx.export.report.throughput import Speed
from featx.export.report.thumbnails import UNDECODED, UNREAD, Sprite, Thumbnails
from featx.export.selection import as_utf8
from featx.store import FeatureStore

GENERATOR = '<meta name="generator" content="featx job=report">'
"""Element by which a report is recognised, so that no other file is overwritten."""

ERRORS_SHOWN = 24
"""Maximum number of misclassified images."""

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


@dataclass(frozen=True)
class Pair:
    """Two rows that are near-duplicates.

    Attributes:
        first: row of the store.
        second: row of the store.
        cosine: cosine of their standardised vectors.
        crosses: whether exactly one of them is a test row.
    """

    first: int
    second: int
    cosine: float
    crosses: bool


@dataclass(frozen=True)
class Duplicates:
    """Pairs of near-duplicates.

    Attributes:
        layer: layer whose vectors were compared, or '' if none was.
        cosine: cosine from which rows count as near-duplicates.
        pairs: the pairs that are shown; those that cross the split first.
        count: number of all pairs among the selected rows.
    """

    layer: str
    cosine: float
    pairs: list[Pair]
    count: int


@dataclass
class Page:
    """Contents of a report.

    Attributes:
        store: open store.
        seed: seed of all random choices.
        layers: requested layers.
        plotted: layers with embedding plots.
        rows: (n,) int64 rows that plots and statistics use.
        num_ok: number of rows that they were chosen from.
        folders: absolute paths that the page does not contain.
        provenance: origin of the store.
        speed: speed of the runs.
        reasons: failed rows by reason.
        statistics: statistics of each layer.
        plots: embedding plots of each layer of `plotted`.
        neighbours: nearest neighbours in one layer, or None with fewer than two ok rows.
        duplicates: near-duplicates.
        probes: contents of the probe's files.
        similarity: similarity of layers.
        thumbnails: thumbnails of rows in any section.
        sprite: tiles of the rows in the embedding plots.
        seconds: seconds that the computation of all this took.
    """

    store: FeatureStore
    seed: int
    layers: tuple[str, ...]
    plotted: tuple[str, ...]
    rows: npt.NDArray[np.int64]
    num_ok: int
    folders: tuple[str, ...]
    provenance: Provenance
    speed: Speed
    reasons: list[Reason]
    statistics: list[LayerStatistics]
    plots: list[LayerPlot]
    neighbours: Neighbours | None
    duplicates: Duplicates
    probes: Probes
    similarity: LayerSimilaritySection
    thumbnails: Thumbnails
    sprite: Sprite
    seconds: float = 0.0

    def key(self, row: int) -> str:
        """Return the key of a row as UTF-8 text."""
        return without_folder(as_utf8(str(self.store.keys[row])))

    def class_of(self, row: int) -> str:
        """Return the class name of a row, or ''."""
        number = int(self.store.labels[row])
        return as_utf8(self.store.classes[number]) if number >= 0 else ""

    def role_of(self, row: int) -> str:
        """Return the role of a row in the probe's split, or ''."""
        predicted = self.probes.predicted
        return "" if predicted is None else ROLES[int(predicted.roles[row])]

    def shown(self, text: str) -> str:
        """Return a text without absolute paths."""
        return without_folders(text, self.folders)

    @property
    def errors(self) -> list[ErrorRow]:
        """Misclassified test rows, the most confident error first."""
        return [] if self.probes.predicted is None else self.probes.predicted.errors

    @property
    def undecoded(self) -> list[int]:
        """Rows that did not fail in the run, but whose image cannot be decoded now."""
        return [row for row in self.thumbnails.rows_that(UNDECODED) if self.store.ok[row]]

    @property
    def num_unread(self) -> int:
        """Number of rows that did not fail in the run, but whose image cannot be read now."""
        return sum(bool(self.store.ok[row]) for row in self.thumbnails.rows_that(UNREAD))

    def plot_of(self, layer: str) -> LayerPlot | None:
        """Return the embedding plot of a layer, or None."""
        found = [each for each in self.plots if each.name == layer]
        return found[0] if found else None

    def statistics_of(self, layer: str) -> LayerStatistics | None:
        """Return the statistics of a layer, or None."""
        found = [each for each in self.statistics if each.name == layer]
        return found[0] if found else None


def render(page: Page) -> str:
    """Render a page as HTML."""
    return render_page(
        "report.html",
        ["gallery.js", "embedding.js"],
        _data(page),
        page=page,
        generator=GENERATOR,
        name=as_utf8(page.store.root.name),
        model=page.shown(str(page.store.attrs.get("model", ""))),
        errors_shown=ERRORS_SHOWN,
        confusion=confusion_plot(page.probes),
        class_errors=class_errors(page.probes),
        num_classes_in_plot=CLASSES_SHOWN,
        charted=_charted(page.probes, page.layers),
        cka=cka_plot(page.similarity),
        curves=few_shot_plot(page.probes, page.provenance),
        fails=page.provenance.num_failed,
        perplexity=f"{perplexity_of(len(page.rows)):.0f}",
    )


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
    found = int(probes.confusion[classes])
    title = f"{true} predicted as {predicted}: {found} of {tested}"
    if classes[0] == classes[1]:
        return cell(*place, str(found), title, "right", found / tested)
    return cell(*place, str(found), title, "wrong", 0.25 + 0.75 * found / largest)


def class_errors(probes: Probes) -> list[ClassErrors]:
    """Return the classes with an error, those with the lowest recall first.

    Args:
        probes: contents of the probe's files.
    """
    counts = probes.confusion
    found = []
    for i, name in enumerate(probes.classes):
        rows, predicted = int(counts[i].sum()), int(counts[:, i].sum())
        right = int(counts[i, i])
        if rows + predicted == 2 * right:
            continue
        others = [(probes.classes[j], int(counts[i, j])) for j in np.argsort(-counts[i]).tolist()]
        found.append(
            ClassErrors(
                name,
                rows,
                right / rows if rows else None,
                right / predicted if predicted else None,
                [(other, times) for other, times in others if times and other != name],
            )
        )
    return sorted(found, key=lambda each: 1 if each.recall is None else each.recall)


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
    known = [value for i, j in pairs if (value := values[i][j]) is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    cells = []
    for i, j in pairs:
        value = values[i][j]
        if value is not None:
            strength = (value - low) / (high - low) if high > low else 0.5
            title = f"{layers[i]} and {layers[j]}: {value:.2f}"
            cells.append(cell(i, j, f"{value:.2f}".lstrip("0"), title, "right", strength))
    return matrix_plot([label(name) for name in layers], cells)


def few_shot_plot(probes: Probes, provenance: Provenance) -> LinePlot | None:
    """Arrange the few-shot chart of the first method.

    Args:
        probes: contents of the probe's files.
        provenance: origin of the store.

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


def _charted(probes: Probes, layers: Sequence[str]) -> list[str]:
    """Return the layers in the chart of the result: all, or those with the highest accuracy.

    Args:
        probes: contents of the probe's files.
        layers: layers of the page, in whose order they are drawn.
    """
    results = probes.of_method(probes.method)
    best = sorted(results, key=lambda each: (not each.best, -each.accuracy))[:LAYERS_CHARTED]
    place = {layer: i for i, layer in enumerate(layers)}
    return sorted((each.layer for each in best), key=lambda layer: place.get(layer, -1))


def _data(page: Page) -> dict[str, object]:
    """Return the data of the page's scripts, as JSON types."""
    rows = page.rows.tolist()
    predicted = page.probes.predicted
    number = {row: place for place, row in enumerate(rows)}
    wrong = {} if predicted is None else predicted.wrong
    return {
        "rows": rows,
        "keys": [page.key(row) for row in rows],
        "labels": page.store.labels[page.rows].tolist(),
        "classes": [as_utf8(name) for name in page.store.classes],
        "roles": [] if predicted is None else predicted.roles[page.rows].tolist(),
        "role_names": ROLES,
        "best": _best_plotted(page),
        "sprite": {
            "uri": page.sprite.uri,
            "columns": page.sprite.columns,
            "pixels": page.sprite.pixels,
            "place": [page.sprite.place.get(row, -1) for row in rows],
        },
        "unread": {
            str(number[row]): why_not
            for row, why_not in page.thumbnails.unread.items()
            if row in number
        },
        "layers": [
            _layer_data(each, {number[row]: name for row, name in wrong.get(each.name, {}).items()
                               if row in number})
            for each in page.plots
            if each.pca is not None
        ],
    }  # fmt: skip


def _best_plotted(page: Page) -> str:
    """Return the layer that is plotted first: the best one of the probe, else the last one."""
    plotted = [each.name for each in page.plots if each.pca is not None]
    return page.probes.layer if page.probes.layer in plotted else (plotted or [""])[-1]


def _layer_data(each: LayerPlot, wrong: dict[int, str]) -> dict[str, object]:
    """Return one layer's plots as JSON types."""
    planes = {"pca": each.pca, "tsne": each.tsne}
    return {
        "name": each.name,
        "wrong": {str(place): name for place, name in wrong.items()},
        **{kind: None if plane is None else _points(plane) for kind, plane in planes.items()},
    }


def _points(plane: Matrix) -> list[list[int]]:
    """Return (n, 2) points as columns of whole numbers in [0, 2000], with one scale for both."""
    low = plane.min(0)
    scale = float((plane.max(0) - low).max()) or 1.0
    found = np.rint((plane - low) / scale * 2000).astype(int).T.tolist()
    return [list(column) for column in found]
