"""Printed result of job=probe for classes."""

from __future__ import annotations

import textwrap
from typing import Any

from featx.base import (
    WIDTH,
    facts,
    percent_text,
    shown_path,
)
from featx.config import Config
from featx.errors import counted
from featx.jobs.probe_metrics import (
    choice_text,
    counts_text,
    indistinguishable_text,
    interval_text,
    intervals_text,
    last_rows,
    metrics_text,
    notes_of_layers,
    points_text,
    seeds_metrics_text,
    split_rows,
)
from featx.jobs.probe_tables import details_table, few_shot_table, layers_table, seeds_table

_NAMED = 3
"""Number of pairs of classes that a line names."""


def classification_text(config: Config, result: dict[str, Any]) -> str:
    """Format the result for people: the answer, the table, what it rests on, and what follows."""
    parts = [_answer(result), layers_table(config, result)]
    if result["seeds"]:
        parts = [_seeds_answer(result), seeds_table(config, result), *parts]
    if config.job.show == "all":
        parts += [details_table(config, result), *_paired_lines(result)]
    if config.probe.all_shots:
        parts.append(few_shot_table(config, result))
    return "\n\n".join([*parts, facts(_facts(config, result))])


def _answer(result: dict[str, Any]) -> str:
    """Return the best layer with its accuracy, and the layers that may be as good."""
    folds = ""
    if chosen := result.get("layer_of_folds"):
        folds = f", with the layer that each fold chose within training ({counts_text(chosen)})"
    seed_text = f" of seed {result['split']['seed']}" if result["seeds"] else ""
    answer = (
        f"Chosen layer{seed_text}: {result['layer']} ({result['method']}, by the validation "
        f"rows). {percent_text(result['accuracy'])} of {counted(result['rows'], 'test row')} "
        f"{'is' if result['rows'] == 1 else 'are'} right, 95 % interval "
        f"{interval_text(result['interval'])} %{folds}."
    )
    highest = [] if result["seeds"] else _highest_on_test(result)
    lines = [answer, *_comparison(result), *highest, *_store_comparison(result)]
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def _comparison(result: dict[str, Any]) -> list[str]:
    """Return the difference to the most accurate other layer, and which layers may be as good."""
    tests = result["paired_tests"]
    if not tests:
        return []
    other, test = min(tests.items(), key=lambda pair: pair[1]["difference"])
    return [
        difference_text(result["layer"], other, test, f"p = {test['p_holm']:.2g} (Holm)"),
        *indistinguishable_text(result["layer"], tests, f"the test {test['unit']}s"),
    ]


def _highest_on_test(result: dict[str, Any]) -> list[str]:
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


def _store_comparison(result: dict[str, Any]) -> list[str]:
    """Return the difference to the other store, and how sure it is; nothing without one."""
    comparison = result["compared_store"]
    if comparison is None:
        return []
    names = (
        f"{shown_path(result['store'])} ({result['layer']}, {result['method']})",
        f"{shown_path(comparison['store'])} ({comparison['layer']}, {comparison['method']})",
    )
    p = comparison["p"]
    others = ""
    if num_others := comparison["rows_of_other_images"]:
        others = (
            f" The images of {num_others} of these rows have other bytes there: if their keys are "
            "those of other images, the comparison says nothing."
        )
    left_out = (
        f", {comparison['rows_left_out']} others left out" if comparison["rows_left_out"] else ""
    )
    return [
        f"{difference_text(*names, comparison, f'p = {p:.2g}')} "
        f"{counted(comparison['rows'], 'test row')} of both{left_out}; "
        f"exact McNemar test p = {p:.2g}.{others}"
    ]


def difference_text(first: str, second: str, comparison: dict[str, Any], p_text: str) -> str:
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


def _doubt_text(comparison: dict[str, Any], p_text: str) -> str:
    """Return why two classifiers cannot be told apart although the printed interval excludes 0.

    With several layers, both the p-value and the interval are corrected by Holm's method.
    """
    low, high = comparison["interval"]
    if comparison["told_apart"] or low <= 0 <= high:
        return ""
    low, high = comparison.get("interval_holm") or (low, high)
    reason = f"exact McNemar test, {p_text}"
    if low <= 0 <= high:
        reason = f"interval {points_text(low)} to {points_text(high)} (Holm)"
    return f", but they cannot be told apart: {reason}"


