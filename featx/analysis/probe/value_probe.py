"""Probe that predicts numbers (regression) or several labels of a row (multilabel)."""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from featx.analysis.probe.heads import Head
from featx.analysis.probe.layer_probe import reduction_entry
from featx.analysis.probe.layer_rows import Features, layer_vectors
from featx.analysis.probe.metric_intervals import INTERVAL_RESAMPLES
from featx.analysis.probe.other_store import open_other_store
from featx.analysis.probe.output_files import write_heads, write_result
from featx.analysis.probe.result import run_entries, store_entries
from featx.analysis.probe.row_predictions import SCORE
from featx.analysis.probe.row_splits import missing_group_notes, split_by_store, split_rows
from featx.analysis.probe.threads import threads_for
from featx.analysis.probe.value_methods import FittedValues, ValueProblem, fit_head, fit_values
from featx.analysis.probe.value_seeds import ValueSeed, value_seeds_entry
from featx.analysis.probe.value_task import (
    Matrix,
    ValueTask,
    check_options,
    check_splits,
    untrained_label_notes,
)
from featx.analysis.probe.values import TaskKind, Values, valued_rows
from featx.base import WIDTH, choose_device, csv_bytes, exact_cuda
from featx.config import Config
from featx.store import FeatureStore, matching_layers


def run_value_probe(
    config: Config, store: FeatureStore, kind: TaskKind, log: Callable[[str], None]
) -> dict[str, Any]:
    """Fit and test the probes, and write probe.json, the predictions and the heads.

    Returns:
        contents of probe.json (docs/probe.md).
    """
    started_at = time.perf_counter()
    check_options(config, kind)
    layers = matching_layers(store, config.layers)
    device = choose_device(config.device)
    values, testing = valued_rows(store, config.probe, kind), None
    if config.probe.test_store is not None:
        other_store = open_other_store(store, config.probe.test_store, layers)
        testing = valued_rows(other_store, config.probe, kind, values.names)
    seed_probes = []
    for seed in range(config.seed, config.seed + (config.probe.seeds or 1)):
        task = _task(replace(config, seed=seed), values, testing, kind)
        check_splits(task, config)
        seed_probes.append(ValueSeed(task, {}, {}, {}))
    for layer in layers:
        with torch.no_grad(), exact_cuda:
            stored = [layer_vectors(each.labelled, layer) for each in seed_probes[0].task.stores]
            features = Features(stored, device, config.probe.memory_gib * (1 << 30))
            for each in seed_probes:
                each.layers[layer] = {
                    "features": features.width,
                    "reduction": reduction_entry(stored[0]),
                    "streamed": features.whole is None,
                }
                for method in config.probe.methods:
                    fits = _probe(config, each, features, layer, method)
                    if method == "linear" and each is seed_probes[0]:
                        each.heads[layer] = _head(config, each, features, layer, fits)
        log(_line(layer, seed_probes, config.probe.methods))
    result = _result(config, seed_probes[0], time.perf_counter() - started_at)
    has_seeds = len(seed_probes) > 1
    result["seeds"] = value_seeds_entry(seed_probes, config.probe.methods) if has_seeds else None
    write_heads(
        store, result, {layer: (head, "linear") for layer, head in seed_probes[0].heads.items()}
    )
    write_result(store, result, _predictions_csv(seed_probes))
    return result


def _task(config: Config, values: Values, testing: Values | None, kind: TaskKind) -> ValueTask:
    """Return the task with the splits of a seed."""
    if testing is None:
        rows = split_rows(config, values.labelled)
    else:
        rows = split_by_store(config, values.labelled, testing.labelled)
    return ValueTask(kind, values, testing, rows, config.seed)


def _line(layer: str, seed_probes: Sequence[ValueSeed], methods: Sequence[str]) -> str:
    """Return the line of text about a layer, with the mean of the first metric of all seeds."""
    name, texts = seed_probes[0].task.metrics[0], []
    for method in methods:
        values = [each.layers[layer][method][name] for each in seed_probes]
        mean = "-" if None in values else f"{np.mean(values):.3f}"
        texts.append(f"{method} {name} {mean}")
    text = f"{layer}: {seed_probes[0].layers[layer]['features']} features; {', '.join(texts)}"
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def _problem(config: Config, task: ValueTask, features: Features) -> ValueProblem:
    """Return the problem of a layer."""
    return ValueProblem(features, task.targets, task.kind.name == "multilabel", config.probe)


def _probe(
    config: Config, seed_probe: ValueSeed, features: Features, layer: str, method: str
) -> list[FittedValues]:
    """Probe one layer with one method, add the entry to the seed, and return the fits."""
    started_at = time.perf_counter()
    task = seed_probe.task
    problem = _problem(config, task, features)
    with threads_for(len(features) * features.width, features.device):
        fits = [fit_values(problem, method, split) for split in task.rows.splits]
    places = task.test_places
    name = "k" if method == "knn" else "l2"
    seed_probe.fits[layer, method] = fits
    seed_probe.layers[layer][method] = {
        "rows": len(places),
        **task.judge(places, np.concatenate([fit.predicted for fit in fits])),
        "validation_loss": float(np.mean([fit.validation_loss for fit in fits])),
        name: [fit.chosen for fit in fits] if len(fits) > 1 else fits[0].chosen,
        "sweep": [fit.sweep for fit in fits] if len(fits) > 1 else fits[0].sweep,
        "notes": list(dict.fromkeys(note for fit in fits for note in fit.notes)),
        "seconds": round(time.perf_counter() - started_at, 3),
    }
    return fits


