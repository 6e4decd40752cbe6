"""Geometry and colours of the matrices and lines that a page draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CELL = 34
"""Side of a cell, in units of the SVG."""

LABEL_LENGTH = 16
"""Maximum number of characters of a label."""

Colour = tuple[int, int, int]

_LIGHT = {"right": ((214, 230, 245), (10, 74, 134)), "wrong": ((247, 214, 200), (176, 50, 26))}
_DARK = {"right": ((31, 51, 72), (130, 188, 245)), "wrong": ((74, 42, 30), (255, 157, 133))}
"""Colours of the smallest and the largest value; in dark mode small values are dark."""


@dataclass(frozen=True)
class Cell:
    """One coloured cell of a matrix.

    Attributes:
        row: number of its row.
        column: number of its column.
        text: text in the cell.
        title: sentence that describes it.
        kind: 'right' or 'wrong', the hue.
        style: CSS variables for its colours in light and dark mode.
    """

    row: int
    column: int
    text: str
    title: str
    kind: str
    style: str


@dataclass(frozen=True)
class Label:
    """A label of rows and columns.

    Attributes:
        text: text of at most LABEL_LENGTH characters.
        whole: the whole text.
        below: second line of a row's label, or ''.
    """

    text: str
    whole: str
    below: str = ""


@dataclass(frozen=True)
class MatrixPlot:
    """A square matrix.

    Attributes:
        labels: labels of the rows and of the columns.
        cells: cells with a value; all others are empty.
        left: width of the row labels, in units of the SVG.
        top: height of the column labels.
    """

    labels: list[Label]
    cells: list[Cell]
    left: int
    top: int

    @property
    def side(self) -> int:
        """Width and height of the cells together."""
        return CELL * len(self.labels)

    @property
    def width(self) -> int:
        """Width of the whole SVG; the rotated label of the last column reaches beyond the cells."""
        return self.left + self.side + max(8, int(0.7 * self.top) - CELL // 2)

    @property
    def height(self) -> int:
        """Height of the whole SVG."""
        return self.top + self.side


def matrix_plot(labels: list[Label], cells: list[Cell]) -> MatrixPlot:
    """Arrange a matrix, with enough room for its labels."""
    longest = max((len(label.text) for label in labels), default=0)
    longest = max([longest, *(len(label.below) for label in labels)])
    return MatrixPlot(labels, cells, left=16 + 8 * longest, top=20 + 7 * longest)


def label(text: str, below: str = "") -> Label:
    """Return a label; a text that is too long loses its middle."""
    if len(text) <= LABEL_LENGTH:
        return Label(text, text, below)
    half = (LABEL_LENGTH - 1) // 2
    return Label(f"{text[: LABEL_LENGTH - 1 - half]}…{text[-half:]}", text, below)


def cell(row: int, column: int, text: str, title: str, kind: str, share: float) -> Cell:
    """Return a cell.

    Args:
        row: number of its row.
        column: number of its column.
        text: text in the cell.
        title: sentence that describes it.
        kind: 'right' (blue) or 'wrong' (orange).
        share: strength of the colour, in [0, 1].
    """
    light, dark = (_mixed(*ramp[kind], share) for ramp in (_LIGHT, _DARK))
    style = f"--l:{_hex(light)};--d:{_hex(dark)};--lt:{ink_on(light)};--dt:{ink_on(dark)}"
    return Cell(row, column, text, title, kind, style)


def ink_on(colour: Colour) -> str:
    """Return black or white, whichever has more contrast to a colour: at least 4.58."""
    light = luminance(colour)
    return "#000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#fff"


def luminance(colour: Colour) -> float:
    """Return the relative luminance of an sRGB colour in [0, 1], as WCAG 2.2 defines it.

    Args:
        colour: red, green and blue in [0, 255].
    """
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@dataclass(frozen=True)
class Line:
    """One line of the few-shot chart.

    Attributes:
        name: name of the layer.
        best: whether this is the best layer.
        points: (x, y) of each point.
        spreads: (x, low y, high y) of each standard deviation.
        label_y: y of the name at the end of the line.
    """

    name: str
    best: bool
    points: list[tuple[float, float]]
    spreads: list[tuple[float, float, float]]
    label_y: float


@dataclass(frozen=True)
class LinePlot:
    """Accuracy over the number of training rows per class.

    Attributes:
        ticks: (x, text) of the horizontal axis.
        levels: (y, text) of the vertical axis.
        lines: one line per layer.
        chance: y of the accuracy of guessing.
    """

    ticks: list[tuple[float, str]]
    levels: list[tuple[float, str]]
    lines: list[Line]
    chance: float

    left, right, top, bottom = 40, 346, 14, 230
    width, height = 450, 272


def line_plot(
    ticks: Sequence[str],
    curves: Sequence[tuple[str, bool, Sequence[tuple[float, float]]]],
    chance: float,
) -> LinePlot:
    """Arrange the few-shot chart, with labels that do not overlap.

    Args:
        ticks: texts of the horizontal axis, from left to right.
        curves: name, whether it is the best layer, and (mean, standard deviation) at each tick.
        chance: accuracy of guessing.
    """
    frame = LinePlot
    step = (frame.right - frame.left - 20) / max(1, len(ticks) - 1)

    def y_of(share: float) -> float:
        return round(frame.bottom - (frame.bottom - frame.top) * min(1.0, max(0.0, share)), 1)

    xs = [round(frame.left + 10 + step * i, 1) for i in range(len(ticks))]
    ends = sorted(((y_of(values[-1][0]), name) for name, _, values in curves))
    label_y: dict[str, float] = {}
    previous = -math.inf
    for y, name in ends:
        previous = label_y[name] = max(y, previous + 15)
    lines = [
        Line(
            name,
            best,
            [(x, y_of(mean)) for x, (mean, _) in zip(xs, values, strict=True)],
            [
                (x, y_of(mean - spread), y_of(mean + spread))
                for x, (mean, spread) in zip(xs, values, strict=True)
                if spread
            ],
            label_y[name] + 4,
        )
        for name, best, values in curves
    ]
    levels = [(y_of(share), f"{100 * share:.0f}") for share in (0, 0.25, 0.5, 0.75, 1)]
    return LinePlot(list(zip(xs, ticks, strict=True)), levels, lines, y_of(chance))


def _mixed(low: Colour, high: Colour, share: float) -> Colour:
    """Mix two colours linearly in sRGB."""
    share = min(1.0, max(0.0, share))
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _hex(colour: Colour) -> str:
    """Return a colour as CSS."""
    return "#{:02x}{:02x}{:02x}".format(*colour)
