"""Printed result of job=probe for numbers and for several labels of a row."""

from __future__ import annotations

import textwrap
from typing import Any

from featx.base import WIDTH, command_text, facts, shown_path, table
from featx.config import Config
from featx.errors import counted
from featx.jobs.probe_metrics import number_text
from featx.jobs.probe_tables import yes_or_no
from featx.jobs.probe_text import (
    choice_text,
    counts_text,
    groups_text,
    indistinguishable_text,
    split_text,
)
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
    lines = [_layers_table(config, result), *(textwrap.fill(line, WIDTH) for line in reasons)]
    parts = [_answer(result), "\n".join(lines), facts(_facts(config, result))]
    if result["seeds"]:
        parts = [_seeds_answer(result), _seeds_table(config, result), *parts]
    return "\n\n".join(parts)


def _answer(result: dict[str, Any]) -> str:
    """Return the best layer with its metrics, and the interval of the first one."""
    (first, name), *other_metrics = _METRICS[result["task"]]
    interval = "no interval"
    if result["interval"] is not None:
        low, high = result["interval"]
        interval = f"95 % interval {low:.3f} to {high:.3f}"
    more = ", ".join(f"{label} {number_text(result[key])}" for label, key in other_metrics)
    folds = ""
    if chosen := result.get("layer_of_folds"):
        folds = f" Each fold chose its layer within training ({counts_text(chosen)})."
    seed_text = f" of seed {result['split']['seed']}" if result["seeds"] else ""
    return textwrap.fill(
        f"Best layer{seed_text}: {result['layer']} ({result['method']}, chosen on validation "
        "rows). "
        f"{first} {number_text(result[name])}, {interval}; {more}; "
        f"{result['rows']} test rows.{folds}",
        WIDTH,
    )


def _seeds_answer(result: dict[str, Any]) -> str:
    """Return the metrics over the splits of all seeds."""
    about, (_, name) = result["seeds"], _METRICS[result["task"]][0]
    texts = [
        f"{label} {_spread_text(about['chosen'][key])}" for label, key in _METRICS[result["task"]]
    ]
    span = about["chosen"][name]
    between = "" if span is None else f" (from {span['min']:.3f} to {span['max']:.3f})"
    answer = (
        f"Over {len(about['seeds'])} splits {texts[0]}{between}, {', '.join(texts[1:])}"
        f"{choice_text(about)}."
    )
    sentences = indistinguishable_text(
        about["layer"], about["differences"] or {}, f"the {len(about['seeds'])} splits"
    )
    return "\n".join(textwrap.fill(line, WIDTH) for line in [answer, *sentences])


def _seeds_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table of the metrics over all splits, with one row per layer and method."""
    metrics, about = _METRICS[result["task"]], result["seeds"]
    rows = []
    for layer, entries in about["layers"].items():
        for method in config.probe.methods:
            cells = [layer, method, *(_spread_text(entries[method][key]) for _, key in metrics)]
            difference = (about["differences"] or {}).get(layer)
            if about["differences"] and method == config.probe.methods[0]:
                cells += ["best", "", ""] if difference is None else _difference_cells(difference)
            elif about["differences"]:
                cells += ["", "", ""]
            rows.append(cells)
    header = ["layer", "method", *(label for label, _ in metrics)]
    if about["differences"]:
        header += [f"{metrics[0][0]} against\nbest", "p", "told\napart"]
    text = table(header, rows, left=2) + "\nMean ± standard deviation over the splits."
    if about["differences"]:
        text += (
            " p: corrected resampled t-test (Nadeau and Bengio,\n2003), corrected for the number "
            "of layers (Holm); told apart: p < 0.05."
        )
    return text


def _difference_cells(difference: dict[str, Any]) -> list[str]:
    """Return the difference of a layer to the best one, its p, and whether they are told apart."""
    p = "-" if difference["p_holm"] is None else f"{difference['p_holm']:.2g}"
    return [
        f"{-difference['mean']:+.3f} ± {difference['std']:.3f}",
        p,
        yes_or_no(difference["told_apart"]),
    ]


def _spread_text(spread: dict[str, Any] | None) -> str:
    """Format mean and standard deviation; '-' if a metric is not available for every seed."""
    return "-" if spread is None else f"{spread['mean']:.3f} ± {spread['std']:.3f}"


def _layers_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table with one row per layer and method, in the order of the store."""
    metrics = _METRICS[result["task"]]
    rows = []
    for layer, about in result["layers"].items():
        for method in config.probe.methods:
            entry = about[method]
            name = "k" if method == "knn" else "l2"
            chosen = entry[name] if isinstance(entry[name], list) else [entry[name]]
            rows.append(
                (
                    layer,
                    method,
                    str(about["features"]),
                    f"{name}={','.join(f'{value:g}' for value in dict.fromkeys(chosen))}",
                    *(number_text(entry[key]) for _, key in metrics),
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
    files = [layout.PROBE, result["predictions"]["file"]]
    following = [command_text("job=report", f"store={shown_path(store)}")]
    if result["head"]:
        files.append(result["head"]["file"])
        following.append(command_text("job=predict", f"store={shown_path(store)}", "data=./new"))
    folder = store if store.is_dir() else store.parent
    rows.append(("wrote", "\n".join([*files, f"in {shown_path(folder)}"])))
    return [*rows, ("next", "\n".join(following))]
