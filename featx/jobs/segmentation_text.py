"""Printed result of job=probe for classes of pixels."""

from __future__ import annotations

import textwrap
from typing import Any

from featx.base import WIDTH, command_text, facts, percent_text, shown_path, table
from featx.config import Config
from featx.errors import counted
from featx.jobs.probe_metrics import number_text
from featx.jobs.probe_text import counts_text, groups_text, split_text
from featx.storage import parse_path
from featx.store import layout

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
    interval = "no interval"
    if result["interval"] is not None:
        low, high = result["interval"]
        interval = f"95 % interval {low:.3f} to {high:.3f}"
    folds = ""
    if chosen := result.get("layer_of_folds"):
        folds = f" Each fold chose its layer within training ({counts_text(chosen)})."
    height, width = result["masks"]["crop"]
    return textwrap.fill(
        f"Best layer: {result['layer']} (linear, chosen on validation images). mIoU "
        f"{number_text(result['miou'])}, {interval}; pixel accuracy "
        f"{number_text(result['pixel_accuracy'])}, mean accuracy "
        f"{number_text(result['mean_accuracy'])}; {result['rows']} test images. These are of the "
        f"crop of {height} x {width} pixels that the network saw, not of whole images.{folds}",
        WIDTH,
    )


def _layers_table(result: dict[str, Any]) -> str:
    """Format a table with one row per layer, in the order of the store."""
    rows = []
    for layer, about in result["layers"].items():
        entry = about["linear"]
        chosen = entry["l2"] if isinstance(entry["l2"], list) else [entry["l2"]]
        names = ("miou", "pixel_accuracy", "mean_accuracy", "patch_miou")
        rows.append(
            (
                layer,
                str(about["features"]),
                "{} x {}".format(*about["grid"]),
                ",".join(f"{value:g}" for value in dict.fromkeys(chosen)),
                *(number_text(entry[name]) for name in names),
            )
        )
    header = ("layer", "width", "patches", "l2", "mIoU", "pixel\naccuracy", "mean\naccuracy")
    return table((*header, "patch\nmIoU"), rows)


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
    store, split, masks = parse_path(result["store"]), result["split"], result["masks"]
    groups = split["groups"]
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
        ("split", split_text(split)),
        *([("groups", groups_text(groups))] if groups else []),
    ]
    if result["interval"] is not None:
        resamples_text = (
            f"{result['resamples']} bootstrap resamples of {result['units']} {result['unit']}s"
        )
        rows.append(("interval", resamples_text))
    notes = result["notes_on_rows"] + [
        f"{layer}: {note}"
        for layer, about in result["layers"].items()
        for note in about["linear"]["notes"]
    ]
    rows += [("notes", "\n".join(notes))] if notes else []
    files = "\n".join([layout.PROBE, result["predictions"]["file"]])
    folder = store if store.is_dir() else store.parent
    rows.append(("wrote", f"{files}\nin {shown_path(folder)}"))
    return [*rows, ("next", command_text("job=report", f"store={shown_path(store)}"))]
