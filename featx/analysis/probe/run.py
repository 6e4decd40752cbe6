"""Probe of a store from its config to its files: layers, splits, methods and metrics."""

from __future__ import annotations

import hashlib
import json
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featx.analysis.probe import methods, splits
from featx.analysis.probe.heads import Head, head_bytes, head_path
from featx.analysis.probe.labelled_rows import Features, LayerRows, layer_rows, output_folder
from featx.analysis.probe.layer_choice import LayerChoice, best_layer
from featx.analysis.probe.leakage import (
    NEAR_COSINE,
    NearDuplicates,
    near_duplicates,
    repeated_rows,
)
from featx.analysis.probe.logistic_regression import threads_for
from featx.analysis.probe.metrics import Predictions, judged_folds, mean_and_spread
from featx.analysis.probe.paired_tests import compare
from featx.analysis.probe.row_predictions import RowPredictions, join_folds, predictions_csv
from featx.analysis.probe.task import Task, make_task
from featx.base import WIDTH, choose_device, exact_cuda, keep_freed_memory, percent_text
from featx.config import Config
from featx.errors import ConfigError, RunError
from featx.storage import open_folder
from featx.store import FeatureStore, layout, load_manifest, matching_layers

FORMAT = 1
"""Version of the format of probe.json."""

FEW_SHOT = "1 / rows, as scikit-learn's C=1"
"""Text in probe.json for the penalty of few-shot fits."""

PAIRS_LISTED = 50
"""Maximum number of pairs of near-duplicates that probe.json lists."""


@dataclass(frozen=True)
class LayerProbe:
    """Results of all methods on one layer.

    Attributes:
        about: the layer's entry in probe.json.
        head: head of the first method that has one, or None.
        tested: method -> predictions for the test rows.
        near: near-duplicates of test rows, or None if this layer was not used to find them.
    """

    about: dict[str, Any]
    head: Head | None
    tested: dict[str, RowPredictions]
    near: NearDuplicates | None


def run_probe(config: Config, log: Callable[[str], None]) -> dict[str, Any]:
    """Fit and test all probes that a config requests, and write probe.json, the predictions and
    the heads.

    Args:
        config: checked config with job=probe.
        log: called with a line of text after each layer.

    Returns:
        contents of probe.json (docs/probe.md).

    Raises:
        FeatxError: the store or the split does not allow a probe, or a training failed.
    """
    started_at = time.perf_counter()
    store = FeatureStore(config.place_of_store(), verify="rows")
    layers = matching_layers(store, config.layers)
    device = choose_device(config.device)
    task = make_task(config, store, layers)
    if device.type == "cpu":
        keep_freed_memory()
    found: dict[str, LayerProbe] = {}
    widest = max(layers, key=lambda layer: layer_rows(task.training, layer).width)
    choice = LayerChoice(len(task.splits))
    for layer in layers:
        try:
            with torch.no_grad(), exact_cuda:
                found[layer] = probe_layer(config, task, layer, device, choice, layer == widest)
        except torch.cuda.OutOfMemoryError as error:
            raise RunError(
                f"{layer} does not fit into the memory of {device}. Lower probe.memory_gib, so "
                "that it is streamed, or use device=cpu."
            ) from error
        log(_line(layer, found[layer].about, config.probe.methods))
    result = _result(config, task, found, choice, time.perf_counter() - started_at)
    _write(task, result, found)
    return result


def probe_layer(
    config: Config,
    task: Task,
    layer: str,
    device: torch.device,
    choice: LayerChoice,
    find_near_duplicates: bool,
) -> LayerProbe:
    """Probe one layer with all methods.

    Args:
        config: checked config with job=probe.
        task: rows and splits.
        layer: name of the layer.
        device: device that computes.
        choice: collects the layer's validation results with the first method.
        find_near_duplicates: whether to find near-duplicates with the vectors of this layer.
    """
    options = config.probe
    parts = [layer_rows(task.training, layer)]
    if task.testing is not None:
        parts.append(layer_rows(task.testing, layer))
    features = Features(parts, device, options.memory_gib * (1 << 30))
    problem = methods.Problem(features, task.y, len(task.training.classes), options, config.seed)
    about: dict[str, Any] = {
        "features": features.width,
        "reduction": _reduction(parts[0]),
        "streamed": features.whole is None,
        "repeated_rows": repeated_rows(features, task.splits),
    }
    head, near = None, None
    tested: dict[str, RowPredictions] = {}
    with threads_for(len(features) * features.width, device):
        if find_near_duplicates:
            near = near_duplicates(features, layer, task.splits)
        for method in options.methods:
            offered = choice if method == options.methods[0] else None
            about[method], fitted, tested[method] = _probe_with(
                problem, method, task, layer, offered
            )
            head = fitted if head is None else head
    return LayerProbe(about, head, tested, near)


def _reduction(rows: LayerRows) -> dict[str, Any]:
    """Describe what the store holds of the layer, and how the probe makes vectors of it."""
    attrs = rows.store[rows.layer].attrs
    return {
        "layer": str(attrs.get("layer", "")),
        "capture": str(attrs.get("capture", "")),
        "stored": str(attrs.get("reduce", "")),
        "shape": list(rows.store[rows.layer].shape[1:]),
        "then": rows.reduction,
        "axes": list(rows.pooled or ()),
    }


