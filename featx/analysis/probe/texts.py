"""Numbers and sentences about the content of probe.json, as the terminal and pages show them."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from featx.analysis.probe.metrics import METRICS
from featx.base import WIDTH, number_text, percent_text, shown_path
from featx.errors import counted, first_names
from featx.types import Json

_LAYERS_NAMED = 8
"""Number of layers that a line names."""


def _filled(lines: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def score_text(value: float | None, is_share: bool = False) -> str:
    """Format a metric, a share in percent; '-' if it is not available."""
    if is_share:
        return percent_text(value)
    return "-" if value is None else number_text(value)


def _number(value: float, is_share: bool) -> str:
    return f"{100 * value:.1f}" if is_share else number_text(value)


def spread_text(spread: Json | None, is_share: bool = False) -> str:
    """Format mean and standard deviation, of a share in percent without the sign; '-' for None."""
    if spread is None:
        return "-"
    std = "" if spread["std"] is None else f" ± {_number(spread['std'], is_share)}"
    return f"{_number(spread['mean'], is_share)}{std}"


def interval_text(interval: Sequence[float] | None, is_share: bool = True) -> str:
    """Format an interval, of shares in percent without the sign: '85.6 - 96.4'; '-' for None."""
    if interval is None:
        return "-"
    return " - ".join(_number(edge, is_share) for edge in interval)


def points_text(share: float, sign: str = "") -> str:
    """Format a difference of shares in percentage points, without a sign of zero."""
    rounded = round(100 * share, 1) or 0.0  # not -0.0
    return f"{rounded:{sign if rounded else ''}.1f}"


def counts_text(layers: Sequence[str]) -> str:
    """Return how many folds or splits chose each layer, the most frequent first."""
    counts = Counter(layers).most_common()
    return ", ".join(
        f"{layer} in {count}{'' if place else f' of {len(layers)}'}"
        for place, (layer, count) in enumerate(counts)
    )


def answer_text(result: Json) -> str:
    """Return the best layer with its metrics, and the layers that may be as good."""
    unit = "image" if result["task"] == "segmentation" else "row"
    seed = f" of seed {result['split']['seed']}" if result["seeds"] else ""
    answer = (
        f"Chosen layer{seed}: {result['layer']} ({result['method']}, by the validation {unit}s)."
    )
    chosen, folds = result.get("layer_of_folds"), ""
    if result["task"] == "classification":
        if chosen:
            folds = f", with the layer that each fold chose within training ({counts_text(chosen)})"
        answer += (
            f" {percent_text(result['accuracy'])} of {counted(result['rows'], 'test row')} "
            f"{'is' if result['rows'] == 1 else 'are'} right, 95 % interval "
            f"{interval_text(result['interval'])} %{folds}."
        )
        highest = [] if result["seeds"] else _highest_on_test(result)
        return _filled([answer, *_comparison(result), *highest, *_store_comparison(result)])
    if chosen:
        folds = f" Each fold chose its layer within training ({counts_text(chosen)})."
    first, *others = (
        f"{metric.title} {score_text(result[metric.key])}" for metric in METRICS[result["task"]][:3]
    )
    interval = "no interval"
    if result["interval"] is not None:
        interval = f"95 % interval {interval_text(result['interval'], False)}".replace(
            " - ", " to "
        )
    answer += f" {first}, {interval}; {', '.join(others)}; {result['rows']} test {unit}s."
    if result["task"] == "segmentation":
        height, width = result["masks"]["crop"]
        answer += (
            f" These are of the crop of {height} x {width} pixels that the network saw, not of "
            "whole images."
        )
    return _filled([answer + folds])


def seeds_answer_text(result: Json) -> str:
    """Return the metrics over the splits of all seeds, and the layers that may be as good."""
    about, metrics = result["seeds"], METRICS[result["task"]]
    spreads = about["chosen"]
    splits = f"{len(about['seeds'])} splits"
    if result["task"] == "classification":
        accuracy, highest = spreads["accuracy"], _highest_on_test(result)
        text = (
            f"{percent_text(accuracy['mean'])} of the test rows are right, standard deviation "
            f"{100 * accuracy['std']:.1f} points, smallest {percent_text(accuracy['min'])}, "
            f"largest {percent_text(accuracy['max'])}"
        )
    else:
        texts = [f"{metric.title} {spread_text(spreads[metric.key])}" for metric in metrics]
        if (span := spreads[metrics[0].key]) is not None:
            texts[0] += f" (from {number_text(span['min'])} to {number_text(span['max'])})"
        text, highest = ", ".join(texts), []
    layers = about["layer_of_splits"]
    if len(about["layers"]) > 1:
        where = "fold" if len(layers) > len(about["seeds"]) else "split"
        chosen = counts_text(layers)
        text += f", with the layer that each {where} chose on validation rows ({chosen})"
    tests = about["differences"] or {}
    sentences = _indistinguishable_text(about["layer"], tests, f"the {splits}")
    return _filled([f"Over {splits} {text}.", *sentences, *highest])


def _comparison(result: Json) -> list[str]:
    """Return the difference to the most accurate other layer, and which layers may be as good."""
    tests = result["paired_tests"]
    if not tests:
        return []
    other, test = min(tests.items(), key=lambda pair: pair[1]["difference"])
    return [
        difference_text(result["layer"], other, test, f"p = {test['p_holm']:.2g} (Holm)"),
        *_indistinguishable_text(result["layer"], tests, f"the test {test['unit']}s"),
    ]


def _highest_on_test(result: Json) -> list[str]:
    """Return the layer with the highest test accuracy if that is above the chosen layers'."""
    selection = result["layer_selection"]
    if (
        selection is None
        or selection["highest_on_test"]["accuracy"] <= selection["accuracy"]["mean"]
    ):
        return []
    highest = selection["highest_on_test"]
    return [
        f"Highest on the test rows: {highest['layer']}, {percent_text(highest['accuracy'])}. Too "
        "high as a result, because the test rows chose it."
    ]


