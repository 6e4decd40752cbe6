"""Printed result of job=probe for numbers and for several labels of a row."""

from __future__ import annotations

import textwrap
from typing import Any

from featx.analysis.probe import METRICS
from featx.base import WIDTH, facts, table
from featx.config import Config
from featx.errors import counted
from featx.jobs.probe_metrics import (
    bootstrap_text,
    choice_text,
    folds_text,
    indistinguishable_text,
    last_rows,
    notes_of_layers,
    number_text,
    resamples_rows,
    split_rows,
)
from featx.jobs.probe_tables import yes_or_no


def values_text(config: Config, result: dict[str, Any]) -> str:
    """Format the result for people: the answer, the table, and what it rests on."""
    metrics = METRICS[result["task"]]
    reasons = [
        f"{layer}, {method}: {metric.title} not available; "
        f"{about[method]['not_available'][metric.key]}"
        for layer, about in result["layers"].items()
        for method in config.probe.methods
        for metric in metrics
        if metric.key in about[method]["not_available"]
    ]
    lines = [_layers_table(config, result), *(textwrap.fill(line, WIDTH) for line in reasons)]
    parts = [_answer(result), "\n".join(lines), facts(_facts(config, result))]
    if result["seeds"]:
        parts = [_seeds_answer(result), _seeds_table(config, result), *parts]
    return "\n\n".join(parts)


def _answer(result: dict[str, Any]) -> str:
    """Return the best layer with its metrics, and the interval of the first one."""
    texts = [
        f"{metric.title} {number_text(result[metric.key])}" for metric in METRICS[result["task"]]
    ]
    seed_text = f" of seed {result['split']['seed']}" if result["seeds"] else ""
    return textwrap.fill(
        f"Chosen layer{seed_text}: {result['layer']} ({result['method']}, by the validation "
        "rows). "
        f"{texts[0]}, {bootstrap_text(result)}; {', '.join(texts[1:])}; "
        f"{result['rows']} test rows.{folds_text(result)}",
        WIDTH,
    )


def _seeds_answer(result: dict[str, Any]) -> str:
    """Return the metrics over the splits of all seeds."""
    about, metrics = result["seeds"], METRICS[result["task"]]
    texts = [f"{metric.title} {_spread_text(about['chosen'][metric.key])}" for metric in metrics]
    span = about["chosen"][metrics[0].key]
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
    metrics, about = METRICS[result["task"]], result["seeds"]
    rows = []
    for layer, entries in about["layers"].items():
        for method in config.probe.methods:
            spreads = [_spread_text(entries[method][metric.key]) for metric in metrics]
            cells = [layer, method, *spreads]
            difference = (about["differences"] or {}).get(layer)
            if about["differences"] and method == config.probe.methods[0]:
                cells += ["chosen", "", ""] if difference is None else _difference_cells(difference)
            elif about["differences"]:
                cells += ["", "", ""]
            rows.append(cells)
    header = ["layer", "method", *(metric.title for metric in metrics)]
    if about["differences"]:
        header += [f"{metrics[0].title} against\nchosen", "p", "told\napart"]
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
    metrics = METRICS[result["task"]]
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
                    *(number_text(entry[metric.key]) for metric in metrics),
                )
            )
    header = ("layer", "method", "width", "chosen", *(metric.title for metric in metrics))
    return table([name.replace("absolute ", "absolute\n") for name in header], rows, left=2)


def _facts(config: Config, result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of what the metrics rest on, of the files, and of what follows."""
    targets = result["targets"]
    count = f"{result['rows_labelled']} with a value of {result['split']['label_column']}"
    if result["task"] == "multilabel":
        names = ", ".join(targets[:8]) + (f" and {len(targets) - 8} more" if targets[8:] else "")
        count += f", {counted(len(targets), 'label')}: {names}"
    notes = notes_of_layers(result, config.probe.methods)
    return [
        ("task", f"{result['task']}: {result['task_reason']}"),
        ("rows", count),
        *split_rows(result),
        *resamples_rows(result),
        *([("notes", "\n".join(notes))] if notes else []),
        *last_rows(result),
    ]