def _probe_with(
    problem: methods.Problem, method: str, task: Task, layer: str, choice: LayerChoice | None
) -> tuple[dict[str, Any], Head | None, RowPredictions]:
    """Probe one layer with one method.

    Args:
        problem: the layer.
        method: 'linear', 'knn' or 'ridge'.
        task: rows and splits.
        layer: name of the layer.
        choice: collects the layer's validation results, or None.

    Returns:
        the entry in probe.json, the head or None, and the predictions for the test rows.
    """
    started_at = time.perf_counter()
    name = methods.name_of_choice(method)
    fits = [methods.fit(problem, method, split) for split in task.splits]
    tested = [
        Predictions(
            problem.y[split.test],
            fitted.scores(split.test),
            method != "ridge",
            None if task.groups is None else task.groups[split.test],
            int(fitted.chosen) if method == "knn" else None,
        )
        for split, fitted in zip(task.splits, fits, strict=True)
    ]
    validation = [fitted.validation for fitted in fits if fitted.validation is not None]
    if choice is not None:
        choice.offer(layer, validation, tested)
    about = judged_folds(tested)
    about |= {
        "validation_accuracy": float(np.mean([accuracy for accuracy, _ in validation])),
        "validation_loss": float(np.mean([loss for _, loss in validation])),
        name: fits[0].chosen,
        "sweep": fits[0].sweep,
        **fits[0].details,
    }
    notes = [
        note if len(fits) == 1 else f"fold {number} of {len(fits)}: {note}"
        for number, fitted in enumerate(fits, 1)
        for note in fitted.notes
    ]
    head, fitted_on = fits[0].head, "train"
    if len(fits) > 1:
        chosen = float(statistics.median_low([fitted.chosen for fitted in fits]))
        about |= {
            name: chosen,
            f"{name}_of_folds": [fitted.chosen for fitted in fits],
            "sweep": [fitted.sweep for fitted in fits],
        }
        if head is not None:
            every = np.arange(len(task.training.rows))
            final = methods.fit_as_chosen(problem, method, every, chosen)
            head, fitted_on, notes = final.head, "all labelled rows", [*notes, *final.notes]
            about |= final.details
    if head is not None:
        about["head_fitted_on"] = fitted_on
    if problem.options.all_shots:
        about["few_shot"] = _few_shot(problem, method, task)
    about["notes"] = list(dict.fromkeys(notes))
    about["seconds"] = round(time.perf_counter() - started_at, 3)
    return about, head, join_folds(tested)


def _few_shot(problem: methods.Problem, method: str, task: Task) -> dict[str, Any]:
    """Compute accuracies with few rows per class over several draws, with fixed settings."""
    options = problem.options
    given = options.k if method == "knn" else options.l2
    found = {}
    for shots in options.all_shots:
        accuracies, rows = [], []
        for draw in range(options.draws or 5):
            split = task.splits[draw % len(task.splits)]
            places = splits.few(problem.y, split.train, shots, draw, problem.seed)
            chosen = given if given is not None else shots if method == "knn" else 1 / len(places)
            fitted = methods.fit_as_chosen(problem, method, places, chosen)
            scores = fitted.scores(split.test)
            accuracies.append(float((scores.argmax(1) == problem.y[split.test]).mean()))
            rows.append(len(places))
        chosen_as = given if given is not None else "shots" if method == "knn" else FEW_SHOT
        found[str(shots)] = {
            **mean_and_spread(accuracies),
            "rows": rows,
            methods.name_of_choice(method): chosen_as,
        }
    return found


def _result(
    config: Config,
    task: Task,
    found: dict[str, LayerProbe],
    choice: LayerChoice,
    seconds: float,
) -> dict[str, Any]:
    """Assemble probe.json: the best layer first, then all layers."""
    store, method = task.training.store, config.probe.methods[0]
    layers = {layer: each.about for layer, each in found.items()}
    best = best_layer(layers, method)
    nested: dict[str, Any] = {}
    tested = found[best].tested[method]
    if len(task.splits) > 1 and len(found) > 1:
        nested = judged_folds([predictions for _, predictions in choice.chosen])
        nested["layer_of_folds"] = [layer for layer, _ in choice.chosen]
        tested = join_folds([predictions for _, predictions in choice.chosen])
    near = _near_duplicates_entry(task, found, tested)
    notes = list(task.notes)
    if count := layers[best]["repeated_rows"]:
        notes.append(
            f"{count} test rows have the same vector as a training row in {best}; these may be "
            "the same images"
        )
    if near["rows"]:
        notes.append(
            f"{near['rows']} test rows have a near-duplicate among the training rows (cosine of "
            f"{near['cosine']} or more of the standardised {near['layer']}): the accuracy may be "
            "too high; probe.group_column keeps rows that belong together on one side"
        )
    return {
        "featx_probe": FORMAT,
        "store": str(store.root),
        "fingerprint": str(store.attrs["fingerprint"]),
        "model": str(store.attrs["model"]),
        "weights": str(store.attrs["weights"]),
        "weights_sha256": str(store.attrs["weights_sha256"]),
        "transform": str(store.attrs["transform"]),
        "layer": best,
        "method": method,
        **layers[best][method],
        **nested,
        "classes": list(task.training.classes),
        "rows_labelled": len(task.training.rows),
        "split": task.about,
        "near_duplicates": near,
        "paired_tests": {
            layer: compare(found[best].tested[method], each.tested[method])
            for layer, each in found.items()
            if layer != best
        },
        "chosen_by": "validation_accuracy",
        "notes_on_rows": notes,
        "device": config.device,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
        "seconds_in_all": round(seconds, 3),
        "layers": layers,
    }


