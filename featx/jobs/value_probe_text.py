"""Printed result of job=probe for numbers and for several labels of a row."""

from __future__ import annotations

from typing import Any

from featx.analysis.probe import METRICS
from featx.config import Config
from featx.errors import counted
from featx.jobs.base import Section, Table
from featx.jobs.probe_metrics import (
    T_TEST,
    bootstrap_text,
    choice_text,
    filled,
    folds_text,
    indistinguishable_text,
    last_facts,
    notes_of_layers,
    number_text,
    p_text,
    resamples_text,
    setting_name,
    setting_text,
    split_facts,
    spread_text,
    yes_or_no,
)


def values_sections(config: Config, result: dict[str, Any]) -> list[Section]:
    """Describe the result: the answer, the table, and what it rests on."""
    sections: list[Section] = [
        _answer(result),
        _layers_table(config, result),
        _facts(config, result),
    ]
    if result["seeds"]:
        return [_seeds_answer(result), _seeds_table(config, result), *sections]
    return sections


def _answer(result: dict[str, Any]) -> str:
    """Return the best layer with its metrics, and the interval of the first one."""
    texts = [
        f"{metric.title} {number_text(result[metric.key])}" for metric in METRICS[result["task"]]
    ]
    seed_text = f" of seed {result['split']['seed']}" if result["seeds"] else ""
    answer = (
        f"Chosen layer{seed_text}: {result['layer']} ({result['method']}, by the validation "
        f"rows). {texts[0]}, {bootstrap_text(result)}; {', '.join(texts[1:])}; "
        f"{result['rows']} test rows.{folds_text(result)}"
    )
    return filled([answer])


def _seeds_answer(result: dict[str, Any]) -> str:
    """Return the metrics over the splits of all seeds."""
    about, metrics = result["seeds"], METRICS[result["task"]]
    texts = [f"{metric.title} {spread_text(about['chosen'][metric.key])}" for metric in metrics]
    span = about["chosen"][metrics[0].key]
    between = "" if span is None else f" (from {span['min']:.3f} to {span['max']:.3f})"
    answer = (
        f"Over {len(about['seeds'])} splits {texts[0]}{between}, {', '.join(texts[1:])}"
        f"{choice_text(about)}."
    )
    sentences = indistinguishable_text(
        about["layer"], about["differences"] or {}, f"the {len(about['seeds'])} splits"
    )
    return filled([answer, *sentences])


def _seeds_table(config: Config, result: dict[str, Any]) -> Table:
    """Make a table of the metrics over all splits, with one row per layer and method."""
    metrics, about = METRICS[result["task"]], result["seeds"]
    differences = about["differences"] or {}
    rows = []
    for layer, entries in about["layers"].items():
        for method in config.probe.methods:
            cells = [layer, method, *(spread_text(entries[method][each.key]) for each in metrics)]
            if differences and method != config.probe.methods[0]:
                cells += ["", "", ""]
            elif difference := differences.get(layer):
                cells += [
                    f"{-difference['mean']:+.3f} ± {difference['std']:.3f}",
                    p_text(difference["p_holm"]),
                    yes_or_no(difference["told_apart"]),
                ]
            elif differences:
                cells += ["chosen", "", ""]
            rows.append(cells)
    header = ["layer", "method", *(metric.title for metric in metrics)]
    note = "Mean ± standard deviation over the splits."
    if differences:
        header += [f"{metrics[0].title} against\nchosen", "p", "told\napart"]
        note += f" {T_TEST}"
    return Table(header, rows, left=2, notes=[note])


def _layers_table(config: Config, result: dict[str, Any]) -> Table:
    """Make a table with one row per layer and method, in the order of the store."""
    metrics = METRICS[result["task"]]
    rows, reasons = [], []
    for layer, about in result["layers"].items():
        for method in config.probe.methods:
            entry, name = about[method], setting_name(method)
            cells = (layer, method, str(about["features"]), f"{name}={setting_text(entry[name])}")
            rows.append((*cells, *(number_text(entry[metric.key]) for metric in metrics)))
            reasons += [
                f"{layer}, {method}: {metric.title} not available; {reason}"
                for metric in metrics
                if (reason := entry["not_available"].get(metric.key)) is not None
            ]
    header = ("layer", "method", "width", "chosen", *(metric.title for metric in metrics))
    header_in_lines = [name.replace("absolute ", "absolute\n") for name in header]
    return Table(header_in_lines, rows, left=2, notes=reasons)


def _facts(config: Config, result: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return (name, text) of what the metrics rest on, of the files, and of what follows."""
    targets = result["targets"]
    count = f"{result['rows_labelled']} with a value of {result['split']['label_column']}"
    if result["task"] == "multilabel":
        names = ", ".join(targets[:8]) + (f" and {len(targets) - 8} more" if targets[8:] else "")
        count += f", {counted(len(targets), 'label')}: {names}"
    return [
        ("task", f"{result['task']}: {result['task_reason']}"),
        ("rows", count),
        *split_facts(result),
        ("interval", resamples_text(result)),
        *last_facts(result, notes_of_layers(result, config.probe.methods)),
    ]
