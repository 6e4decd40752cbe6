"""Description of what job=probe found, from the content of probe.json: sentences, tables, facts.

The terminal prints all of it, and a page shows the tables among figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from featx.analysis.probe.metrics import METHODS, METRICS, Metric
from featx.analysis.probe.texts import (
    answer_text,
    chance_text,
    errors_text,
    groups_text,
    interval_text,
    intervals_text,
    metrics_text,
    near_text,
    not_available,
    notes_of_layers,
    paired_text,
    points_text,
    score_text,
    seeds_answer_text,
    seeds_metrics_text,
    setting_text,
    split_text,
    spread_text,
    test_cells,
)
from featx.base import Section, Table, command_text, percent_text, shown_path
from featx.errors import counted
from featx.storage import parse_path
from featx.store import layout

_CLASSES = 20
"""Number of classes of pixels in the printed table, those with most pixels."""

_LABELS_NAMED = 8
"""Number of labels that a line names."""

_NOTES = 12
"""Number of notes that are printed; probe.json has all."""

_T_TEST = (
    "p: corrected resampled t-test (Nadeau and Bengio, 2003), corrected for the number of layers "
    "(Holm); told apart: p < 0.05."
)


def probe_sections(result: Mapping[str, Any], is_whole: bool) -> list[Section | None]:
    """Describe the content of probe.json: the answer, tables, what it rests on, and what follows.

    Args:
        result: content of probe.json.
        is_whole: whether to describe also what few need.
    """
    task = result["task"]
    sections: list[Section | None] = []
    if result["seeds"]:
        sections += [seeds_answer_text(result), _seeds_table(result)]
    sections.append(answer_text(result))
    if task == "classification":
        sections.append(_accuracies_table(result))
        if is_whole:
            sections.append(_settings_table(result))
            sections += [metrics_table(result, ("method",), METRICS[task][1:]), paired_text(result)]
        sections.append(_few_shot_table(result))
    elif task == "segmentation":
        sections.append(metrics_table(result, ("width", "patches", "l2"), METRICS[task]))
        sections.append(_listed_classes(result, is_whole))
    else:
        sections.append(metrics_table(result, ("method", "width", "chosen"), METRICS[task]))
    return [*sections, _facts(result)]


def layer_results(
    result: Mapping[str, Any],
) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return layer, method and entry of each result, in the order of probe.json."""
    return [
        (layer, method, entry)
        for layer, about in result["layers"].items()
        for method, entry in about.items()
        if method in METHODS
    ]


def _methods(result: Mapping[str, Any]) -> list[str]:
    """Return the methods, the one that chose the layer first."""
    return list(dict.fromkeys(method for _, method, _ in layer_results(result)))


def metrics_table(
    result: Mapping[str, Any], columns: Sequence[str], metrics: Sequence[Metric]
) -> Table:
    """Make a table of metrics with one row per layer and method, in the order of the store.

    Args:
        result: content of probe.json.
        columns: names of columns of `_layer_cells` before the metrics.
        metrics: metrics of its task.
    """
    rows: list[Sequence[str]] = []
    reasons, best = list[str](), None
    for layer, method, entry in layer_results(result):
        if (layer, method) == (result["layer"], result["method"]):
            best = len(rows)
        cells = _layer_cells(result["layers"][layer], method, entry)
        scores = (score_text(entry[metric.key], metric.is_share) for metric in metrics)
        rows.append((layer, *(cells[name] for name in columns), *scores))
        reasons += [f"{layer}, {method}, {line}" for line in not_available(entry)]
    header = ("layer", *columns, *(_in_two_lines(metric.title) for metric in metrics))
    return Table(header, rows, 1 + ("method" in columns), notes=reasons, best=best)


