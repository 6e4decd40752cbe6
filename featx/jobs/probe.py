"""job=probe: accuracy of simple classifiers on the features of a store."""

from __future__ import annotations

from typing import Any

from featx.base import facts, log_message, table
from featx.config import Config, ProbeConfig
from featx.errors import counted
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.storage import parse_path
from featx.store import layout


def run(config: Config, config_yaml: str) -> int:
    """Fit and test the classifiers and print the best layer; returns the exit code 0."""
    config.place_of_store()  # reports a missing store before torch is imported
    from featx.analysis.probe import run_probe  # which imports torch

    result = run_probe(config, log_message)
    print_summary(config, result, _text(config, result))
    return 0


def _text(config: Config, result: dict[str, Any]) -> str:
    """Format the result for people, with the command that uses the head."""
    store = parse_path(result["store"])
    folder = store if store.is_dir() else store.parent
    best, method = result["layer"], result["method"]
    low, high = result["interval"]
    rows = [
        ("rows", f"{result['rows_labelled']} labelled, {len(result['classes'])} classes"),
        ("split", _split_text(result["split"])),
        ("groups", _groups_text(result["split"]["groups"])),
        ("best layer", f"{best}, by {method}'s accuracy on the validation rows"),
        (
            "accuracy",
            f"{result['accuracy']:.4f} on {result['rows']} test rows, 95 % interval {low:.4f} to "
            f"{high:.4f}",
        ),
    ]
    if chosen := result.get("layer_of_folds"):
        counts = ", ".join(
            f"{layer} in {chosen.count(layer)}" for layer in sorted(set(chosen), key=chosen.index)
        )
        rows.append(
            (
                "",
                f"by the layer that each of {len(chosen)} folds chose within training: {counts}",
            )
        )
    if folds := result.get("folds"):
        rows.append(("", f"folds: mean {folds['mean']:.4f}, standard deviation {folds['std']:.4f}"))
    if result["paired_tests"]:
        rows.append(("compared", _paired_text(result)))
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
    rows.append(("file", str(folder / layout.PROBE)))
    rows.append(("predicted", str(folder / result["predictions"]["file"])))
    if result["head"]:
        rows.append(("head", str(folder / result["head"]["file"])))
    parts = [facts(rows), _layers_table(config, result)]
    if config.probe.all_shots:
        parts.append(_few_shot_table(config, result))
    if (worst := _confused(result)) is not None:
        parts.append(worst)
    if result["head"]:
        parts.append(
            "python -m featx job=predict store="
            f"{store} data=folder data.root=NEW      # the best layer's head on new images"
        )
    return "\n\n".join(parts)


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


def _groups_text(groups: dict[str, Any] | None) -> str:
    """Describe which rows were kept together."""
    if groups is None:
        return "none: each row counts as independent; probe.group_column=NAME keeps rows together"
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
            f";\nwithout them the accuracy is {others['accuracy']:.4f} "
            f"({others['correct']} of {others['rows']})"
        )
    return text


def _paired_text(result: dict[str, Any]) -> str:
    """Describe, for each other layer, on how many test rows it differs from the best one."""
    return "\n".join(
        f"{layer}: {counted(found['first_only'] + found['second_only'], found['unit'])} for one of "
        f"them only, {found['first_only']} for {result['layer']} and {found['second_only']} for "
        f"{layer}; p = {found['p']:.2g}"
        for layer, found in result["paired_tests"].items()
    )


_HEADER = (
    "layer", "method", "features", "chosen", "validation", "accuracy", "95 %\nfrom", "to",
    "balanced", "top-5", "calibration\nerror", "seconds",
)  # fmt: skip


def _layers_table(config: Config, result: dict[str, Any]) -> str:
    """Format a table with one row per layer and method, in the order of the store."""
    rows = []
    for layer, about in result["layers"].items():
        for method in config.probe.methods:
            found = about[method]
            name = "k" if method == "knn" else "l2"
            rows.append(
                (
                    layer,
                    method,
                    str(about["features"]),
                    f"{name}={found[name]:g}",
                    f"{found['validation_accuracy']:.4f}",
                    f"{found['accuracy']:.4f}",
                    *(f"{edge:.4f}" for edge in found["interval"]),
                    f"{found['balanced_accuracy']:.4f}",
                    _number(found["top5"]),
                    _number(found["calibration_error"]),
                    f"{found['seconds']:.1f}",
                )
            )
    found = table(_HEADER, rows, left=2)
    if len(result["layers"]) > 1:
        found += (
            "\nThe interval of a line holds for a layer that was chosen beforehand, not for the "
            "best one of the table."
        )
    return found


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
    spread = "" if found["std"] is None else f" ± {found['std']:.4f}"
    return f"{found['mean']:.4f}{spread}"


def _confused(result: dict[str, Any]) -> str | None:
    """Describe the three pairs of classes that are confused most, or return None without errors."""
    names, matrix = result["classes"], result["confusion"]
    pairs = [
        (count, names[i], names[j])
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
        if i != j and count
    ]
    pairs.sort(key=lambda pair: -pair[0])
    lines = [f"{count} of {true} predicted as {said}" for count, true, said in pairs[:3]]
    return "Most confused: " + "; ".join(lines) if lines else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


JOBS.register(
    Job(
        "probe",
        "Fit and test classifiers on the features of a labelled store.",
        ProbeConfig,
        run=run,
        input=Input.STORE_OR_OUT,
        reads=("job.json", "layers", "device", "seed"),
        why="it reads an existing store; `layers` selects its layers",
    )
)
