"""Contents of a report, and their rendering into one HTML file that loads nothing from elsewhere.

Jinja escapes all texts of the page. Numbers for the plots are JSON in a script element that is not
executed. The content security policy of the page allows its two scripts, by their checksums, and no
requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.base import time_text
from featx.export.report.embedding_maps import LayerMap, Matrix
from featx.export.report.failures import Reason
from featx.export.report.layer_similarity import LayerSimilaritySection
from featx.export.report.layer_statistics import LayerStatistics
from featx.export.report.nearest_neighbours import Strips
from featx.export.report.probe_results import Probes
from featx.export.report.provenance import Provenance
from featx.export.report.throughput import Speed
from featx.export.report.thumbnails import MAX_BYTES, PIXELS, Thumbnails
from featx.export.selection import as_utf8
from featx.store import FeatureStore

GENERATOR = '<meta name="generator" content="featx job=report">'
"""Element by which a report is recognised, so that no other file is overwritten."""

DASH = "\u2013"
"""Text for a missing number."""

_FILES = Path(__file__).parent / "page"
"""Folder of the template, style sheet and script."""


@dataclass
class Page:
    """Contents of a report.

    Attributes:
        store: open store.
        seed: seed of all random choices.
        layers: requested layers.
        mapped: layers with maps and nearest rows.
        rows: (n,) int64 rows that maps and statistics use.
        num_ok: number of rows that they were chosen from.
        provenance: origin of the store.
        speed: speed of the runs.
        reasons: failed rows by reason.
        statistics: statistics of each layer.
        maps: maps of each layer of `mapped`.
        strips: nearest rows in each layer of `mapped`.
        probes: contents of probe.json.
        similarity: similarity of layers.
        thumbnails: thumbnails of rows in any section.
        seconds: seconds that the computation of all this took.
    """

    store: FeatureStore
    seed: int
    layers: tuple[str, ...]
    mapped: tuple[str, ...]
    rows: npt.NDArray[np.int64]
    num_ok: int
    provenance: Provenance
    speed: Speed
    reasons: list[Reason]
    statistics: list[LayerStatistics]
    maps: list[LayerMap]
    strips: list[Strips]
    probes: Probes
    similarity: LayerSimilaritySection
    thumbnails: Thumbnails
    seconds: float = 0.0

    def key(self, row: int) -> str:
        """Return the key of a row as UTF-8 text."""
        return as_utf8(str(self.store.keys[row]))

    def class_of(self, row: int) -> str:
        """Return the class name of a row, or ''."""
        label = int(self.store.labels[row])
        return as_utf8(self.store.classes[label]) if label >= 0 else ""


def render(page: Page) -> str:
    """Render a page as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    plotly, own = _plotly(), _text("report.js")
    environment = Environment(
        loader=FileSystemLoader(_FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number, "count": count, "percent": percent, "share": share, "seconds": time_text,
    }  # fmt: skip
    text = environment.get_template("template.html").render(
        page=page,
        generator=GENERATOR,
        title=f"{page.store.root.name}: a report of featx",
        model=str(page.store.attrs.get("model", "")),
        written=time.strftime("%Y-%m-%d %H:%M"),
        style=_text("report.css"),
        plotly=plotly,
        script=own,
        hashes=" ".join(f"'sha256-{_checksum(text)}'" for text in (plotly, own)),
        data=as_json(_for_plots(page)),
        max_mib=MAX_BYTES >> 20,
        pixels=PIXELS,
    )
    return as_utf8(text)  # the path of a store may contain other bytes


def as_json(values: Any) -> str:
    """Return JSON that cannot end its script element; NaN is not allowed."""
    text = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def number(value: float | None) -> str:
    """Format a number with four digits; DASH if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return DASH
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def count(value: int) -> str:
    """Format a count with narrow non-breaking spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share in [0, 1] as '12.3 %'; DASH if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{100 * value:.{digits}f}\u202f%"


def share(value: float, of: float) -> float:
    """Return the width of a bar in percent, 0 if `of` is 0."""
    return round(100 * value / of, 2) if of > 0 else 0.0


def _for_plots(page: Page) -> dict[str, Any]:
    """Return the data that the page's script draws, as JSON types."""
    labels = page.store.labels[page.rows]
    return {
        "rows": page.rows.tolist(),
        "keys": [page.key(row) for row in page.rows.tolist()],
        "labels": labels.tolist(),
        "classes": [as_utf8(name) for name in page.store.classes],
        "thumbnails": {str(row): page.thumbnails.uris[row] for row in _rows_with_thumbnail(page)},
        "unread": {str(row): why_not for row, why_not in page.thumbnails.unread.items()},
        "maps": [_map_for_plots(each) for each in page.maps if each.pca is not None],
        "parts": page.speed.parts,
        "norms": [
            {"name": each.name, "five": [_short(v) for v in each.norms]}
            for each in page.statistics
            if each.norms is not None
        ],
        "confusion": None
        if page.probes.confusion is None
        else {
            "classes": page.probes.confusion.classes,
            "counts": page.probes.confusion.counts,
        },
        "similarity": {
            "layers": page.similarity.layers,
            "cka": page.similarity.cka,
            "debiased": page.similarity.debiased,
        },
    }


def _rows_with_thumbnail(page: Page) -> list[int]:
    """Return the rows of the maps that have a thumbnail."""
    return [row for row in page.rows.tolist() if row in page.thumbnails.uris]


def _map_for_plots(each: LayerMap) -> dict[str, Any]:
    """Return one layer's maps as JSON types."""
    assert each.pca is not None
    return {
        "name": each.name,
        "explained": [percent(value) for value in each.explained],
        "pca": _points(each.pca),
        "tsne": None if each.tsne is None else _points(each.tsne),
    }


def _points(plane: Matrix) -> list[list[float]]:
    """Return the two columns of (n, 2) points, rounded to the resolution of a screen."""
    scale = float(np.abs(plane).max()) or 1.0
    digits = 4 - math.floor(math.log10(scale))
    return [[round(value, digits) for value in column] for column in plane.T.tolist()]


def _short(value: float) -> float:
    """Round to five significant digits."""
    return float(f"{value:.5g}")


def _plotly() -> str:
    """Return the source of plotly.js."""
    from plotly.offline import get_plotlyjs

    # Browsers normalise line ends before they compute the checksum of a script.
    return str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")


def _text(name: str) -> str:
    """Read a file of the page."""
    return (_FILES / name).read_text(encoding="utf-8")


def _checksum(script: str) -> str:
    """Return the checksum of a script as a content security policy names it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
