"""job=probe: accuracy of simple classifiers on the features of a store."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from featx.base import (
    WIDTH,
    command_text,
    facts,
    log_message,
    percent_text,
    shown_path,
    table,
)
from featx.config import Config, ProbeConfig
from featx.errors import ConfigError, counted
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.storage import parse_path
from featx.store import layout

_SIGNIFICANT = 0.05
"""Smallest p of a paired test that leaves two layers undistinguished."""

_NAMED = 3
"""Number of layers, or pairs of classes, that a line names."""


def run(config: Config, config_yaml: str) -> int:
    """Fit and test the classifiers and print the best layer; returns the exit code 0."""
    config.place_of_store()  # reports a missing store before torch is imported
    from featx.analysis.probe import run_probe  # which imports torch

    result = run_probe(config, log_message)
    print_summary(config, result, _text(config, result))
    return 0


def _text(config: Config, result: dict[str, Any]) -> str:
    """Format the result for people: the answer, the table, what it rests on, and what follows."""
    parts = [_answer(result), _layers_table(config, result)]
    if config.job.show == "all":
        parts += [_details_table(config, result), *_paired_lines(result)]
    if config.probe.all_shots:
        parts.append(_few_shot_table(config, result))
    return "\n\n".join([*parts, facts(_facts(config, result))])


def _answer(result: dict[str, Any]) -> str:
    """Return the best layer with its accuracy, and the layers that may be as good."""
    folds = result.get("layer_of_folds")
    of_folds = ""
    if folds:
        of_folds = f", with the layer that each fold chose within training ({_counts(folds)})"
    answer = (
        f"Best layer: {result['layer']} ({result['method']}, chosen on validation rows). "
        f"{percent_text(result['accuracy'])} of {result['rows']} test rows are right, 95 % "
        f"interval {_interval_text(result['interval'])} %{of_folds}."
    )
    alike = [
        f"{layer} (p = {found['p']:.2g})"
        for layer, found in result["paired_tests"].items()
        if found["p"] >= _SIGNIFICANT
    ]
    more = f" and {len(alike) - _NAMED} more" if len(alike) > _NAMED else ""
    doubt = [f"Not distinguishable from it: {', '.join(alike[:_NAMED])}{more}."] if alike else []
    return "\n".join(textwrap.fill(line, WIDTH) for line in (answer, *doubt))


def _counts(layers: list[str]) -> str:
    """Return how many folds chose each layer."""
    return ", ".join(f"{layer} in {count}" for layer, count in Counter(layers).items())


def _interval_text(interval: Sequence[float]) -> str:
    """Return an interval of shares in percent, without the sign: '85.6 - 96.4'."""
    low, high = (f"{100 * edge:.1f}" for edge in interval)
    return f"{low} - {high}"


def _facts(config: Config, result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of what the accuracy rests on, of the files, and of what follows."""
    store = parse_path(result["store"])
    folder = store if store.is_dir() else store.parent
    groups = result["split"]["groups"]
    rows = [
        ("rows", f"{result['rows_labelled']} labelled, {len(result['classes'])} classes"),
        ("split", _split_text(result["split"])),
        *([("groups", _groups_text(groups))] if groups else []),
        ("chance", _chance_text(result)),
    ]
    if folds := result.get("folds"):
        mean, std = percent_text(folds["mean"]), percent_text(folds["std"])
        rows.append(("folds", f"mean {mean}, standard deviation {std}"))
    rows.append(("errors", _errors_text(result)))
    rows.append(("duplicates", _near_text(result)))
    notes = result["notes_on_rows"] + [
        f"{layer}, {name}: {note}"
        for layer, about in result["layers"].items()
        for name in config.probe.methods
        for note in about[name]["notes"]
    ]
    if notes:
        shown = notes[:12] + ([f"and {len(notes) - 12} more, in probe.json"] if notes[12:] else [])
        rows.append(("notes", "\n".join(shown)))
    files = [layout.PROBE, result["predictions"]["file"]]
    files += [result["head"]["file"]] if result["head"] else []
    rows.append(("wrote", "\n".join([*files, f"in {shown_path(folder)}"])))
    following = [command_text("job=report", f"store={shown_path(store)}")]
    if result["head"]:
        following.append(command_text("job=predict", f"store={shown_path(store)}", "data=./new"))
    return [*rows, ("next", "\n".join(following))]


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
    shown = [f"{true} as {said} {count}" for count, true, said in pairs[:_NAMED]]
    more = [f"{len(pairs) - _NAMED} more pairs of classes"] if pairs[_NAMED:] else []
    total = f"{sum(count for count, *_ in pairs)} of {result['rows']}"
    return f"{total}: {', '.join([*shown, *more])}" if pairs else total