def _head(
    config: Config,
    seed_probe: ValueSeed,
    features: Features,
    layer: str,
    fits: Sequence[FittedValues],
) -> Head:
    """Return the head for new images: with several folds, one that is fitted on all of them."""
    about = seed_probe.layers[layer]["linear"]
    if len(fits) == 1 and fits[0].head is not None:
        about["head_fitted_on"] = "train"
        return fits[0].head
    l2 = float(statistics.median_low([fit.chosen for fit in fits]))
    all_places = np.arange(len(seed_probe.task.values.values))
    with threads_for(len(features) * features.width, features.device):
        head, notes = fit_head(_problem(config, seed_probe.task, features), all_places, l2)
    about |= {"head_fitted_on": "all labelled rows", "head_l2": l2}
    about["notes"] = list(dict.fromkeys([*about["notes"], *notes]))
    return head


def _result(config: Config, first: ValueSeed, seconds: float) -> dict[str, Any]:
    """Assemble probe.json."""
    task, method = first.task, config.probe.methods[0]
    top = first.top(method)
    return {
        **store_entries(task.values.labelled.store),
        "task": task.kind.name,
        "task_reason": task.kind.reason,
        "layer": top.layer,
        "method": method,
        **top.about,
        **_interval(task, top.predicted),
        "targets": list(task.values.names),
        "rows_labelled": len(task.values.values),
        "split": task.rows.as_dict(config),
        "chosen_by": "validation_loss",
        "notes_on_rows": [
            *task.values.labelled.notes,
            *task.rows.notes,
            *missing_group_notes(task.rows, config.probe.group_column),
            *untrained_label_notes(task),
        ],
        **run_entries(config, seconds),
        "layers": first.layers,
    }


def _interval(task: ValueTask, predicted: Matrix) -> dict[str, Any]:
    """Return the 95 % percentile interval of the first metric by the bootstrap of rows or groups.

    Its entries are `interval`, `resamples`, `unit` and `units`. `interval` is None if the metric is
    undefined in a resample, or equal in all of them.
    """
    places, groups = task.test_places, task.rows.groups
    unit_of_row = np.arange(len(places))
    if groups is not None:
        unit_of_row = np.unique(groups[places], return_inverse=True)[1]
    order = np.argsort(unit_of_row, kind="stable")
    units = np.split(order, np.cumsum(np.bincount(unit_of_row))[:-1])
    rng = np.random.default_rng(0)  # the same numbers for the same predictions
    truth, metrics = task.targets[places], list[float | None]()
    for _ in range(INTERVAL_RESAMPLES):
        drawn = np.concatenate([units[i] for i in rng.integers(len(units), size=len(units))])
        metrics.append(task.first_metric(truth[drawn], predicted[drawn]))
    interval = None
    values = [value for value in metrics if value is not None]
    if len(values) == len(metrics) and len(set(values)) > 1:
        interval = np.quantile(values, [0.025, 0.975]).tolist()
    unit = "row" if groups is None else "group"
    return {
        "interval": interval,
        "resamples": INTERVAL_RESAMPLES,
        "unit": unit,
        "units": len(units),
    }


def _predictions_csv(seed_probes: Sequence[ValueSeed]) -> bytes:
    """Return predictions.csv: one line for each seed, layer, method and test row."""
    first = seed_probes[0].task
    if first.kind.name == "regression":
        columns = ["true", "predicted"]
    else:
        columns = [f"{what}{name}" for what in ("true:", SCORE) for name in first.values.names]
    columns = ["layer", "method", "seed", "fold", "split", "key", "group", *columns]
    lines: list[list[Any]] = [columns]
    for each in seed_probes:
        for (layer, method), fits in each.fits.items():
            lines += ([layer, method, *line] for line in _test_lines(each.task, fits))
    return csv_bytes(lines)


def _test_lines(task: ValueTask, fits: Sequence[FittedValues]) -> Iterator[list[Any]]:
    """Yield the columns of each test row of one layer and method, beginning with the seed."""
    groups, keys, targets = task.rows.groups, task.keys, task.targets
    has_folds = len(task.rows.splits) > 1
    for fold, (split, fit) in enumerate(zip(task.rows.splits, fits, strict=True), 1):
        for place, predicted in zip(split.test.tolist(), fit.predicted.tolist(), strict=True):
            group = "" if groups is None else int(groups[place])
            line = [task.seed, fold if has_folds else "", "test", keys[place], group]
            yield [*line, *targets[place].tolist(), *predicted]
