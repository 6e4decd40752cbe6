"""Printed result of job=probe for classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from featx.analysis.probe import METRICS
from featx.base import percent_text, shown_path
from featx.config import Config
from featx.errors import counted
from featx.jobs.base import Section, Table
from featx.jobs.probe_metrics import (
    T_TEST,
    choice_text,
    counts_text,
    filled,
    indistinguishable_text,
    interval_text,
    intervals_text,
    last_facts,
    metric_text,
    metrics_text,
    not_available,
    notes_of_layers,
    p_text,
    points_text,
    seeds_metrics_text,
    setting_name,
    setting_text,
    split_facts,
    spread_text,
    yes_or_no,
)

_NAMED = 3
"""Number of pairs of classes that a line names."""

_NOTES = 12
"""Number of notes that are printed; probe.json has all."""


def classification_sections(config: Config, result: dict[str, Any]) -> list[Section]:
    """Describe the result: the answer, the table, what it rests on, and what follows."""
    sections: list[Section] = [_answer(result), _layers_table(config, result)]
    if result["seeds"]:
        sections = [_seeds_answer(result), _seeds_table(config, result), *sections]
    if config.job.show == "all":
        sections += [*_details_tables(config, result), *_paired_lines(result)]
    if config.probe.all_shots:
        sections.append(_few_shot_table(config, result))
    return [*sections, _facts(config, result)]


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
    return filled(lines)


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
    return filled(lines)


def _layers_table(config: Config, result: dict[str, Any]) -> Table:
    """Make a table with one row per layer, in the order of the store."""
    methods, tests = config.probe.methods, result["paired_tests"]
    rows = []
    for layer, about in result["layers"].items():
        cells = [layer, str(about["features"])]
        cells += [percent_text(about[method]["accuracy"]) for method in methods]
        cells.insert(3, interval_text(about[methods[0]]["interval"]))
        if test := tests.get(layer):
            cells += [
                points_text(-test["difference"], "+"),
                _negated_interval_text(test["interval"]),
                p_text(test["p_holm"]),
                yes_or_no(test["told_apart"]),
            ]
        elif tests:
            cells += ["chosen", "", "", ""]
        rows.append(cells)
    header = ["layer", "width", methods[0], "95 % interval", *methods[1:]]
    if not tests:
        return Table(header, rows)
    note = (
        "The first interval holds for a layer that was chosen beforehand, not for the best one; "
        "p: exact McNemar test, corrected for the number of layers (Holm); told apart: p < 0.05, "
        "and the interval with the same correction excludes 0."
    )
    header += ["against\nchosen", "95 % interval\nof difference", "p", "told\napart"]
    return Table(header, rows, notes=[note])


def _seeds_table(config: Config, result: dict[str, Any]) -> Table:
    """Make a table of the accuracies over all splits, with one row per layer."""
    about, methods, best = result["seeds"], config.probe.methods, result["seeds"]["layer"]
    rows = []
    for layer, entries in about["layers"].items():
        first, *others = (entries[method]["accuracy"] for method in methods)
        cells = [layer, spread_text(first, True), interval_text((first["min"], first["max"]))]
        cells += [spread_text(other, True) for other in others]
        if difference := about["differences"].get(layer):
            better = sum(value < 0 for value in difference["values"])
            cells += [
                f"{points_text(-difference['mean'], '+')} ± {100 * difference['std']:.1f}",
                f"{better} of {len(about['seeds'])}",
                p_text(difference["p_holm"]),
                yes_or_no(difference["told_apart"]),
            ]
        elif about["differences"]:
            cells += ["chosen", "", "", ""]
        rows.append(cells)
    header = ["layer", methods[0], "smallest - largest", *methods[1:]]
    note = "Mean ± standard deviation over the splits, in percent."
    if about["differences"]:
        name = best if len(best) < 12 else "chosen"
        header += [f"against\n{name}, points", "better in", "p", "told\napart"]
        note += f" {T_TEST}"
    return Table(header, rows, notes=[note])


def _negated_interval_text(interval: Sequence[float] | None) -> str:
    """Format an interval of the best layer minus another one, seen from the other; '-' for None."""
    if interval is None:
        return "-"
    low, high = interval
    return f"{points_text(-high, '+')} to {points_text(-low, '+')}"


def _details_tables(config: Config, result: dict[str, Any]) -> list[Section]:
    """Make two tables with the settings and all metrics of each layer and method."""
    settings, metrics, reasons = [], [], []
    beside_accuracy = METRICS["classification"][1:]
    for layer, about in result["layers"].items():
        for method in config.probe.methods:
            entry, name = about[method], setting_name(method)
            cells = (
                f"{name}={setting_text(entry[name])}",
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
    return [
        Table(header, settings, left=2),
        Table(("layer", "method", *names), metrics, left=2, notes=reasons),
    ]


def _few_shot_table(config: Config, result: dict[str, Any]) -> Table:
    """Make a table of the accuracies with few training rows per class."""
    methods, all_shots = config.probe.methods, config.probe.all_shots
    rows = [
        (layer, method, *(f"{spread_text(each, True)} %" for each in entries.values()))
        for layer, about in result["layers"].items()
        for method in methods
        for entries in [about[method]["few_shot"]]
    ]
    # All layers and methods have the same draws.
    entries = next(iter(result["layers"].values()))[methods[0]]["few_shot"]
    shortages = [_shortage_text(shots, entries[str(shots)]) for shots in all_shots]
    return Table(
        ("layer", "method", *(f"{shots} a class" for shots in all_shots)),
        rows,
        left=2,
        title="Few-shot, mean ± standard deviation over the draws:",
        notes=[text for text in shortages if text],
    )


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


def _facts(config: Config, result: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return (name, text) of what the accuracy rests on, of the files, and of what follows."""
    task_text = f"{result['task']}: {result['task_reason']}"
    calibration = folds_text = None
    if (temperature := result.get("calibration_temperature")) is not None:
        calibration = f"logits divided by {temperature:.3f} (validation rows)"
    if folds := result.get("folds"):
        mean, std = percent_text(folds["mean"]), percent_text(folds["std"])
        folds_text = f"mean {mean}, standard deviation {std}"
    notes = notes_of_layers(result, config.probe.methods)
    if len(notes) > _NOTES:
        notes = [*notes[:_NOTES], f"and {len(notes) - _NOTES} more, in probe.json"]
    return [
        ("task", task_text if config.probe.label_column else None),
        ("rows", f"{result['rows_labelled']} labelled, {len(result['classes'])} classes"),
        *split_facts(result),
        ("chance", _chance_text(result)),
        ("metrics", metrics_text(result)),
        ("calibration", calibration),
        ("intervals", intervals_text(result["bootstrap"]) if result["bootstrap"] else None),
        ("over splits", (seeds_metrics_text(result) or None) if result["seeds"] else None),
        ("folds", folds_text),
        ("errors", _errors_text(result)),
        ("duplicates", _near_text(result)),
        *last_facts(result, notes),
    ]


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
    return [filled(lines)] if lines else []
