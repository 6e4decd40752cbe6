"""Printed text of the probes of all tasks: metrics, intervals, splits, notes and files."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from featx.analysis.probe import METRICS, Metric
from featx.base import WIDTH, command_text, percent_text, shown_path
from featx.errors import counted
from featx.storage import parse_path
from featx.store import layout

_FOLD = re.compile(r"^fold \d+ of \d+: ")

_LAYERS_NAMED = 8
"""Number of layers that a line names."""

_BESIDE_ACCURACY = METRICS["classification"][1:]

T_TEST = (
    "p: corrected resampled t-test (Nadeau and Bengio, 2003), corrected for the number of layers "
    "(Holm); told apart: p < 0.05."
)
"""Note below a table of differences over the splits of several seeds."""


def filled(lines: Sequence[str]) -> str:
    """Break lines to the width of the output."""
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def number_text(value: float | None) -> str:
    """Format a metric that is not printed in percent; '-' if it is not available."""
    return "-" if value is None else f"{value:.3f}"


def metric_text(metric: Metric, value: float | None) -> str:
    """Format a metric; '-' if it is not available."""
    return percent_text(value) if value is not None and metric.is_share else number_text(value)


def spread_text(spread: dict[str, Any] | None, is_share: bool = False) -> str:
    """Format mean and standard deviation, of a share in percent without the sign; '-' for None."""
    if spread is None:
        return "-"
    factor, digits = (100, 1) if is_share else (1, 3)
    std = "" if spread["std"] is None else f" ± {factor * spread['std']:.{digits}f}"
    return f"{factor * spread['mean']:.{digits}f}{std}"


def setting_text(value: float | Sequence[float]) -> str:
    """Format the chosen penalty or number of neighbours, or the different ones of all folds."""
    values = value if isinstance(value, list) else [value]
    return ",".join(f"{each:g}" for each in dict.fromkeys(values))


def setting_name(method: str) -> str:
    """Return what is chosen for a method: its number of neighbours, or its penalty."""
    return "k" if method == "knn" else "l2"


def yes_or_no(value: bool | None) -> str:
    """Return a truth value for people; '-' if it is unknown."""
    return "-" if value is None else "yes" if value else "no"


def p_text(p: float | None) -> str:
    """Format a p-value; '-' if there is none."""
    return "-" if p is None else f"{p:.2g}"


def metrics_text(result: dict[str, Any]) -> str:
    """Return the metrics of the best layer, and why others are not available."""
    texts = [
        f"{metric.title} {metric_text(metric, result[metric.key])}"
        + (f" ({result['calibration_bins']} bins)" if metric.key == "calibration_error" else "")
        for metric in _BESIDE_ACCURACY
        if result[metric.key] is not None
    ]
    return "\n".join([*_in_lines(texts, 4), *not_available(result)])


def intervals_text(bootstrap: dict[str, Any]) -> str:
    """Return the bootstrap intervals of all metrics."""
    texts = []
    for metric in METRICS["classification"]:
        if (interval := bootstrap["intervals"][metric.key]) is None:
            continue
        low, high = interval
        text = f"{interval_text(interval)} %" if metric.is_share else f"{low:.3f} - {high:.3f}"
        texts.append(f"{metric.title} {text}")
    undefined = [
        f"{count} resamples without {name} are left out of its interval"
        for name, count in bootstrap["undefined"].items()
    ]
    units = counted(bootstrap["units"], bootstrap["unit"])
    about = f"95 %, {bootstrap['resamples']} resamples of {units}"
    return "\n".join([*_in_lines(texts, 3), about, *undefined])


def seeds_metrics_text(result: dict[str, Any]) -> str:
    """Return mean and standard deviation over the splits of the metrics of the chosen layers."""
    chosen = result["seeds"]["chosen"]
    texts = [
        f"{metric.title} {spread_text(chosen[metric.key], metric.is_share)}"
        + (" %" if metric.is_share else "")
        for metric in _BESIDE_ACCURACY
        if chosen[metric.key] is not None
    ]
    return "\n".join(_in_lines(texts, 3))


def _in_lines(texts: Sequence[str], count: int) -> list[str]:
    """Join texts by commas, `count` of them in a line."""
    return [", ".join(texts[i : i + count]) for i in range(0, len(texts), count)]


def not_available(about: dict[str, Any]) -> list[str]:
    """Return one line per reason for which metrics of classes are not available."""
    names: dict[str, list[str]] = {}
    for metric in _BESIDE_ACCURACY:
        if (reason := about["not_available"].get(metric.key)) is not None:
            names.setdefault(reason, []).append(metric.title)
    return [f"not available: {', '.join(titles)}; {reason}" for reason, titles in names.items()]


def points_text(share: float, sign: str = "") -> str:
    """Format a difference of shares in percentage points, without a sign of zero."""
    rounded = round(100 * share, 1) or 0.0  # not -0.0
    return f"{rounded:{sign if rounded else ''}.1f}"


def interval_text(interval: Sequence[float]) -> str:
    """Return an interval of shares in percent, without the sign: '85.6 - 96.4'."""
    low, high = (f"{100 * edge:.1f}" for edge in interval)
    return f"{low} - {high}"


def indistinguishable_text(best: str, tests: dict[str, Any], where: str) -> list[str]:
    """Return which layers cannot be told apart from the best one, and for which it is unknown."""
    unknown = {layer: test for layer, test in tests.items() if test["told_apart"] is None}
    indistinguishable = [layer for layer, test in tests.items() if test["told_apart"] is False]
    lines = []
    if indistinguishable:
        names = _layers_text(indistinguishable)
        lines.append(f"Cannot be told apart from {best} on {where}: {names}.")
    elif tests and not unknown:
        subject = "The other layer" if len(tests) == 1 else f"All {len(tests)} other layers"
        lines.append(f"{subject} can be told apart from {best} on {where} (p < 0.05, Holm).")
    if unknown:
        [reason] = {test["not_tested"] for test in unknown.values()}
        lines.append(f"Not tested against {best}: {_layers_text(list(unknown))}; {reason}.")
    return lines


def _layers_text(layers: list[str]) -> str:
    """Return the names of layers, of many the first ones only."""
    more = f" and {len(layers) - _LAYERS_NAMED} more" if layers[_LAYERS_NAMED:] else ""
    return ", ".join(layers[:_LAYERS_NAMED]) + more


def choice_text(seeds: dict[str, Any]) -> str:
    """Return which layers were tested over the splits of all seeds; '' if there is one only."""
    layers = seeds["layer_of_splits"]
    if len(seeds["layers"]) == 1:
        return ""
    where = "fold" if len(layers) > len(seeds["seeds"]) else "split"
    return f", with the layer that each {where} chose on validation rows ({counts_text(layers)})"


def counts_text(layers: list[str]) -> str:
    """Return how many folds or splits chose each layer, the most frequent first."""
    counts = Counter(layers).most_common()
    return ", ".join(
        f"{layer} in {count}{'' if place else f' of {len(layers)}'}"
        for place, (layer, count) in enumerate(counts)
    )


def split_text(split: dict[str, Any]) -> str:
    """Describe the kind of split and its sizes."""
    kind = split["kind"]
    sizes = (
        f"{split['fit'][0]} fitted, {split['validation_rows'][0]} for validation, "
        f"{split['test_rows'][0]} tested"
    )
    if kind == "kfold":
        return f"{split['folds']} folds, each about {sizes}; seed {split['seed']}"
    return f"{kind}, {sizes}; seed {split['seed']}"


def groups_text(groups: dict[str, Any]) -> str:
    """Describe which rows were kept together."""
    return (
        f"rows of one {groups['by']} stay on one side: "
        f"{counted(groups['groups'], 'group')}, the largest of {counted(groups['largest'], 'row')}"
    )


def folds_text(result: dict[str, Any]) -> str:
    """Return which layers the folds chose; '' with a single split or layer."""
    chosen = result.get("layer_of_folds")
    return f" Each fold chose its layer within training ({counts_text(chosen)})." if chosen else ""


def bootstrap_text(result: dict[str, Any]) -> str:
    """Return the interval of the metric of the answer."""
    if result["interval"] is None:
        return "no interval"
    low, high = result["interval"]
    return f"95 % interval {low:.3f} to {high:.3f}"


def resamples_text(result: dict[str, Any]) -> str | None:
    """Describe how the interval of the metric of the answer was found; None without one."""
    if result["interval"] is None:
        return None
    return f"{result['resamples']} bootstrap resamples of {result['units']} {result['unit']}s"


def split_facts(result: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return (name, text) of the splits and groups."""
    split, groups = result["split"], result["split"]["groups"]
    return [("split", split_text(split)), ("groups", groups_text(groups) if groups else None)]


