"""Printed result of job=probe for classes of pixels."""

from __future__ import annotations

from typing import Any

from featx.analysis.probe import METRICS
from featx.base import percent_text
from featx.config import Config
from featx.errors import counted
from featx.jobs.base import Section, Table
from featx.jobs.probe_metrics import (
    bootstrap_text,
    filled,
    folds_text,
    last_facts,
    number_text,
    resamples_text,
    setting_text,
    split_facts,
)

_CLASSES = 20
"""Number of classes in the table, those with most pixels; job.show=all shows all."""


def segmentation_sections(config: Config, result: dict[str, Any]) -> list[Section]:
    """Describe the result: the answer, the tables, and what it rests on."""
    height, width = result["masks"]["crop"]
    answer = (
        f"Chosen layer: {result['layer']} (linear, by the validation images). mIoU "
        f"{number_text(result['miou'])}, {bootstrap_text(result)}; pixel accuracy "
        f"{number_text(result['pixel_accuracy'])}, mean accuracy "
        f"{number_text(result['mean_accuracy'])}; {result['rows']} test images. These are of the "
        f"crop of {height} x {width} pixels that the network saw, not of whole images."
        f"{folds_text(result)}"
    )
    return [filled([answer]), _layers_table(result), _classes_table(config, result), _facts(result)]


def _layers_table(result: dict[str, Any]) -> Table:
    """Make a table with one row per layer, in the order of the store."""
    metrics = METRICS["segmentation"]
    rows = [
        (
            layer,
            str(about["features"]),
            "{} x {}".format(*about["grid"]),
            setting_text(about["linear"]["l2"]),
            *(number_text(about["linear"][metric.key]) for metric in metrics),
        )
        for layer, about in result["layers"].items()
    ]
    titles = [metric.title.replace(" ", "\n") for metric in metrics]
    return Table(("layer", "width", "patches", "l2", *titles), rows)


def _classes_table(config: Config, result: dict[str, Any]) -> Table:
    """Make a table with one row per class of the test images, the most frequent first."""
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
    more = len(order) - len(listed_classes)
    notes = [f"and {more} more classes; job.show=all shows them."] if more else []
    return Table(("class", "IoU", "accuracy", "share of\ntest pixels"), rows, notes=notes)


def _facts(result: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return (name, text) of what the metrics rest on, of the files, and of what follows."""
    masks, ignore = result["masks"], result["masks"]["ignore"]
    untested = len(result["classes"]) - sum(count > 0 for count in result["pixels_of_classes"])
    classes = f"{len(result['classes'])}" + (f", {untested} not in test images" if untested else "")
    used = f"{masks['rows']} used, {counted(masks['num_refused'], 'row')} without a usable one"
    ignored = "no number is ignored" if ignore is None else f"pixels of {ignore} are ignored"
    of_layers = [
        f"{layer}: {note}"
        for layer, about in result["layers"].items()
        for note in about["linear"]["notes"]
    ]
    return [
        ("task", f"{result['task']}: {result['task_reason']}"),
        ("masks", f"{used}; {ignored}"),
        ("classes", classes),
        *split_facts(result),
        ("interval", resamples_text(result)),
        *last_facts(result, [*result["notes_on_rows"], *of_layers]),
    ]
