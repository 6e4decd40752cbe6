"""job=predict: classes, labels or numbers of new images by the head of a probe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from featx.base import Section, Table, csv_bytes, facts, log_message, shown_path
from featx.config import Config
from featx.errors import ConfigError, counted
from featx.jobs.base import JOBS, Input, Job, code_options, print_summary
from featx.pipeline import exit_code
from featx.storage import AtomicFolder, check_writable
from featx.types import Json

if TYPE_CHECKING:
    from featx.analysis import Predictions

PREDICTIONS_CSV, PREDICTIONS_HTML = "predictions.csv", "predictions.html"
_SEPARATOR = ";"
"""Text between the labels of an image in predictions.csv."""

_SHOWN_CLASSES = 20
"""Number of classes that the printed table names, the most frequent first."""

_HEAD = ".safetensors"
"""Ending of the file of a head, which may be given instead of a store."""
_PREDICTED = {
    "classification": ("class", "probability"),
    "multilabel": ("labels",),
    "regression": ("predicted",),
}
"""Task -> columns of predictions.csv between `key` and `status`."""


def run(config: Config, config_yaml: str) -> int:
    """Predict the images, write the files and print a summary; returns the exit code."""
    from featx.analysis import Predictor, head_of_store  # which import torch
    from featx.export.report import render_predictions

    path_given = config.store_path()
    head = path_given if path_given.suffix == _HEAD else head_of_store(path_given, _layer(config))
    log_message(facts([("head", f"{head.name}\nin {shown_path(head.parent)}")]))
    out = Path(config.out).expanduser()
    if config.has_default_out:  # it names `model`, which the head does not read
        out = Path("runs", config.data.folder_name, head.stem)
    disk = AtomicFolder(out)
    check_writable(disk.root)  # first, so that an unusable path fails early
    with Predictor(config, head, pads=True) as model:
        predictions = model.predict(config.data)
    disk.make_folder(disk.root)
    path, page = disk.root / PREDICTIONS_CSV, disk.root / PREDICTIONS_HTML
    with disk.stream_file(path) as file:
        file.write(image_predictions_csv(predictions))
        file.flush()  # a full disk leaves both files of an earlier run
        disk.remove(page)  # of an earlier run: this process may end here
    has_page = predictions.task == "classification"
    if has_page:
        whole = replace(config.data, views=None, crops=None, crop_scale=None)
        html = render_predictions(predictions, whole, disk.root.name)
        disk.replace_unlocked(page, html.encode())
    summary = _summary(predictions, path, page if has_page else None)
    print_summary(config, summary, *_sections(summary))
    return exit_code(
        config, summary["rows"], summary["failures"], f"They have their reason in {path}."
    )


def _layer(config: Config) -> str | None:
    layer = config.layers
    if isinstance(layer, list | tuple) and len(layer) == 1:
        layer = layer[0]
    if not isinstance(layer, str | None):
        raise ConfigError(f"layers={layer}: job=predict uses the head of one layer.")
    return layer


def image_predictions_csv(predictions: Predictions) -> bytes:
    """Return the CSV file: one line per image, failed ones with their reason and no scores.

    Scores have as many digits as float32 needs. With more than MAX_SCORES of them, the file has no
    columns of single classes, which a message says.
    """
    from featx.analysis.probe import MAX_SCORES, SCORE

    has_scores = predictions.scores.size <= MAX_SCORES and predictions.task != "regression"
    if predictions.scores.size > MAX_SCORES and predictions.task != "regression":
        log_message(
            f"{PREDICTIONS_CSV} has no column per class: {len(predictions)} images x "
            f"{len(predictions.classes)} classes are more than {MAX_SCORES} scores. "
            "featx.predict(...).scores has them all."
        )
    names = [f"{SCORE}{name}" for name in predictions.classes] if has_scores else []

    def lines() -> Iterator[list[object]]:
        yield ["key", *_PREDICTED[predictions.task], "status", "reason", *names]
        for row, row_scores in zip(predictions.rows, predictions.scores, strict=True):
            scores: list[object] = []
            if has_scores:
                scores = [""] * len(names) if np.isnan(row_scores).any() else list(row_scores)
            # Columns of what was predicted are empty if the image failed.
            if predictions.task == "regression":
                columns = ["" if row.value is None else str(row_scores[0])]
            elif predictions.task == "multilabel":
                columns = [_SEPARATOR.join(row.labels)]
            else:
                columns = [
                    row.label or "",
                    "" if row.probability is None else str(row_scores.max()),
                ]
            yield [row.key, *columns, row.status, row.reason, *scores]

    return csv_bytes(lines())


def _summary(predictions: Predictions, path: Path, page: Path | None) -> Json:
    counts = Counter(row.label for row in predictions.rows if row.label is not None)
    counts.update(label for row in predictions.rows for label in row.labels)
    values = [row.value for row in predictions.rows if row.value is not None]
    metrics = predictions.metrics.as_dict()
    return {
        "rows": len(predictions),
        "failures": sum(row.status != "ok" for row in predictions.rows),
        "task": predictions.task,
        "classes": dict(counts.most_common()),
        "values": {
            "column": predictions.classes[0],
            "min": min(values),
            "mean": sum(values) / len(values),
            "max": max(values),
        }
        if values
        else None,
        "images_per_second": metrics["images_per_second"],
        "file": str(path),
        "page": None if page is None else str(page),
    }


def _sections(summary: Json) -> list[Section]:
    rate = summary["images_per_second"]
    speed = f", {rate:.1f} images/s" if rate else ""
    images = counted(summary["rows"], "image")
    sections: list[Section] = [f"Done: {images}, {summary['failures']} failed{speed}."]
    cells = [(name, str(count)) for name, count in summary["classes"].items()]
    if (num_others := len(cells) - _SHOWN_CLASSES) > 0:
        num_rest = sum(list(summary["classes"].values())[_SHOWN_CLASSES:])
        cells = [*cells[:_SHOWN_CLASSES], (f"{num_others} others", str(num_rest))]
    if cells:
        heading = "label" if summary["task"] == "multilabel" else "class"
        sections.append(Table((heading, "images"), cells))
    if values := summary["values"]:
        cells = [(name, f"{values[name]:.6g}") for name in ("min", "mean", "max")]
        sections.append(Table((f"predicted {values['column']}", ""), cells))
    files = shown_path(summary["file"])
    if summary["page"] is not None:
        files += f"\n{shown_path(summary['page'])}  doubtful images first"
    return [*sections, [("wrote", files)]]


def _check(config: Config) -> None:
    """Refuse layers that cannot be chosen before a model is built."""
    if _layer(config) is not None and config.store_path().suffix == _HEAD:
        raise ConfigError(f"layers has no effect: {config.store} is the head of one layer.")


JOBS.register(
    Job(
        "predict",
        "Predict new images with the head that job=probe or job=zeroshot made.",
        run=run,
        input=Input.STORE,
        reads=(
            *("job.json", "out", "layers", "device", "data", "max_failures"),
            *("reduce.name", "reduce.stats"),
        ),
        why="features are computed as those of the store were; `layers` selects the head",
        reads_with=code_options,
        check=_check,
    )
)
