"""Probe of a store from its config to its files: layers, splits, methods and metrics."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from featx.analysis.probe.layer_choice import LayerChoice
from featx.analysis.probe.layer_probe import AdditionalResults, layer_features, probe_layer
from featx.analysis.probe.layer_rows import layer_vectors
from featx.analysis.probe.library_metrics import require_scikit_learn
from featx.analysis.probe.metric_intervals import bootstrap_entry
from featx.analysis.probe.metrics import join_predictions
from featx.analysis.probe.nested_selection import selection_entry
from featx.analysis.probe.output_files import write_probe
from featx.analysis.probe.repeated_splits import seeds_entry
from featx.analysis.probe.result import SeedProbe, probe_result
from featx.analysis.probe.row_predictions import MAX_SCORES, join_folds
from featx.analysis.probe.segmentation_probe import run_segmentation_probe
from featx.analysis.probe.store_comparison import OtherProbe, compared_store_entry, read_probe
from featx.analysis.probe.task import ProbeTask, make_task
from featx.analysis.probe.tokens import ATTENTIVE, require_tokens
from featx.analysis.probe.value_probe import run_value_probe
from featx.analysis.probe.values import task_kind
from featx.base import WIDTH, choose_device, exact_cuda, keep_freed_memory, percent_text
from featx.config import Config
from featx.errors import RunError
from featx.store import FeatureStore, layout, matching_layers


def run_probe(
    config: Config, log: Callable[[str], None], max_scores: int = MAX_SCORES
) -> dict[str, Any]:
    """Fit and test all probes that a config requests, and write probe.json, the predictions and
    the heads.

    Args:
        config: checked config with job=probe.
        log: called with a line of text after each layer.
        max_scores: number of scores up to which predictions.csv has a column per class.

    Returns:
        contents of probe.json (docs/probe.md).

    Raises:
        MissingExtraError: scikit-learn is not installed.
        FeatxError: the store or the split does not allow a probe, or a training failed.
    """
    require_scikit_learn()
    started_at = time.perf_counter()
    store = FeatureStore(config.store_path(), verify="rows")
    kind = task_kind(store, config.probe)
    if kind.name == "segmentation":
        return run_segmentation_probe(config, store, kind, log)
    if kind.name != "classification":
        return run_value_probe(config, store, kind, log)
    layers = matching_layers(store, config.layers)
    if "attentive" in config.probe.methods:
        require_tokens(store, layers, ATTENTIVE)
    device = choose_device(config.device)
    seeds = range(config.seed, config.seed + (config.probe.seeds or 1))
    # Read before the probe, so that a mistake is reported at once and store=compare_store works.
    other = None if config.probe.compare_store is None else read_probe(config.probe.compare_store)
    tasks = [make_task(replace(config, seed=seed), store, layers) for seed in seeds]
    if device.type == "cpu":
        keep_freed_memory()
    seed_probes = [SeedProbe(task, {}, LayerChoice(len(task.splits))) for task in tasks]
    widest = max(layers, key=lambda layer: layer_vectors(tasks[0].training, layer).width)
    keeps_scores = _num_scores(config, tasks, len(layers)) <= max_scores
    for layer in layers:
        extras = AdditionalResults(layer == widest, True, keeps_scores)
        _probe_layer(config, seed_probes, layer, device, extras)
        log(_line(layer, [each.layers[layer].about for each in seed_probes], config.probe.methods))
    result = probe_result(config, seed_probes[0], time.perf_counter() - started_at)
    result |= {"task": kind.name, "task_reason": kind.reason}
    _add_comparisons(config, seed_probes[0], other, result)
    result["layer_selection"] = selection_entry(seed_probes, config.probe.methods[0])
    result["seeds"] = (
        None if len(seed_probes) == 1 else seeds_entry(seed_probes, config.probe.methods)
    )
    if not keeps_scores:
        result["notes_on_rows"].append(
            f"{layout.PROBE_PREDICTIONS} has no column per class: it would have more than "
            f"{max_scores} scores; AUROC and top-5 cannot be recomputed from it"
        )
    write_probe(result, seed_probes)
    return result


def _probe_layer(
    config: Config,
    seed_probes: Sequence[SeedProbe],
    layer: str,
    device: torch.device,
    extras: AdditionalResults,
) -> None:
    """Probe a layer with the splits of all seeds."""
    try:
        with torch.no_grad(), exact_cuda:
            features = layer_features(config, seed_probes[0].task, layer, device)
            for each in seed_probes:
                extras_of_seed = replace(extras, head=each is seed_probes[0])
                each.layers[layer] = probe_layer(
                    config, each.task, layer, features, each.choice, extras_of_seed
                )
    except torch.cuda.OutOfMemoryError as error:
        raise RunError(
            f"{layer} does not fit into the memory of {device}. Lower probe.memory_gib, so "
            "that it is streamed, or use device=cpu."
        ) from error


def _add_comparisons(
    config: Config, first: SeedProbe, other: OtherProbe | None, result: dict[str, Any]
) -> None:
    """Add the entries `bootstrap` and `compared_store` for the numbers at the top of probe.json."""
    result["bootstrap"] = result["compared_store"] = None
    folds = [each.predictions for each in first.choice.chosen]
    if config.probe.bootstrap is not None:
        result["bootstrap"] = bootstrap_entry(join_predictions(folds), config.probe.bootstrap)
    if other is not None:
        places = np.concatenate([split.test for split in first.task.splits])
        result["compared_store"] = compared_store_entry(
            other,
            join_folds(folds),
            first.task.keys[places],
            first.task.image_checksums[places],
            result["classes"],
        )


def _num_scores(config: Config, tasks: Sequence[ProbeTask], num_layers: int) -> int:
    """Return the number of scores of all classes, layers, methods and test rows."""
    rows = sum(len(split.test) for task in tasks for split in task.splits)
    return rows * len(tasks[0].training.classes) * num_layers * len(config.probe.methods)


def _line(layer: str, seed_probes: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return the line of text about a layer, with the mean accuracy of all seeds."""
    about = seed_probes[0]
    means = {
        name: sum(each[name]["accuracy"] for each in seed_probes) / len(seed_probes)
        for name in names
    }
    text_of_methods = ", ".join(f"{name} {percent_text(mean)}" for name, mean in means.items())
    pooled = " (averaged over positions)" if about["reduction"]["then"] == "avg" else ""
    streamed = ", streamed" if about["streamed"] else ""
    text = f"{layer}: {about['features']} features{pooled}{streamed}; {text_of_methods}"
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")
