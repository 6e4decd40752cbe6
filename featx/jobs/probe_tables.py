"""Printed tables of job=probe for classes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from featx.analysis.probe import METRICS
from featx.base import WIDTH, percent_text, table
from featx.config import Config
from featx.jobs.probe_metrics import (
    interval_text,
    metric_text,
    not_available,
    points_text,
)


def layers_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table with one row per layer, in the order of the store."""
    methods, tests = config.probe.methods, result["paired_tests"]
    rows = []
    for layer, about in result["layers"].items():
        cells = [layer, str(about["features"])]
        cells += [percent_text(about[method]["accuracy"]) for method in methods]
        cells.insert(3, interval_text(about[methods[0]]["interval"]))
        if layer in tests:
            cells += [
                points_text(-tests[layer]["difference"], "+"),
                _negated_interval_text(tests[layer]["interval"]),
                f"{tests[layer]['p_holm']:.2g}",
                yes_or_no(tests[layer]["told_apart"]),
            ]
        elif tests:
            cells += ["chosen", "", "", ""]
        rows.append(cells)
    header = ["layer", "width", methods[0], "95 % interval", *methods[1:]]
    columns_against = (
        ["against\nchosen", "95 % interval\nof difference", "p", "told\napart"] if tests else []
    )
    text = table([*header, *columns_against], rows)
    if tests:
        text += (
            "\nThe first interval holds for a layer that was chosen beforehand, not for the best "
            "one; p: exact\nMcNemar test, corrected for the number of layers (Holm); told apart: "
            "p < 0.05, and the interval\nwith the same correction excludes 0."
        )
    return text


def seeds_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table of the accuracies over all splits, with one row per layer."""
    about, methods, best = result["seeds"], config.probe.methods, result["seeds"]["layer"]
    count = len(about["seeds"])
    rows = []
    for layer, entries in about["layers"].items():
        first = entries[methods[0]]["accuracy"]
        cells = [layer, _percent_spread_text(first), interval_text((first["min"], first["max"]))]
        cells += [_percent_spread_text(entries[method]["accuracy"]) for method in methods[1:]]
        if difference := about["differences"].get(layer):
            better = sum(value < 0 for value in difference["values"])
            p = difference["p_holm"]
            cells += [
                f"{points_text(-difference['mean'], '+')} ± {100 * difference['std']:.1f}",
                f"{better} of {count}",
                "-" if p is None else f"{p:.2g}",
                yes_or_no(difference["told_apart"]),
            ]
        elif about["differences"]:
            cells += ["chosen", "", "", ""]
        rows.append(cells)
    header = ["layer", methods[0], "smallest - largest", *methods[1:]]
    if about["differences"]:
        header += [
            f"against\n{best if len(best) < 12 else 'chosen'}, points",
            "better in",
            "p",
            "told\napart",
        ]
    text = table(header, rows) + "\nMean ± standard deviation over the splits, in percent."
    if about["differences"]:
        text += (
            " p: corrected resampled t-test (Nadeau and\nBengio, 2003), corrected for the number "
            "of layers (Holm); told apart: p < 0.05."
        )
    return text


def _negated_interval_text(interval: Sequence[float] | None) -> str:
    """Format an interval of the best layer minus another one, seen from the other; '-' for None."""
    if interval is None:
        return "-"
    low, high = interval
    return f"{points_text(-high, '+')} to {points_text(-low, '+')}"


def yes_or_no(value: bool | None) -> str:
    """Return a truth value for people; '-' if it is unknown."""
    return "-" if value is None else "yes" if value else "no"


def _percent_spread_text(spread: dict[str, Any]) -> str:
    """Format mean and standard deviation of a share, in percent without the sign."""
    return f"{100 * spread['mean']:.1f} ± {100 * spread['std']:.1f}"


def details_table(config: Config, result: dict[str, Any]) -> str:
    """Format two tables with the settings and all metrics of each layer and method."""
    settings, metrics, reasons = [], [], []
    beside_accuracy = METRICS["classification"][1:]
    for layer, about in result["layers"].items():
        for method in config.probe.methods:
            entry = about[method]
            name = "k" if method == "knn" else "l2"
            cells = (
                f"{name}={entry[name]:g}",
                percent_text(entry["validation_accuracy"]),
                percent_text(entry["accuracy"]),
                interval_text(entry["interval"]),
                f"{entry['seconds']:.1f}",
            )
            settings.append((layer, method, *cells))
            values = [metric_text(metric, entry[metric.key]) for metric in beside_accuracy]
            metrics.append((layer, method, *values))
            reasons += [f"{layer}, {method}, {line}" for line in not_available(entry)]
    header = ("layer", "method", "chosen", "validation", "test", "95 % interval", "seconds")
    names = [metric.title.replace(" ", "\n") for metric in beside_accuracy]
    tables = [
        table(header, settings, left=2),
        table(("layer", "method", *names), metrics, left=2),
        *(textwrap.fill(line, WIDTH) for line in reasons),
    ]
    return "\n\n".join(tables[:2]) + "".join(f"\n{line}" for line in tables[2:])


def few_shot_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table of the accuracies with few training rows per class."""
    rows = []
    for layer, about in result["layers"].items():
        for method in config.probe.methods:
            entries = about[method]["few_shot"].values()
            cells = [_mean_text(each) for each in entries]
            rows.append((layer, method, *cells))
    header = ("layer", "method", *(f"{shots} a class" for shots in config.probe.all_shots))
    text = "Few-shot, mean ± standard deviation over the draws:\n" + table(header, rows, left=2)
    # All layers and methods have the same draws.
    entries = next(iter(result["layers"].values()))[config.probe.methods[0]]["few_shot"]
    lines = [_shortage_text(shots, entries[str(shots)]) for shots in config.probe.all_shots]
    return "\n".join([text, *(textwrap.fill(line, WIDTH) for line in lines if line)])


def _shortage_text(shots: int, entry: dict[str, Any]) -> str:
    """Return a note if classes have fewer training rows than the draws ask for, or ''."""
    fewest, most = entry["rows_per_class"]
    if most < shots:
        found = str(most) if fewest == most else f"{fewest} to {most}"
        return (
            f"{shots} a class: no class has so many training rows; all of them are taken, {found} "
            "a class."
        )
    if fewest < shots:
        return f"{shots} a class: some classes have fewer training rows, {fewest} at least."
    return ""


def _mean_text(accuracy: dict[str, Any]) -> str:
    """Format a mean, with the standard deviation if there is more than one draw."""
    spread = "" if accuracy["std"] is None else f" ± {100 * accuracy['std']:.1f}"
    return f"{100 * accuracy['mean']:.1f}{spread} %"