def _seeds_answer(result: dict[str, Any]) -> str:
    """Return the accuracy over the splits of all seeds."""
    about = result["seeds"]
    accuracy = about["chosen"]["accuracy"]
    answer = (
        f"Over {len(about['seeds'])} splits {percent_text(accuracy['mean'])} of the test rows are "
        f"right, standard deviation {100 * accuracy['std']:.1f} points, smallest "
        f"{percent_text(accuracy['min'])}, largest {percent_text(accuracy['max'])}"
        f"{choice_text(about)}."
    )
    sentences = indistinguishable_text(
        about["layer"], about["differences"], f"the {len(about['seeds'])} splits"
    )
    lines = [answer, *sentences, *_highest_on_test(result)]
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def _facts(config: Config, result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of what the accuracy rests on, of the files, and of what follows."""
    over_splits = seeds_metrics_text(result) if result["seeds"] else ""
    task_text = f"{result['task']}: {result['task_reason']}"
    rows = [
        *([("task", task_text)] if config.probe.label_column else []),
        ("rows", f"{result['rows_labelled']} labelled, {len(result['classes'])} classes"),
        *split_rows(result),
        ("chance", _chance_text(result)),
        ("metrics", metrics_text(result)),
        *([("calibration", calibration)] if (calibration := _calibration_text(result)) else []),
        *([("intervals", intervals_text(result["bootstrap"]))] if result["bootstrap"] else []),
        *([("over splits", over_splits)] if over_splits else []),
    ]
    if folds := result.get("folds"):
        mean, std = percent_text(folds["mean"]), percent_text(folds["std"])
        rows.append(("folds", f"mean {mean}, standard deviation {std}"))
    rows.append(("errors", _errors_text(result)))
    rows.append(("duplicates", _near_text(result)))
    notes = notes_of_layers(result, config.probe.methods)
    if notes:
        first_notes = notes[:12] + (
            [f"and {len(notes) - 12} more, in probe.json"] if notes[12:] else []
        )
        rows.append(("notes", "\n".join(first_notes)))
    return [*rows, *last_rows(result)]


def _calibration_text(result: dict[str, Any]) -> str:
    """Return the temperature of the logits of the best layer; '' without one."""
    temperature = result.get("calibration_temperature")
    return "" if temperature is None else f"logits divided by {temperature:.3f} (validation rows)"


def _chance_text(result: dict[str, Any]) -> str:
    """Return the accuracy of guessing, and of always naming the most frequent class."""
    support = [count for count in result["support"] if count is not None]
    largest = percent_text(max(support) / max(1, sum(support)))
    return f"{percent_text(1 / len(result['classes']))}, largest class {largest}"


def _errors_text(result: dict[str, Any]) -> str:
    """Return the number of wrong predictions, and the pairs of classes confused most."""
    names, matrix = result["classes"], result["confusion"]
    pairs = [
        (count, names[i], names[j])
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
        if i != j and count
    ]
    pairs.sort(key=lambda pair: -pair[0])
    texts = [f"{true} as {predicted} {count}" for count, true, predicted in pairs[:_NAMED]]
    more = [f"{len(pairs) - _NAMED} more pairs of classes"] if pairs[_NAMED:] else []
    total = f"{sum(count for count, *_ in pairs)} of {result['rows']}"
    return f"{total}: {', '.join([*texts, *more])}" if pairs else total


def _near_text(result: dict[str, Any]) -> str:
    """Describe how many test rows have a near-duplicate in training, or why it is unknown."""
    near = result["near_duplicates"]
    if near["rows"] is None:
        return f"not looked for: {near['not_checked']}"
    text = (
        f"{near['rows']} of {counted(result['rows'], 'test row')} "
        f"{'is' if near['rows'] == 1 else 'are'} like a training row (cosine {near['cosine']:g} of "
        f"{near['layer']}, standardised)"
    )
    if near["rows"] and (accuracy_without := near["without"]) is not None:
        text += (
            f";\nwithout them the accuracy is {percent_text(accuracy_without['accuracy'])} "
            f"({accuracy_without['correct']} of {accuracy_without['rows']})"
        )
    return text


def _paired_lines(result: dict[str, Any]) -> list[str]:
    """Describe, for each other layer, on how many test rows it differs from the best one."""
    lines = [
        f"{layer}: {counted(test['first_only'] + test['second_only'], test['unit'])} for one of "
        f"them only, {test['first_only']} for {result['layer']} and {test['second_only']} for "
        f"{layer}; p = {test['p']:.2g}, corrected {test['p_holm']:.2g}"
        for layer, test in result["paired_tests"].items()
    ]
    return ["\n".join(textwrap.fill(line, WIDTH) for line in lines)] if lines else []
