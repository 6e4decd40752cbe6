"""job=predict: classes of new images by the head of a probe, as a CSV file and an HTML page."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.base import facts, log_message, shown_path, table
from featx.config import Config
from featx.errors import ConfigError, counted
from featx.jobs.base import CUSTOM_CODE, JOBS, Input, Job, print_summary
from featx.pipeline import exit_code, trial_rows
from featx.storage import AtomicFolder

if TYPE_CHECKING:
    from featx.analysis import Predictions

PREDICTIONS_CSV, PREDICTIONS_HTML = "predictions.csv", "predictions.html"
_SHOWN_CLASSES = 20
"""Number of classes that the printed table names, the most frequent first."""

_HEAD = ".safetensors"
"""Ending of the file of a head, which may be given instead of a store."""
COLUMNS = ("key", "class", "probability", "status", "reason")
"""First columns of predictions.csv; `score:CLASS` for each class follow."""


def run(config: Config, config_yaml: str) -> int:
    """Classify the images, write the files and print a summary; returns the exit code."""
    from featx.analysis import head_of_store, run_prediction  # which import torch
    from featx.export.report import render_predictions

    place = config.place_of_store()
    head = place if place.suffix == _HEAD else head_of_store(place, _layer(config))
    log_message(facts([("head", f"{head.name}\nin {shown_path(head.parent)}")]))
    found = run_prediction(config, head)
    disk = AtomicFolder(Path(config.out).expanduser())
    disk.make_folder(disk.root)
    path = disk.root / PREDICTIONS_CSV
    disk.replace_unlocked(path, predictions_csv(found))
    page = disk.root / PREDICTIONS_HTML
    disk.replace_unlocked(page, render_predictions(found, config.data, page.parent.name).encode())
    summary = _summary(found, path, page)
    print_summary(config, summary, _text(summary))
    return exit_code(
        config, summary["rows"], summary["failures"], f"They have their reason in {path}."
    )


def _layer(config: Config) -> str | None:
    """Return the layer whose head is used; None takes the best one.

    Raises:
        ConfigError: several layers are named.
    """
    layer = config.layers
    if isinstance(layer, list | tuple) and len(layer) == 1:
        layer = layer[0]
    if not isinstance(layer, str | None):
        raise ConfigError(f"layers={layer}: job=predict uses the head of one layer.")
    return layer


def predictions_csv(found: Predictions) -> bytes:
    """Return the CSV file: one line per image, failed ones with their reason and no scores.

    Scores have as many digits as float32 needs. With more than MAX_SCORES of them, the file has no
    columns of single classes, which a message says.
    """
    from featx.analysis.probe import MAX_SCORES, SCORE

    buffer = io.StringIO()
    writer = csv.writer(buffer)
    with_scores = found.scores.size <= MAX_SCORES
    if not with_scores:
        log_message(
            f"{PREDICTIONS_CSV} has no column per class: {len(found)} images x "
            f"{len(found.classes)} classes are more than {MAX_SCORES} scores. "
            "featx.predict(...).scores has them all."
        )
    names = [f"{SCORE}{name}" for name in found.classes] if with_scores else []
    writer.writerow([*COLUMNS, *names])
    for row, of_row in zip(found.rows, found.scores, strict=True):
        best = of_row.max()
        probability = "" if row.probability is None else str(best)
        scores: list[str] = []
        if with_scores:
            scores = [""] * len(names) if row.label is None else [str(each) for each in of_row]
        writer.writerow([row.key, row.label or "", probability, row.status, row.reason, *scores])
    return buffer.getvalue().encode("utf-8", "surrogateescape")


def _summary(found: Predictions, path: Path, page: Path) -> dict[str, Any]:
    """Return counts and speed in JSON types."""
    counts = Counter(row.label for row in found.rows if row.label is not None)
    figures = found.figures.as_dict()
    speed = (
        "images_per_second", "trial_images_per_second", "share_of_trial", "below_trial",
    )  # fmt: skip
    return {
        "rows": len(found),
        "failures": len(found) - sum(counts.values()),
        "classes": dict(counts.most_common()),
        **{name: figures[name] for name in speed},
        "file": str(path),
        "page": str(page),
    }


def _text(summary: dict[str, Any]) -> str:
    """Format the summary for people."""
    rate = summary["images_per_second"]
    speed = f", {rate:.1f} images/s" if rate else ""
    images = counted(summary["rows"], "image")
    parts = [f"Done: {images}, {summary['failures']} failed{speed}."]
    cells = [(name, str(count)) for name, count in summary["classes"].items()]
    if len(cells) > _SHOWN_CLASSES:
        rest = sum(list(summary["classes"].values())[_SHOWN_CLASSES:])
        cells = [*cells[:_SHOWN_CLASSES], (f"{len(cells) - _SHOWN_CLASSES} others", str(rest))]
    if cells:
        parts.append(table(("class", "images"), cells))
    files = [shown_path(summary["file"]), f"{shown_path(summary['page'])}  doubtful images first"]
    parts.append(facts([*trial_rows(summary), ("wrote", "\n".join(files))]))
    return "\n\n".join(parts)


def _check(config: Config) -> None:
    """Refuse layers that cannot be chosen before a model is built.

    Raises:
        ConfigError: several layers are named, or one for the file of a head.
    """
    if _layer(config) is not None and config.place_of_store().suffix == _HEAD:
        raise ConfigError(f"layers has no effect: {config.store} is the head of one layer.")


def _reads_with(config: Config) -> Collection[str]:
    """Return the options that name the code of a custom model."""
    return CUSTOM_CODE if config.model.code is not None else ()


JOBS.register(
    Job(
        "predict",
        "Classify new images with the head that job=probe or job=zeroshot made.",
        run=run,
        input=Input.STORE,
        reads=(
            *("job.json", "out", "layers", "device", "data", "max_failures"),
            *("reduce.name", "reduce.stats"),
        ),
        why="features are computed as those of the store were; `layers` selects the head",
        reads_with=_reads_with,
        check=_check,
    )
)