def notes_of_layers(result: dict[str, Any], methods: Sequence[str]) -> list[str]:
    """Return all notes: those on rows, and those of layers, a line for equal ones."""
    places: dict[str, dict[str, int]] = {}
    for layer, about in result["layers"].items():
        for method in methods:
            for note in about[method]["notes"]:
                of_note = places.setdefault(_FOLD.sub("", note), {})
                name = f"{layer}, {method}"
                of_note[name] = of_note.get(name, 0) + int(bool(_FOLD.match(note)))
    of_layers = [
        "; ".join(
            f"{name} ({counted(folds, 'fold')})" if folds else name
            for name, folds in of_note.items()
        )
        + f": {note}"
        for note, of_note in places.items()
    ]
    return [*result["notes_on_rows"], *of_layers]


def last_facts(result: dict[str, Any], notes: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return (name, text) of the notes and the files, and the commands that follow."""
    store = parse_path(result["store"])
    folder = store if store.is_dir() else store.parent
    files = [layout.PROBE, result["predictions"]["file"]]
    commands = [command_text("job=report", f"store={shown_path(store)}")]
    if result["head"]:
        files.append(result["head"]["file"])
        commands.append(command_text("job=predict", f"store={shown_path(store)}", "data=./new"))
    return [
        ("notes", "\n".join(notes) or None),
        ("wrote", "\n".join([*files, f"in {shown_path(folder)}"])),
        ("next", "\n".join(commands)),
    ]