def _split_text(split: dict[str, Any]) -> str:
    """Describe the kind of split and its sizes."""
    kind = split["kind"]
    sizes = (
        f"{split['fit'][0]} fitted, {split['validation_rows'][0]} for validation, "
        f"{split['test_rows'][0]} tested"
    )
    if kind == "kfold":
        return f"{split['folds']} folds, each about {sizes}; seed {split['seed']}"
    return f"{kind}, {sizes}; seed {split['seed']}"


def _groups_text(groups: dict[str, Any]) -> str:
    """Describe which rows were kept together."""
    return (
        f"rows of one {groups['by']} stay on one side: "
        f"{counted(groups['groups'], 'group')}, the largest of {counted(groups['largest'], 'row')}"
    )


def _near_text(result: dict[str, Any]) -> str:
    """Describe how many test rows have a near-duplicate in training, or why it is unknown."""
    near = result["near_duplicates"]
    if near["rows"] is None:
        return f"not looked for: {near['not_checked']}"
    text = (
        f"{near['rows']} of {result['rows']} test rows are like a training row (cosine "
        f"{near['cosine']:g} of {near['layer']}, standardised)"
    )
    if near["rows"] and (others := near["without"]) is not None:
        text += (
            f";\nwithout them the accuracy is {percent_text(others['accuracy'])} "
            f"({others['correct']} of {others['rows']})"
        )
    return text


def _paired_lines(result: dict[str, Any]) -> list[str]:
    """Describe, for each other layer, on how many test rows it differs from the best one."""
    lines = [
        f"{layer}: {counted(found['first_only'] + found['second_only'], found['unit'])} for one of "
        f"them only, {found['first_only']} for {result['layer']} and {found['second_only']} for "
        f"{layer}; p = {found['p']:.2g}"
        for layer, found in result["paired_tests"].items()
    ]
    return ["\n".join(textwrap.fill(line, WIDTH) for line in lines)] if lines else []


def _layers_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table with one row per layer, in the order of the store."""
    methods, tests = config.probe.methods, result["paired_tests"]
    rows = []
    for layer, about in result["layers"].items():
        cells = [layer, str(about["features"])]
        cells += [percent_text(about[method]["accuracy"]) for method in methods]
        cells.insert(3, _interval_text(about[methods[0]]["interval"]))
        if tests:
            cells.append(f"p = {tests[layer]['p']:.2g}" if layer in tests else "best")
        rows.append(cells)
    header = ["layer", "width", methods[0], "95 % interval", *methods[1:]]
    shown = table([*header, "against best"] if tests else header, rows)
    if len(result["layers"]) > 1:
        shown += (
            "\nThe interval of a line holds for a layer that was chosen beforehand, not for the "
            "best one."
        )
    return shown


def _details_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table with the settings and further scores of each layer and method."""
    rows = []
    for layer, about in result["layers"].items():
        for method in config.probe.methods:
            found = about[method]
            name = "k" if method == "knn" else "l2"
            rows.append(
                (
                    layer,
                    method,
                    f"{name}={found[name]:g}",
                    percent_text(found["validation_accuracy"]),
                    _interval_text(found["interval"]),
                    percent_text(found["balanced_accuracy"]),
                    percent_text(found["top5"]),
                    "-" if (error := found["calibration_error"]) is None else f"{error:.3f}",
                    f"{found['seconds']:.1f}",
                )
            )
    header = (
        "layer", "method", "chosen", "validation", "95 % interval", "balanced", "top-5",
        "calibration\nerror", "seconds",
    )  # fmt: skip
    return table(header, rows, left=2)


def _few_shot_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table of the accuracies with few training rows per class."""
    rows = []
    for layer, about in result["layers"].items():
        for method in config.probe.methods:
            found = about[method]["few_shot"].values()
            cells = [_mean_text(each) for each in found]
            rows.append((layer, method, *cells))
    header = ("layer", "method", *(f"{shots} a class" for shots in config.probe.all_shots))
    return "Few-shot, mean ± standard deviation over the draws:\n" + table(header, rows, left=2)


def _mean_text(found: dict[str, Any]) -> str:
    """Format a mean, with the standard deviation if there is more than one draw."""
    spread = "" if found["std"] is None else f" ± {100 * found['std']:.1f}"
    return f"{100 * found['mean']:.1f}{spread} %"


def _check(config: Config) -> None:
    """Refuse views of other jobs.

    Raises:
        ConfigError: job.show is neither null nor all.
    """
    if config.job.show not in (None, "all"):
        raise ConfigError(f"job.show={config.job.show}: job=probe has only job.show=all.")


JOBS.register(
    Job(
        "probe",
        "Fit and test classifiers on the features of a labelled store.",
        ProbeConfig,
        run=run,
        input=Input.STORE_OR_OUT,
        reads=("job.json", "job.show", "layers", "device", "seed"),
        why="it reads an existing store; `layers` selects its layers",
        check=_check,
    )
)
