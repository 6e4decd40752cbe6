"""Printed result of job=probe for classes of pixels."""

from __future__ import annotations

import textwrap
from typing import Any

from featx.analysis.probe import METRICS
from featx.base import WIDTH, facts, percent_text, table
from featx.config import Config
from featx.errors import counted
from featx.jobs.probe_metrics import (
    bootstrap_text,
    folds_text,
    last_rows,
    number_text,
    resamples_rows,
    split_rows,
)

_CLASSES = 20
"""Number of classes in the table, those with most pixels; job.show=all shows all."""


def segmentation_text(config: Config, result: dict[str, Any]) -> str:
    """Format the result for people: the answer, the tables, and what it rests on."""
    return "\n\n".join(
        [
            _answer(result),
            _layers_table(result),
            _classes_table(config, result),
            facts(_facts(result)),
        ]
    )


def _answer(result: dict[str, Any]) -> str:
    """Return the best layer with its metrics, and the interval of mIoU."""
    height, width = result["masks"]["crop"]
    return textwrap.fill(
        f"Chosen layer: {result['layer']} (linear, by the validation images). mIoU "
        f"{number_text(result['miou'])}, {bootstrap_text(result)}; pixel accuracy "
        f"{number_text(result['pixel_accuracy'])}, mean accuracy "
        f"{number_text(result['mean_accuracy'])}; {result['rows']} test images. These are of the "
        f"crop of {height} x {width} pixels that the network saw, not of whole images."
        f"{folds_text(result)}",
        WIDTH,
    )


def _layers_table(result: dict[str, Any]) -> str:
    """Format a table with one row per layer, in the order of the store."""
    metrics, rows = METRICS["segmentation"], []
    for layer, about in result["layers"].items():
        entry = about["linear"]
        chosen = entry["l2"] if isinstance(entry["l2"], list) else [entry["l2"]]
        rows.append(
            (
                layer,
                str(about["features"]),
                "{} x {}".format(*about["grid"]),
                ",".join(f"{value:g}" for value in dict.fromkeys(chosen)),
                *(number_text(entry[metric.key]) for metric in metrics),
            )
        )
    titles = [metric.title.replace(" ", "\n") for metric in metrics]
    return table(("layer", "width", "patches", "l2", *titles), rows)


def _classes_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table with one row per class of the test images, the most frequent first."""
    pixels = result["pixels_of_classes"]
    order = sorted((i for i, count in enumerate(pixels) if count), key=lambda i: -pixels[i])
    listed_classes = order if config.job.show == "all" else order[:_CLASSES]
    rows = [
        (
            result["classes"][i],
            number_text(result["iou"][i]),
            number_text(result["accuracy_of_classes"][i]),
            percent_text(pixels[i] / sum(pixels)),
        )
        for i in listed_classes
    ]
    text = table(("class", "IoU", "accuracy", "share of\ntest pixels"), rows)
    if order[len(listed_classes) :]:
        text += f"\nand {len(order) - len(listed_classes)} more classes; job.show=all shows them."
    return text


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of what the metrics rest on, of the files, and of what follows."""
    masks = result["masks"]
    untested = len(result["classes"]) - sum(count > 0 for count in result["pixels_of_classes"])
    classes = f"{len(result['classes'])}" + (f", {untested} not in test images" if untested else "")
    used = f"{masks['rows']} used, {counted(masks['num_refused'], 'row')} without a usable one"
    ignored = "no number is ignored"
    if masks["ignore"] is not None:
        ignored = f"pixels of {masks['ignore']} are ignored"
    rows = [
        ("task", f"{result['task']}: {result['task_reason']}"),
        ("masks", f"{used}; {ignored}"),
        ("classes", classes),
        *split_rows(result),
        *resamples_rows(result),
    ]
    notes = result["notes_on_rows"] + [
        f"{layer}: {note}"
        for layer, about in result["layers"].items()
        for note in about["linear"]["notes"]
    ]
    rows += [("notes", "\n".join(notes))] if notes else []
    return [*rows, *last_rows(result)]
