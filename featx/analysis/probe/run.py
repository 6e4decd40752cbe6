"""Probe of a store from its config to its files: layers, seeds, methods and splits."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from featx.analysis.probe.class_task import MAX_SCORES, ClassTask
from featx.analysis.probe.labelled_rows import task_kind
from featx.analysis.probe.layer_rows import threads_for
from featx.analysis.probe.metrics import require_scikit_learn
from featx.analysis.probe.output_files import STORE_ATTRIBUTES, write_probe
from featx.analysis.probe.pixel_task import PixelTask
from featx.analysis.probe.records import Record
from featx.analysis.probe.task import AnyTask
from featx.analysis.probe.texts import score_text
from featx.analysis.probe.value_task import ValueTask
from featx.base import WIDTH, choose_device, exact_cuda, keep_freed_memory
from featx.config import Config, ProbeConfig
from featx.errors import RunError, counted
from featx.storage import open_folder
from featx.store import FeatureStore, matching_layers

FORMAT = 1
"""Version of the format of probe.json."""


def run_probe(
    config: Config, log: Callable[[str], None], max_scores: int = MAX_SCORES
) -> dict[str, object]:
    """Fit and test all probes of a checked config, and write probe.json, the predictions and the
    heads. Return the contents of probe.json (docs/probe.md).

    Args:
        log: called with a line of text after each layer.
        max_scores: number of scores up to which predictions.csv has a column per class.

    Raises:
        MissingExtraError: scikit-learn is not installed.
        FeatxError: the store or the split does not allow a probe, or a training failed.
    """
    require_scikit_learn()
    started_at = time.perf_counter()
    store = FeatureStore(config.store_path(), verify="rows")
    rows_sha256 = store.rows_sha256  # before the rows, so that a later change is refused
    kind, device = task_kind(store, config.probe), choose_device(config.device)
    layers, folder = matching_layers(store, config.layers), store.folder
    open_folder(folder).make_folder(folder)  # first, so that an unusable path fails early
    task: AnyTask
    if kind.name == "segmentation":
        task = PixelTask(config, store, kind, layers, log)
    elif kind.name == "classification":
        task = ClassTask(config, store, kind, layers, max_scores)
    else:
        task = ValueTask(config, store, kind, layers)
    if device.type == "cpu":
        keep_freed_memory()
    for layer in layers:
        try:
            with torch.no_grad(), exact_cuda:
                _probe_layer(task, layer, device)
        except torch.cuda.OutOfMemoryError as error:
            raise RunError(
                f"{layer} does not fit into the memory of {device}. {task.memory_remedy}"
            ) from error
        log(_line(task, layer))
    if unused := _unused_options(config.probe, task.layers):
        log(
            f"{', '.join(unused)}: without effect; probe.method=attentive and layers larger than "
            "probe.memory_gib are trained in steps."
        )
    answer = task.answer(task.seeds[0])
    tested: list[Any] = [record.tested for record in task.chosen(task.seeds[0])]
    result = {
        "featx_probe": FORMAT,
        "store": str(store.root),
        **{name: str(store.attrs[name]) for name in STORE_ATTRIBUTES},
        "rows_sha256": rows_sha256,
        "task": kind.name,
        "task_reason": kind.reason,
        **answer,
        **task.result_entries(answer["layer"], tested),
        "rows_labelled": len(task.training.rows),
        "split": task.first_splits.as_dict(config.probe, task.keys.tolist()),
        "chosen_by": task.chosen_by,
        "seeds": task.seeds_entry() if len(task.seeds) > 1 else None,
        "device": config.device,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
        "seconds_in_all": round(time.perf_counter() - started_at, 3),
        "layers": task.layers,
    }
    write_probe(task, result)
    return result


def _probe_layer(task: AnyTask, layer: str, device: torch.device) -> None:
    opened = task.open_layer(layer, device)
    with threads_for(task.num_values(opened), device):
        task.layers[layer] = task.describe_layer(layer, opened)
        for seed, rows in task.splits.items():
            for method in task.methods:
                started_at = time.perf_counter()
                fits, records = [], []
                for fold, split in enumerate(rows.splits):
                    fitted = task.fit(opened, seed, method, split)
                    tested = task.test(opened, seed, split, method, fitted)
                    records.append(Record(seed, layer, method, fold, split, fitted.choice, tested))
                    fits.append(fitted)
                entry = task.entry(records)
                if seed == task.seeds[0]:
                    task.finish_method(opened, layer, method, fits, entry)
                    task.layers[layer][method] = entry
                entry["seconds"] = round(time.perf_counter() - started_at, 3)
                task.folds[seed, layer, method], task.entries[seed, layer, method] = records, entry
    task.finish_layer()


def _unused_options(options: ProbeConfig, layers: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return the given options of training in steps, if nothing was trained so."""
    if "attentive" in options.methods or any(about.get("streamed") for about in layers.values()):
        return []
    names, usual = ("epochs", "learning_rate"), ProbeConfig()
    return [f"probe.{name}" for name in names if getattr(options, name) != getattr(usual, name)]


def _line(task: AnyTask, layer: str) -> str:
    about, metric, texts = task.layers[layer], task.metrics[0], []
    for method in task.methods:
        values = [task.entries[seed, layer, method][metric.key] for seed in task.seeds]
        mean = None if None in values else sum(values) / len(values)
        name = "" if metric.is_share else f"{metric.title} "
        texts.append(f"{method} {name}{score_text(mean, metric.is_share)}")
    patches = " of {} x {} patches".format(*about["grid"]) if "grid" in about else ""
    is_pooled = about.get("reduction", {}).get("then") == "avg"
    pooled = " (averaged over positions)" if is_pooled else ""
    streamed = ", streamed" if about.get("streamed") else ""
    features = counted(about["features"], "feature")
    text = f"{layer}: {features}{patches}{pooled}{streamed}; {', '.join(texts)}"
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")