def _store_comparison(result: Json) -> list[str]:
    """Return the difference to the other store, and how sure it is; nothing without one."""
    comparison = result["compared_store"]
    if comparison is None:
        return []
    ours, other = (
        f"{shown_path(each['store'])} ({each['layer']}, {each['method']})"
        for each in (result, comparison)
    )
    p, others = comparison["p"], ""
    if num_others := comparison["rows_of_other_images"]:
        others = (
            f" The images of {num_others} of these rows have other bytes there: if their keys are "
            "those of other images, the comparison says nothing."
        )
    left_out = (
        f", {comparison['rows_left_out']} others left out" if comparison["rows_left_out"] else ""
    )
    return [
        f"{difference_text(ours, other, comparison, f'p = {p:.2g}')} "
        f"{counted(comparison['rows'], 'test row')} of both{left_out}; "
        f"exact McNemar test p = {p:.2g}.{others}"
    ]


def difference_text(first: str, second: str, comparison: Json, p_text: str) -> str:
    """Say by how much one is more accurate: 'a better than b: +2.1 points, ...'.

    It is called better or worse only if the exact test and the interval both tell them apart.
    """
    difference, interval = comparison["difference"], comparison["interval"]
    verb = "against"
    if comparison["told_apart"]:
        verb = "better than" if difference > 0 else "worse than"
    if interval is not None:
        low, high = interval
        text = f"95 % interval {points_text(low)} to {points_text(high)}"
        text += _doubt_text(comparison, p_text)
    elif difference == 0:
        text = f"no test {comparison['unit']} is right for one of them only"
    else:
        text = f"without an interval, as every test {comparison['unit']} has the same difference"
    return f"{first} {verb} {second}: {points_text(difference, '+')} points, {text}."


def _doubt_text(comparison: Json, p_text: str) -> str:
    """Return why two classifiers cannot be told apart although the printed interval excludes 0.

    With several layers, both the p-value and the interval are corrected by Holm's method.
    """
    low, high = comparison["interval"]
    if comparison["told_apart"] or low <= 0 <= high:
        return ""
    low, high = comparison.get("interval_holm") or (low, high)
    lead = comparison["first_only"] - comparison["second_only"]
    if low <= 0 <= high:
        reason = f"interval {points_text(low)} to {points_text(high)} (Holm)"
    elif lead * low < 0:
        reason = f"more {comparison['unit']}s are for the other one"
    else:
        reason = f"exact McNemar test, {p_text}"
    return f", but they cannot be told apart: {reason}"


def _indistinguishable_text(best: str, tests: Json, where: str) -> list[str]:
    """Return which layers cannot be told apart from the best one, and for which it is unknown."""
    unknown = {layer: test for layer, test in tests.items() if test["told_apart"] is None}
    indistinguishable = [layer for layer, test in tests.items() if test["told_apart"] is False]
    lines = []
    if indistinguishable:
        names = first_names(indistinguishable, _LAYERS_NAMED)
        lines.append(f"Cannot be told apart from {best} on {where}: {names}.")
    elif tests and not unknown:
        subject = "The other layer" if len(tests) == 1 else f"All {len(tests)} other layers"
        lines.append(f"{subject} can be told apart from {best} on {where} (p < 0.05, Holm).")
    if unknown:
        [reason] = {test["not_tested"] for test in unknown.values()}
        names = first_names(list(unknown), _LAYERS_NAMED)
        lines.append(f"Not tested against {best}: {names}; {reason}.")
    return lines


def paired_text(result: Json) -> str | None:
    """Describe, for each other layer, on how many test rows it differs from the best one."""
    lines = [
        f"{layer}: {counted(test['first_only'] + test['second_only'], test['unit'])} for one of "
        f"them only, {test['first_only']} for {result['layer']} and {test['second_only']} for "
        f"{layer}; p = {test['p']:.2g}, corrected {test['p_holm']:.2g}"
        for layer, test in result["paired_tests"].items()
    ]
    return _filled(lines) if lines else None
