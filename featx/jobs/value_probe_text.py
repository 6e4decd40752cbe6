"""Printed result of job=probe for numbers and for several labels of a row."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

from featx.base import WIDTH, command_text, facts, shown_path, table
from featx.config import Config
from featx.errors import counted
from featx.jobs.probe_text import groups_text, split_text
from featx.storage import parse_path
from featx.store import layout

_METRICS = {
    "regression": (("R2", "r2"), ("mean absolute error", "mae"), ("Spearman", "spearman")),
    "multilabel": (("mAP", "map"), ("macro-F1", "macro_f1")),
}
"""Task -> (name for people, name in probe.json) of its metrics, the one of the answer first."""


def values_text(config: Config, result: dict[str, Any]) -> str:
    """Format the result for people: the answer, the table, and what it rests on."""
    metrics = _METRICS[result["task"]]
    reasons = [
        f"{layer}, {method}: {label} not available; {about[method]['not_available'][name]}"
        for layer, about in result["layers"].items()
        for method in config.probe.methods
        for label, name in metrics
        if name in about[method]["not_available"]
    ]
    shown = [_layers_table(config, result), *(textwrap.fill(line, WIDTH) for line in reasons)]
    return "\n\n".join([_answer(result), "\n".join(shown), facts(_facts(config, result))])


def _number(value: float | None) -> str:
    """Format a metric; '-' if it is not available."""
    return "-" if value is None else f"{value:.3f}"


def _answer(result: dict[str, Any]) -> str:
    """Return the best layer with its metrics, and the interval of the first one."""
    (first, name), *others = _METRICS[result["task"]]
    interval = "no interval"
    if result["interval"] is not None:
        low, high = result["interval"]
        interval = f"95 % interval {low:.3f} to {high:.3f}"
    more = ", ".join(f"{label} {_number(result[key])}" for label, key in others)
    folds = ""
    if chosen := result.get("layer_of_folds"):
        counts = ", ".join(f"{layer} in {count}" for layer, count in Counter(chosen).items())
        folds = f" Each fold chose its layer within training ({counts})."
    return textwrap.fill(
        f"Best layer: {result['layer']} ({result['method']}, chosen on validation rows). {first} "
        f"{_number(result[name])}, {interval}; {more}; {result['rows']} test rows.{folds}",
        WIDTH,
    )


def _layers_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table with one row per layer and method, in the order of the store."""
    metrics = _METRICS[result["task"]]
    rows = []
    for layer, about in result["layers"].items():
        for method in config.probe.methods:
            found = about[method]
            name = "k" if method == "knn" else "l2"
            chosen = found[name] if isinstance(found[name], list) else [found[name]]
            rows.append(
                (
                    layer,
                    method,
                    str(about["features"]),
                    f"{name}={','.join(f'{value:g}' for value in dict.fromkeys(chosen))}",
                    *(_number(found[key]) for _, key in metrics),
                )
            )
    header = ("layer", "method", "width", "chosen", *(label for label, _ in metrics))
    return table([name.replace("absolute ", "absolute\n") for name in header], rows, left=2)


def _facts(config: Config, result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of what the metrics rest on, of the files, and of what follows."""
    store, split = parse_path(result["store"]), result["split"]
    groups, targets = split["groups"], result["targets"]
    rows = [("task", f"{result['task']}: {result['task_reason']}")]
    count = f"{result['rows_labelled']} with a value of {split['label_column']}"
    if result["task"] == "multilabel":
        names = ", ".join(targets[:8]) + (f" and {len(targets) - 8} more" if targets[8:] else "")
        count += f", {counted(len(targets), 'label')}: {names}"
    rows += [("rows", count), ("split", split_text(split))]
    rows += [("groups", groups_text(groups))] if groups else []
    notes = result["notes_on_rows"] + [
        f"{layer}, {method}: {note}"
        for layer, about in result["layers"].items()
        for method in config.probe.methods
        for note in about[method]["notes"]
    ]
    if result["interval"] is not None:
        drawn = f"{result['resamples']} bootstrap resamples of {result['units']} {result['unit']}s"
        rows.append(("interval", drawn))
    rows += [("notes", "\n".join(notes))] if notes else []
    files = "\n".join([layout.PROBE, result["predictions"]["file"]])
    folder = store if store.is_dir() else store.parent
    rows.append(("wrote", f"{files}\nin {shown_path(folder)}"))
    return [*rows, ("next", command_text("job=report", f"store={shown_path(store)}"))]
