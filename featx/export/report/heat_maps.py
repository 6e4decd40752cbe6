"""Heat maps of the page, which are tables: the confusion matrix, and the similarity of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from featx.analysis.similarity import layer_similarity
from featx.errors import ConfigError
from featx.export.report.probe_results import Probes
from featx.store import FeatureStore

CLASSES_SHOWN = 20
"""Maximum number of classes in the confusion matrix, and of classes in the table next to it."""

LAYERS_IN_CKA = 24
"""Maximum number of layers in the CKA matrix."""

LABEL_LENGTH = 16
"""Maximum number of characters of a label."""

_CELL = 34
"""Side of a cell, in units of the style sheet, as all lengths here."""

CKA_ROWS = 1000
"""Maximum number of images of which layers are compared; the work grows with its square."""

Colour = tuple[int, int, int]

_LIGHT = {"right": ((214, 230, 245), (10, 74, 134)), "wrong": ((247, 214, 200), (176, 50, 26))}
_DARK = {"right": ((31, 51, 72), (130, 188, 245)), "wrong": ((74, 42, 30), (255, 157, 133))}
"""Colours of the smallest and the largest value; in dark mode small values are dark."""


@dataclass(frozen=True)
class Cell:
    """One coloured cell.

    `kind` is 'right' (blue) or 'wrong' (orange); `style` has CSS variables for its colours.
    """

    text: str
    title: str
    kind: str
    style: str


@dataclass(frozen=True)
class HeatMap:
    """A square heat map.

    `below` has the second lines of the row labels; cells that are not in `cells` are empty.
    """

    names: list[str]
    below: list[str]
    cells: Mapping[tuple[int, int], Cell]

    @property
    def labels(self) -> list[str]:
        """Names of at most LABEL_LENGTH characters; one that is too long loses its middle."""
        half = (LABEL_LENGTH - 1) // 2
        return [
            name
            if len(name) <= LABEL_LENGTH
            else f"{name[: LABEL_LENGTH - 1 - half]}…{name[-half:]}"
            for name in self.names
        ]

    @property
    def style(self) -> str:
        """CSS variables of its geometry: room for row labels, for column labels, and its width."""
        longest = max(map(len, (*self.labels, *self.below)), default=0)
        left, top = 16 + 8 * longest, 20 + 7 * longest
        # The rotated label of the last column reaches beyond the cells.
        beyond = max(8, int(0.7 * top) - _CELL // 2)
        return f"--left:{left};--top:{top};--width:{left + _CELL * len(self.names) + beyond}"


def confusion_map(probes: Probes) -> HeatMap | None:
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
                cells[row, column] = Cell(str(count), title, kind, colours(kind, float(share)))
    return HeatMap(names, [f"{counts[i, i]} of {tested[i]}" for i in chosen], cells)


@dataclass(frozen=True)
class LayerSimilaritySection:
    """Linear CKA of all pairs of layers; None if it is undefined.

    Both are tables by row and column; `note` says why there is no comparison.
    """

    layers: tuple[str, ...]
    cka: list[list[float | None]]
    debiased: list[list[float | None]]
    rows: int
    note: str


def similarity_of(
    store: FeatureStore, layers: tuple[str, ...], rows: int, seed: int, device: str
) -> LayerSimilaritySection:
    """Compare layers over random images."""
    if len(layers) < 2:
        return LayerSimilaritySection(
            layers, [], [], 0, "There is only one layer, so none can be compared."
        )
    try:
        similarity = layer_similarity(
            store, None, layers, num_rows=min(rows, CKA_ROWS), seed=seed, device=device
        )
    except ConfigError as error:
        return LayerSimilaritySection(layers, [], [], 0, str(error))

    def as_table(name: str) -> list[list[float | None]]:
        values = similarity.measures[name].tolist()
        return [[None if np.isnan(v) else round(v, 4) for v in row] for row in values]

    return LayerSimilaritySection(
        similarity.layers, as_table("cka"), as_table("cka_debiased"), similarity.num_rows, ""
    )


def cka_map(section: LayerSimilaritySection) -> HeatMap | None:
    """Arrange debiased CKA; colours span the values that occur, and the diagonal is empty.

    None if nothing was compared or there are too many layers.
    """
    layers = section.layers
    if not section.debiased or len(layers) > LAYERS_IN_CKA:
        return None
    values = {
        (i, j): value
        for i, row in enumerate(section.debiased)
        for j, value in enumerate(row)
        if i != j and value is not None
    }
    low, high = min(values.values(), default=0.0), max(values.values(), default=1.0)
    cells = {}
    for (i, j), value in values.items():
        share = (value - low) / (high - low) if high > low else 0.5
        title = f"{layers[i]} and {layers[j]}: {value:.2f}"
        text = f"{value:.2f}".lstrip("0")
        cells[i, j] = Cell(text, title, "right", colours("right", share))
    return HeatMap(list(layers), [""] * len(layers), cells)


def colours(kind: str, share: float) -> str:
    """Return the CSS variables of a cell, whose colour has a strength in [0, 1], in both modes."""
    share = min(1.0, max(0.0, share))
    variables = []
    for mode, ramps in (("l", _LIGHT), ("d", _DARK)):
        low, high = ramps[kind]
        red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
        ink = ink_on((red, green, blue))
        variables.append(f"--{mode}:#{red:02x}{green:02x}{blue:02x};--{mode}t:{ink}")
    return ";".join(variables)


def ink_on(colour: Colour) -> str:
    """Return black or white, whichever has more contrast to a colour: at least 4.58."""
    light = luminance(colour)
    return "#000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#fff"


def luminance(colour: Colour) -> float:
    """Return the relative luminance of an sRGB colour in [0, 255], as WCAG 2.2 defines it."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
