"""Probe that predicts the class of each pixel from the patch tokens of a layer (probe.masks)."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from featx.analysis.probe.masks import Masks, read_masks
from featx.analysis.probe.output_files import write_result
from featx.analysis.probe.patches import Patches, check_memory, require_patches
from featx.analysis.probe.result import run_entries, store_entries
from featx.analysis.probe.row_splits import RowSplits, missing_group_notes, split_rows
from featx.analysis.probe.segmentation_method import FittedPatches, fit_patches
from featx.analysis.probe.segmentation_metrics import (
    PixelCounts,
    interval_entry,
    segmentation_metrics,
)
from featx.analysis.probe.threads import threads_for
from featx.analysis.probe.values import TaskKind
from featx.base import WIDTH, choose_device, csv_bytes, exact_cuda
from featx.config import Config
from featx.errors import DataError, RunError, counted
from featx.store import FeatureStore, matching_layers

REFUSED_LISTED = 1000
"""Maximum number of rows without a usable mask that probe.json lists."""


@dataclass(frozen=True)
class LayerSegmentation:
    """Results of one layer.

    Attributes:
        about: its entry in probe.json.
        fits: result of each split.
    """

    about: dict[str, Any]
    fits: list[FittedPatches]


def run_segmentation_probe(
    config: Config, store: FeatureStore, kind: TaskKind, log: Callable[[str], None]
) -> dict[str, Any]:
    """Fit and test the probes, and write probe.json and the counts; heads are not written.

    Returns:
        contents of probe.json (docs/probe.md).
    """
    started_at = time.perf_counter()
    layers, device = matching_layers(store, config.layers), choose_device(config.device)
    masks = read_masks(config, store)
    require_patches(store, layers, masks.crop)
    rows = _splits(config, masks)
    log(
        f"{counted(len(masks.packed), 'mask')}, {len(masks.classes)} classes, "
        f"{counted(len(masks.refused), 'row')} without a usable mask"
    )
    layer_results: dict[str, LayerSegmentation] = {}
    for layer in layers:
        try:
            with torch.no_grad(), exact_cuda:
                layer_results[layer] = _probe_layer(
                    config, Patches(masks, layer, device), rows, layer
                )
        except torch.cuda.OutOfMemoryError as error:
            raise RunError(
                f"{layer} does not fit into the memory of {device}: use device=cpu, or extract "
                "fewer patches with reduce=grid."
            ) from error
        log(_line(layer, layer_results[layer].about))
    result = _result(config, kind, masks, rows, layer_results)
    result |= run_entries(config, time.perf_counter() - started_at)
    write_result(store, result, _counts_csv(config, masks, rows, layer_results))
    return result


def _splits(config: Config, masks: Masks) -> RowSplits:
    """Split the rows by image."""
    rows = split_rows(config, masks.labelled)
    for split in rows.splits:
        if min(len(split.fit), len(split.validation), len(split.test)) == 0:
            raise DataError(
                f"{len(masks.packed)} rows with a usable mask are too few to be divided into "
                "training, validation and test rows."
            )
    return rows


def _probe_layer(
    config: Config, patches: Patches, rows: RowSplits, layer: str
) -> LayerSegmentation:
    """Probe one layer."""
    started_at = time.perf_counter()
    num_rows = max(len(split.train) for split in rows.splits)
    check_memory(patches, layer, num_rows, config.probe.memory_gib)
    with threads_for(num_rows * patches.per_row * patches.width, patches.device):
        fits = [fit_patches(patches, split, config.probe.l2) for split in rows.splits]
    is_single = len(fits) == 1
    about = {
        "rows": sum(len(split.test) for split in rows.splits),
        **segmentation_metrics(PixelCounts.join([fit.tested for fit in fits])),
        "validation_miou": float(np.mean([fit.validation_miou for fit in fits])),
        "validation_loss": float(np.mean([fit.validation_loss for fit in fits])),
        "l2": fits[0].l2 if is_single else [fit.l2 for fit in fits],
        "sweep": fits[0].sweep if is_single else [fit.sweep for fit in fits],
        "training_patches": fits[0].num_patches if is_single else [fit.num_patches for fit in fits],
        "notes": list(dict.fromkeys(note for fit in fits for note in fit.notes)),
        "seconds": round(time.perf_counter() - started_at, 3),
    }
    places = {"grid": list(patches.grid), "prefix_tokens": patches.prefix}
    return LayerSegmentation({"features": patches.width, **places, "linear": about}, fits)


def _line(layer: str, about: dict[str, Any]) -> str:
    """Return the line of text about a layer."""
    metrics, (rows, columns) = about["linear"], about["grid"]
    text = (
        f"{layer}: {about['features']} features of {rows} x {columns} patches; mIoU "
        f"{metrics['miou']:.3f}, pixel accuracy {metrics['pixel_accuracy']:.3f}"
    )
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def _result(
    config: Config,
    kind: TaskKind,
    masks: Masks,
    rows: RowSplits,
    layer_results: dict[str, LayerSegmentation],
) -> dict[str, Any]:
    """Assemble probe.json, without the entries of the run.

    The layer is the one with the highest mIoU on validation rows. With several folds each of them
    chooses its own, and the numbers at the top are those of their choices.
    """
    best = max(
        layer_results, key=lambda layer: layer_results[layer].about["linear"]["validation_miou"]
    )
    folds = range(len(rows.splits))
    chosen = [
        max(layer_results, key=lambda layer: layer_results[layer].fits[fold].validation_miou)
        for fold in folds
    ]
    counts = PixelCounts.join([layer_results[chosen[fold]].fits[fold].tested for fold in folds])
    nested = {}
    if len(folds) > 1 and len(layer_results) > 1:
        nested = {"layer_of_folds": chosen, **segmentation_metrics(counts)}
    groups = rows.groups
    places = np.concatenate([split.test for split in rows.splits])
    return {
        **store_entries(masks.labelled.store),
        "task": kind.name,
        "task_reason": kind.reason,
        "layer": best,
        "method": "linear",
        **layer_results[best].about["linear"],
        **nested,
        **interval_entry(counts.pixels, None if groups is None else groups[places]),
        "classes": list(masks.classes),
        "class_numbers": masks.numbers.tolist(),
        "confusion": counts.confusion.tolist(),
        "masks": {
            "folder": str(config.probe.masks),
            "ignore": config.probe.ignore,
            "crop": list(masks.crop),
            "rows": len(masks.packed),
            "num_refused": len(masks.refused),
            "refused": [
                {"key": key, "reason": reason} for key, reason in masks.refused[:REFUSED_LISTED]
            ],
        },
        "rows_labelled": len(masks.packed),
        "split": rows.as_dict(config),
        "chosen_by": "validation_miou",
        "notes_on_rows": [
            *masks.labelled.notes,
            *rows.notes,
            *missing_group_notes(rows, config.probe.group_column),
        ],
        "seeds": None,
        "head": None,
        "layers": {layer: each.about for layer, each in layer_results.items()},
    }


def _counts_csv(
    config: Config, masks: Masks, rows: RowSplits, layer_results: dict[str, LayerSegmentation]
) -> bytes:
    """Return predictions.csv: a line for each layer, test row, and class in or predicted for it."""
    names = ("true", "predicted", "right")
    columns = ["layer", "method", "seed", "fold", "split", "key", "group", "class", *names]
    lines: list[list[Any]] = [[*columns, *(f"patches_{name}" for name in names)]]
    for layer, each in layer_results.items():
        rows_of_layer = _lines(masks, rows, each.fits)
        lines += ([layer, "linear", config.seed, *line] for line in rows_of_layer)
    return csv_bytes(lines)


def _lines(
    masks: Masks, rows: RowSplits, fits: Sequence[FittedPatches]
) -> Iterator[list[str | int]]:
    """Yield the columns of each line of one layer, beginning with the fold."""
    keys, has_folds = masks.labelled.store.keys[masks.labelled.rows], len(fits) > 1
    for fold, (split, fit) in enumerate(zip(rows.splits, fits, strict=True), 1):
        for row, place in enumerate(split.test.tolist()):
            group = "" if rows.groups is None else int(rows.groups[place])
            pixels, patches = fit.tested.pixels[row], fit.tested.patches[row]
            for number in np.flatnonzero(pixels.any(0) | patches.any(0)).tolist():
                counts = [*pixels[:, number].tolist(), *patches[:, number].tolist()]
                start = [fold if has_folds else "", "test", str(keys[place]), group]
                yield [*start, masks.classes[number], *counts]