def _near_duplicates_entry(
    task: Task, found: dict[str, LayerProbe], tested: RowPredictions
) -> dict[str, Any]:
    """Return the entry `near_duplicates` of probe.json.

    Args:
        task: rows and splits.
        found: results of all layers, one of which has the near-duplicates.
        tested: predictions of which the accuracy at the top of probe.json is.
    """
    near = next(each.near for each in found.values() if each.near is not None)
    checked = near.not_checked is None
    keys = task.keys
    pairs = zip(near.test.tolist(), near.training.tolist(), near.cosines.tolist(), strict=True)
    places = np.concatenate([split.test for split in task.splits])
    return {
        "layer": near.layer,
        "cosine": NEAR_COSINE,
        "rows": len(near.test) if checked else None,
        "not_checked": near.not_checked,
        "without": tested.accuracy_of(~np.isin(places, near.test)) if checked else None,
        "pairs": [
            {"test": str(keys[a]), "training": str(keys[b]), "cosine": round(cosine, 4)}
            for a, b, cosine in list(pairs)[:PAIRS_LISTED]
        ],
    }


def _write(task: Task, result: dict[str, Any], found: dict[str, LayerProbe]) -> None:
    """Write the heads, the predictions and probe.json."""
    store = task.training.store
    folder = output_folder(store)
    disk = open_folder(folder)
    heads = {layer: each.head for layer, each in found.items() if each.head is not None}
    predictions = folder / layout.PROBE_HEADS / layout.PROBE_PREDICTIONS
    disk.make_folder(predictions.parent)
    paths: dict[Path, str] = {}
    # probe.json names the other files with their checksums, so it is written last.
    for layer, head in heads.items():
        path = head_path(folder, layer)
        if path in paths:
            raise ConfigError(
                f"the heads of {paths[path]} and {layer} would have one file, {path}; probe them "
                "one after the other with layers=."
            )
        paths[path] = layer
        about = result["layers"][layer]
        method = next(name for name in ("linear", "ridge") if name in about)
        data = head_bytes(head, _about_head(store, result, layer, method))
        disk.replace_unlocked(path, data)
        about["head"] = {
            "file": str(path.relative_to(folder)),
            "method": method,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    result["head"] = result["layers"][result["layer"]].get("head")
    tested = {
        (layer, method): rows
        for layer, each in found.items()
        for method, rows in each.tested.items()
    }
    data = predictions_csv(task.splits, task.keys, task.y, task.training.classes, tested)
    disk.replace_unlocked(predictions, data)
    result["predictions"] = {
        "file": str(predictions.relative_to(folder)),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
    disk.replace_unlocked(folder / layout.PROBE, text.encode("utf-8", "surrogateescape") + b"\n")


def _about_head(
    store: FeatureStore, result: dict[str, Any], layer: str, method: str
) -> dict[str, Any]:
    """Return the description that a head's file contains: how to use it, and its accuracy."""
    about = result["layers"][layer]
    manifest, _ = load_manifest(output_folder(store))
    known = manifest is not None and manifest.digest == store.attrs["fingerprint"]
    run = manifest.holder(layer) if manifest is not None and known else None
    return {
        "dataset": layer,
        "method": method,
        "l2": about[method]["l2"],
        "fitted_on": about[method]["head_fitted_on"],
        "accuracy": about[method]["accuracy"],
        "reduction": about["reduction"],
        "classes": result["classes"],
        **{
            name: result[name]
            for name in ("store", "fingerprint", "model", "weights", "weights_sha256", "transform")
        },
        # How the layer was extracted, for prediction on new images. A merged file does not contain
        # it.
        "config": run.header.config if run else None,
        "resolved": dict(run.resolved) if run else None,
        "spec": next(asdict(spec) for spec in run.layers if spec.name == layer) if run else None,
    }


def _line(layer: str, about: dict[str, Any], names: Sequence[str]) -> str:
    """Return the line of text about a layer."""
    shown = ", ".join(f"{name} {percent_text(about[name]['accuracy'])}" for name in names)
    pooled = " (averaged over positions)" if about["reduction"]["then"] == "avg" else ""
    streamed = ", streamed" if about["streamed"] else ""
    text = f"{layer}: {about['features']} features{pooled}{streamed}; {shown}"
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")
