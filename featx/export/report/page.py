"""Contents of a report, and their rendering."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.statistics import TokenNorms
from featx.export.report.charts import (
    LABELS_SHOWN,
    charted_layers,
    class_errors,
    compared_layers,
    few_shot_plot,
    label_results,
    scatter_plot,
)
from featx.export.report.embedding_plots import LayerPlot, Matrix, perplexity_of
from featx.export.report.failures import Reason
from featx.export.report.heat_maps import (
    CLASSES_SHOWN,
    LayerSimilaritySection,
    cka_map,
    confusion_map,
)
from featx.export.report.html import render_page
from featx.export.report.layer_statistics import LayerStatistics
from featx.export.report.near_duplicates import Duplicates
from featx.export.report.nearest_neighbours import Neighbours
from featx.export.report.predictions_file import ROLES, ErrorRow
from featx.export.report.probe_results import Probes, malformed
from featx.export.report.provenance import Provenance
from featx.export.report.redaction import without_folder, without_folders
from featx.export.report.throughput import STAGES, Speed
from featx.export.report.thumbnails import UNDECODED, UNREAD, Sprite, Thumbnails
from featx.export.selection import as_utf8
from featx.store import FeatureStore

GENERATOR = '<meta name="generator" content="featx job=report">'
"""Element by which a report is recognised, so that no other file is overwritten."""

ERRORS_SHOWN = 24
"""Maximum number of misclassified images."""


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
        token_norms: norms of the tokens of each layer that has all of them.
        no_token_norms: layer and reason why it has no norms of tokens, where they are expected.
        plots: embedding plots of each layer of `plotted`.
        neighbours: nearest neighbours in one layer, or None with fewer than two ok rows.
        duplicates: near-duplicates.
        probes: contents of the probe's files.
        similarity: similarity of layers.
        thumbnails: thumbnails of rows in any section.
        test_images: key -> thumbnail of an error on a row of another store, as a data URI.
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
    token_norms: list[TokenNorms]
    no_token_norms: list[tuple[str, str]]
    plots: list[LayerPlot]
    neighbours: Neighbours | None
    duplicates: Duplicates
    probes: Probes
    similarity: LayerSimilaritySection
    thumbnails: Thumbnails
    test_images: dict[str, str]
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

    def image_of_error(self, error: ErrorRow) -> str:
        """Return the thumbnail of a misclassified image as a data URI, or ''."""
        if error.row is None:
            return self.test_images.get(error.cell, "")
        return self.thumbnails.uris.get(error.row, "")

    def redact(self, text: str) -> str:
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
        return next((each for each in self.plots if each.name == layer), None)

    def statistics_of(self, layer: str) -> LayerStatistics | None:
        """Return the statistics of a layer, or None."""
        return next((each for each in self.statistics if each.name == layer), None)


def render(page: Page) -> str:
    """Render a page as HTML, without the probe if its files are not as job=probe writes them."""
    from jinja2 import UndefinedError

    try:
        return _render(page)
    except (LookupError, TypeError, ValueError, AttributeError, UndefinedError) as error:
        if page.probes.result is None:
            raise
        page.probes = malformed(error)
        return _render(page)


def _render(page: Page) -> str:
    """Render a page as HTML."""
    probes, task = page.probes, page.probes.task
    result = probes.result or {}
    is_scored = task == "classification"
    pixels = result["pixels_of_classes"] if task == "segmentation" else []
    return render_page(
        "report.html",
        ["gallery.js", "embedding.js"],
        _data(page),
        page=page,
        generator=GENERATOR,
        name=as_utf8(page.store.root.name),
        model=page.redact(str(page.store.attrs.get("model", ""))),
        errors_shown=ERRORS_SHOWN,
        confusion=confusion_map(probes),
        class_errors=class_errors(probes),
        num_classes_in_plot=CLASSES_SHOWN,
        compared=compared_layers(result) if is_scored else [],
        charted=charted_layers(probes, page.layers) if is_scored else [],
        cka=cka_map(page.similarity),
        curves=few_shot_plot(probes) if is_scored else None,
        pixel_classes=sorted(np.flatnonzero(pixels).tolist(), key=lambda i: -pixels[i]),
        scatter=scatter_plot(probes.values) if task == "regression" and probes.values else None,
        labels=label_results(result["targets"], probes.values) if probes.values else [],
        labels_shown=LABELS_SHOWN,
        fails=page.provenance.num_failed,
        stages=STAGES,
        perplexity=f"{perplexity_of(len(page.rows)):.0f}",
    )


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
    points = np.rint((plane - low) / scale * 2000).astype(int).T.tolist()
    return [list(column) for column in points]
