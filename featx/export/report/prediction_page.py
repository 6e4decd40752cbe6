"""Page of job=predict: images with their predicted class, the most doubtful first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from featx.analysis import Predictions
from featx.base import as_utf8, name_bytes
from featx.config import DataConfig
from featx.export.report.html import render_page, tally, without_folder, without_folders
from featx.export.report.thumbnails import Thumbnails

GENERATOR = '<meta name="generator" content="featx job=predict">'
"""Element that names the origin of the page."""

IMAGES_SHOWN = 240
"""Maximum number of images with a prediction."""

FAILURES_SHOWN = 50
"""Maximum number of failed images."""

MAX_BYTES = 1 << 20
"""Maximum bytes of the thumbnails."""

BINS = 10
"""Number of bins of the histogram of probabilities."""


def render_predictions(predictions: Predictions, data: DataConfig, title: str) -> str:
    """Write predictions as HTML, with thumbnails of images that are read again."""
    keys = [name_bytes(row.key) for row in predictions.rows]
    chosen = most_doubtful(predictions.scores)[:IMAGES_SHOWN].tolist()
    with Thumbnails(np.array(keys or [b""]), max(1, len(chosen)), MAX_BYTES) as thumbnails:
        thumbnails.open(data)
        thumbnails.add(chosen)
    failed = [row for row in predictions.rows if row.label is None]
    probabilities = [row.probability for row in predictions.rows if row.probability is not None]
    return render_page(
        "predictions.html",
        ["classes.js"],
        {},
        generator=GENERATOR,
        title=as_utf8(title),
        layer=predictions.layer,
        accuracy=predictions.accuracy,
        num_images=len(predictions),
        cards=[_card(predictions, row) for row in chosen],
        classes=tally(as_utf8(row.label) for row in predictions.rows if row.label is not None),
        bins=np.histogram(probabilities, BINS, (0, 1))[0].tolist() if probabilities else [],
        failures=[
            (without_folder(as_utf8(row.key)), row.status, without_folders(as_utf8(row.reason)))
            for row in failed[:FAILURES_SHOWN]
        ],
        num_failed=len(failed),
        page={"thumbnails": thumbnails},
        without=without_folders(thumbnails.why_none),
    )


def most_doubtful(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Sort images by the distance between their two largest scores, the smallest first.

    For two classes this is the order of their probability. With more classes, 0.5 against 0.49
    comes before 0.4 against 0.1.
    """
    rows = np.flatnonzero(~np.isnan(scores).any(1))
    largest = np.sort(scores[rows], axis=1)[:, -2:]
    gap = largest[:, -1] - largest[:, 0]
    return rows[np.argsort(gap, kind="stable")]


def _card(predictions: Predictions, row: int) -> dict[str, object]:
    """Describe an image that did not fail, with its two most likely classes."""
    each, scores = predictions.rows[row], predictions.scores[row]
    second = int(np.argsort(-scores, kind="stable")[1]) if len(scores) > 1 else None
    is_known = each.probability is not None and second is not None
    return {
        "row": row,
        "key": without_folder(as_utf8(each.key)),
        "label": as_utf8(each.label or ""),
        "probability": each.probability,
        "second": "" if second is None else as_utf8(predictions.classes[second]),
        "second_probability": float(scores[second]) if is_known else None,
    }