def _layer_cells(about: Mapping[str, Any], method: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """Return what was probed, and the setting that was chosen for it."""
    name = "k" if method == "knn" else "l2"
    setting = setting_text(entry[name])
    return {
        "method": method,
        "width": str(about["features"]),
        "patches": "{} x {}".format(*about.get("grid", ("", ""))),
        name: setting,
        "chosen": f"{name}={setting}",
    }


def _in_two_lines(title: str) -> str:
    """Put the last word of a title into a line of its own."""
    return "\n".join(title.rsplit(" ", 1))


def _accuracies_table(result: Mapping[str, Any]) -> Table:
    """Make a table of the accuracies of all methods, with one row per layer."""
    (first, *others), tests = _methods(result), result["paired_tests"]
    rows = []
    for layer, about in result["layers"].items():
        cells = [
            *(layer, str(about["features"]), percent_text(about[first]["accuracy"])),
            interval_text(about[first]["interval"]),
            *(percent_text(about[method]["accuracy"]) for method in others),
        ]
        if test := tests.get(layer):
            cells += [
                points_text(-test["difference"], "+"),
                _negated_interval_text(test["interval"]),
                *test_cells(test),
            ]
        elif tests:
            cells += ["chosen", "", "", ""]
        rows.append(cells)
    header = ["layer", "width", first, "95 % interval", *others]
    if not tests:
        return Table(header, rows)
    note = (
        "The first interval holds for a layer that was chosen beforehand, not for the best one; "
        "p: exact McNemar test, corrected for the number of layers (Holm); told apart: p < 0.05, "
        "and the interval with the same correction excludes 0."
    )
    header += ["against\nchosen", "95 % interval\nof difference", "p", "told\napart"]
    return Table(header, rows, notes=[note])


def _seeds_table(result: Mapping[str, Any]) -> Table:
    """Make a table of the metrics over all splits: of accuracies, or of each method."""
    about, methods, metrics = result["seeds"], _methods(result), METRICS[result["task"]]
    differences, is_accuracy = about["differences"] or {}, result["task"] == "classification"
    rows = []
    for layer, entries in about["layers"].items():
        for method in methods[:1] if is_accuracy else methods:
            if is_accuracy:
                first, *others = (entries[each]["accuracy"] for each in methods)
                cells = [
                    layer,
                    spread_text(first, True),
                    interval_text((first["min"], first["max"])),
                ]
                cells += [spread_text(other, True) for other in others]
            else:
                spreads = (spread_text(entries[method][metric.key]) for metric in metrics)
                cells = [layer, method, *spreads]
            if differences and method == methods[0]:
                cells += _difference_cells(differences.get(layer), is_accuracy)
            elif differences:
                cells += ["", "", ""]
            rows.append(cells)
    if is_accuracy:
        name = about["layer"] if len(about["layer"]) < 12 else "chosen"
        header = ["layer", methods[0], "smallest - largest", *methods[1:]]
        against, note = [f"against\n{name}, points", "better in"], ", in percent."
    else:
        header = ["layer", "method", *(metric.title for metric in metrics)]
        against, note = [f"{metrics[0].title} against\nchosen"], "."
    note = f"Mean ± standard deviation over the splits{note}"
    if differences:
        header += [*against, "p", "told\napart"]
        note += f" {_T_TEST}"
    return Table(header, rows, 1 if is_accuracy else 2, notes=[note])


def _difference_cells(difference: Mapping[str, Any] | None, is_accuracy: bool) -> list[str]:
    """Format how a layer differs from the chosen one over the splits; None is the chosen one."""
    if difference is None:
        return ["chosen", "", ""] + [""] * is_accuracy
    mean, std, values = (difference[name] for name in ("mean", "std", "values"))
    if not is_accuracy:
        return [f"{-mean:+.3f} ± {std:.3f}", *test_cells(difference)]
    better = f"{sum(value < 0 for value in values)} of {len(values)}"
    return [f"{points_text(-mean, '+')} ± {100 * std:.1f}", better, *test_cells(difference)]


def _negated_interval_text(interval: Sequence[float] | None) -> str:
    """Format an interval of the best layer minus another one, seen from the other; '-' for None."""
    if interval is None:
        return "-"
    low, high = interval
    return f"{points_text(-high, '+')} to {points_text(-low, '+')}"


def _settings_table(result: Mapping[str, Any]) -> Table:
    """Make a table of the setting that was chosen for each layer and method."""
    rows = [
        (
            *(layer, method),
            _layer_cells(result["layers"][layer], method, entry)["chosen"],
            percent_text(entry["validation_accuracy"]),
            percent_text(entry["accuracy"]),
            interval_text(entry["interval"]),
            f"{entry['seconds']:.1f}",
        )
        for layer, method, entry in layer_results(result)
    ]
    header = ("layer", "method", "chosen", "validation", "test", "95 % interval", "seconds")
    return Table(header, rows, left=2)


def _few_shot_table(result: Mapping[str, Any]) -> Table | None:
    """Make a table of the accuracies with few training rows per class; None without few-shot."""
    of_layers = {
        (layer, method): entry["few_shot"]
        for layer, method, entry in layer_results(result)
        if "few_shot" in entry
    }
    if not of_layers:
        return None
    rows = [
        (*names, *(f"{spread_text(each, True)} %" for each in entries.values()))
        for names, entries in of_layers.items()
    ]
    first = next(iter(of_layers.values()))  # all layers and methods have the same draws
    return Table(
        ("layer", "method", *(f"{shots} a class" for shots in first)),
        rows,
        left=2,
        title="Few-shot, mean ± standard deviation over the draws:",
        notes=[text for shots, entry in first.items() if (text := _shortage_text(shots, entry))],
    )


def _shortage_text(shots: str, entry: Mapping[str, Any]) -> str:
    """Return a note if classes have fewer training rows than the draws ask for, or ''."""
    fewest, most = entry["rows_per_class"]
    if most < int(shots):
        found = str(most) if fewest == most else f"{fewest} to {most}"
        return (
            f"{shots} a class: no class has so many training rows; all of them are taken, {found} "
            "a class."
        )
    if fewest < int(shots):
        return f"{shots} a class: some classes have fewer training rows, {fewest} at least."
    return ""


def pixel_classes_table(result: Mapping[str, Any], most: int | None) -> tuple[Table, int]:
    """Make a table of the classes of the test images, those with most pixels first.

    Args:
        result: content of probe.json for masks.
        most: maximum number of classes, or None for all.

    Returns:
        the table, and the number of all these classes.
    """
    pixels = result["pixels_of_classes"]
    order = sorted((i for i, count in enumerate(pixels) if count), key=lambda i: -pixels[i])
    rows = [
        (
            result["classes"][i],
            score_text(result["iou"][i]),
            score_text(result["accuracy_of_classes"][i]),
            percent_text(pixels[i] / sum(pixels)),
        )
        for i in order[:most]
    ]
    return Table(("class", "IoU", "accuracy", "share of\ntest pixels"), rows), len(order)


def _listed_classes(result: Mapping[str, Any], is_whole: bool) -> Table:
    """Make the table of classes with a note about those that are left out."""
    table, count = pixel_classes_table(result, None if is_whole else _CLASSES)
    more = count - len(table.rows)
    notes = [f"and {more} more classes; job.show=all shows them."] if more else []
    return replace(table, notes=notes)


def _facts(result: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return (name, text) of what the metrics rest on, of the files, and of what follows."""
    split, label_column = result["split"], result["split"].get("label_column")
    is_classes = result["task"] == "classification"
    notes = notes_of_layers(result, _methods(result))
    if len(notes) > _NOTES:
        notes = [*notes[:_NOTES], f"and {len(notes) - _NOTES} more, in probe.json"]
    store = parse_path(result["store"])
    folder = store if store.is_dir() else store.parent
    files = [layout.PROBE, result["predictions"]["file"]]
    commands = [command_text("job=report", f"store={shown_path(store)}")]
    if result["head"]:
        files.append(result["head"]["file"])
        commands.append(command_text("job=predict", f"store={shown_path(store)}", "data=./new"))
    task = None if is_classes and not label_column else f"{result['task']}: {result['task_reason']}"
    return [
        ("task", task),
        *_rows_facts(result),
        ("split", split_text(split)),
        ("groups", groups_text(split["groups"])),
        *(_class_facts(result) if is_classes else [("interval", _resamples_text(result))]),
        ("notes", "\n".join(notes) or None),
        ("wrote", "\n".join([*files, f"in {shown_path(folder)}"])),
        ("next", "\n".join(commands)),
    ]


def _rows_facts(result: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return (name, text) of the rows and what is predicted of them."""
    if result["task"] == "segmentation":
        masks, classes = result["masks"], result["classes"]
        used = f"{masks['rows']} used, {counted(masks['num_refused'], 'row')} without a usable one"
        ignored = f"pixels of {masks['ignore']} are ignored"
        if masks["ignore"] is None:
            ignored = "no number is ignored"
        untested = len(classes) - sum(count > 0 for count in result["pixels_of_classes"])
        not_tested = f", {untested} not in test images" if untested else ""
        return [("masks", f"{used}; {ignored}"), ("classes", f"{len(classes)}{not_tested}")]
    if result["task"] == "classification":
        return [("rows", f"{result['rows_labelled']} labelled, {len(result['classes'])} classes")]
    rows = f"{result['rows_labelled']} with a value of {result['split']['label_column']}"
    if result["task"] == "multilabel":
        targets = result["targets"]
        more = f" and {len(targets) - _LABELS_NAMED} more" if targets[_LABELS_NAMED:] else ""
        rows += f", {counted(len(targets), 'label')}: {', '.join(targets[:_LABELS_NAMED])}{more}"
    return [("rows", rows)]


def _class_facts(result: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return (name, text) of what the accuracy of classes rests on."""
    calibration = folds = None
    if (temperature := result.get("calibration_temperature")) is not None:
        calibration = f"logits divided by {temperature:.3f} (validation rows)"
    if of_folds := result.get("folds"):
        mean, std = percent_text(of_folds["mean"]), percent_text(of_folds["std"])
        folds = f"mean {mean}, standard deviation {std}"
    bootstrap, seeds = result["bootstrap"], result["seeds"]
    return [
        ("chance", chance_text(result)),
        ("metrics", metrics_text(result)),
        ("calibration", calibration),
        ("intervals", intervals_text(bootstrap) if bootstrap else None),
        ("over splits", seeds_metrics_text(seeds) or None if seeds else None),
        ("folds", folds),
        ("errors", errors_text(result)),
        ("duplicates", near_text(result)),
    ]


def _resamples_text(result: Mapping[str, Any]) -> str | None:
    """Describe how the interval of the metric of the answer was found; None without one."""
    if result["interval"] is None:
        return None
    return f"{result['resamples']} bootstrap resamples of {result['units']} {result['unit']}s"
