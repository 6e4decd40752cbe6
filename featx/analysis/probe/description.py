"""Description of what job=probe found, from the content of probe.json: sentences, tables, facts.

The terminal prints all of it, and a page shows the tables among figures.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from featx.analysis.probe.metrics import METRICS, Metric
from featx.analysis.probe.tables import (
    accuracies_table,
    few_shot_table,
    layer_results,
    metrics_table,
    not_available,
    pixel_classes_table,
    seeds_table,
    settings_table,
)
from featx.analysis.probe.texts import (
    answer_text,
    interval_text,
    paired_text,
    score_text,
    seeds_answer_text,
    spread_text,
)
from featx.base import Section, command_text, percent_text, shown_path
from featx.errors import counted, first_names
from featx.storage import folder_of, parse_path
from featx.store import layout
from featx.types import Json

_FOLD = re.compile(r"^fold \d+ of \d+: ")

_CLASSES = 20
"""Number of classes of pixels in the printed table, those with most pixels."""

_LABELS_NAMED = 8
"""Number of labels that a line names."""

_PAIRS_NAMED = 3
"""Number of pairs of classes that a line names."""

_NOTES = 12
"""Number of notes that are printed; probe.json has all."""


def probe_sections(result: Json, is_whole: bool) -> list[Section | None]:
    """Describe probe.json: the answer, tables, what it rests on, and what follows; with `is_whole`,
    also what few need.
    """
    task = result["task"]
    sections: list[Section | None] = []
    if result["seeds"]:
        sections += [seeds_answer_text(result), seeds_table(result)]
    sections.append(answer_text(result))
    if task == "classification":
        sections.append(accuracies_table(result))
        if is_whole:
            sections.append(settings_table(result))
            sections += [
                metrics_table(result, ("method",), METRICS[task][1:]),
                paired_text(result),
            ]
        sections.append(few_shot_table(result))
    elif task == "segmentation":
        sections.append(metrics_table(result, ("width", "patches", "l2"), METRICS[task]))
        note = "and {more} more classes; job.show=all shows them."
        sections.append(pixel_classes_table(result, None if is_whole else _CLASSES, note))
    else:
        sections.append(metrics_table(result, ("method", "width", "chosen"), METRICS[task]))
    return [*sections, _facts(result)]


def _facts(result: Json) -> list[tuple[str, str | None]]:
    """Return (name, text) of what the metrics rest on, of the files, and of what follows."""
    split, groups = result["split"], result["split"]["groups"]
    is_classes = result["task"] == "classification"
    task: str | None = f"{result['task']}: {result['task_reason']}"
    if is_classes and "label_column" not in split:
        task = None
    sizes = (
        f"{split['fit'][0]} fitted, {split['validation_rows'][0]} for validation, "
        f"{split['test_rows'][0]} tested; seed {split['seed']}"
    )
    kind = f"{split['folds']} folds, each about " if "folds" in split else f"{split['kind']}, "
    groups_text = groups and (
        f"rows of one {groups['by']} stay on one side: {counted(groups['groups'], 'group')}, the "
        f"largest of {counted(groups['largest'], 'row')}"
    )
    resamples = None
    if not is_classes and result["interval"] is not None:
        units = f"{result['units']} {result['unit']}s"
        resamples = f"{result['resamples']} bootstrap resamples of {units}"
    notes = [*result["notes_on_rows"], *_notes_of_layers(result)]
    if len(notes) > _NOTES:
        notes = [*notes[:_NOTES], f"and {len(notes) - _NOTES} more, in probe.json"]
    store = parse_path(result["store"])
    folder = folder_of(store)
    files = [layout.PROBE, result["predictions"]["file"]]
    commands = [command_text("job=report", f"store={shown_path(store)}")]
    if result["head"]:
        files.append(result["head"]["file"])
        commands.append(command_text("job=predict", f"store={shown_path(store)}", "data=./new"))
    return [
        ("task", task),
        *_rows_facts(result),
        ("split", kind + sizes),
        ("groups", groups_text),
        *(_class_facts(result) if is_classes else [("interval", resamples)]),
        ("notes", "\n".join(notes) or None),
        ("wrote", "\n".join([*files, f"in {shown_path(folder)}"])),
        ("next", "\n".join(commands)),
    ]


def _rows_facts(result: Json) -> list[tuple[str, str | None]]:
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
        names = first_names(targets, _LABELS_NAMED)
        rows += f", {counted(len(targets), 'label')}: {names}"
    return [("rows", rows)]


def _class_facts(result: Json) -> list[tuple[str, str | None]]:
    support = [count for count in result["support"] if count is not None]
    largest = percent_text(max(support) / max(1, sum(support)))
    calibration = folds = over_splits = None
    if (temperature := result.get("calibration_temperature")) is not None:
        calibration = f"logits divided by {temperature:.3f} (validation rows)"
    if of_folds := result.get("folds"):
        mean, std = percent_text(of_folds["mean"]), percent_text(of_folds["std"])
        folds = f"mean {mean}, standard deviation {std}"
    accuracy, *others = METRICS["classification"]
    scores = [
        f"{metric.title} {score_text(result[metric.key], metric.is_share)}"
        + (f" ({result['calibration_bins']} bins)" if metric.key == "calibration_error" else "")
        for metric in others
        if result[metric.key] is not None
    ]
    if result["seeds"]:
        chosen = result["seeds"]["chosen"]
        spreads = [
            f"{metric.title} {spread_text(chosen[metric.key], metric.is_share)}"
            + " %" * metric.is_share
            for metric in others
            if chosen[metric.key] is not None
        ]
        over_splits = "\n".join(_in_lines(spreads, 3)) or None
    return [
        ("chance", f"{percent_text(1 / len(result['classes']))}, largest class {largest}"),
        ("metrics", "\n".join([*_in_lines(scores, 4), *not_available(result)])),
        ("calibration", calibration),
        ("intervals", _intervals_text(result["bootstrap"], (accuracy, *others))),
        ("over splits", over_splits),
        ("folds", folds),
        ("errors", _errors_text(result)),
        ("duplicates", _near_text(result)),
    ]


def _intervals_text(bootstrap: Json | None, metrics: Sequence[Metric]) -> str | None:
    """Return the bootstrap intervals of all metrics; None if there are none."""
    if bootstrap is None:
        return None
    texts = [
        f"{metric.title} {interval_text(interval, metric.is_share)}{' %' * metric.is_share}"
        for metric in metrics
        if (interval := bootstrap["intervals"][metric.key]) is not None
    ]
    undefined = [
        f"{count} resamples without {name} are left out of its interval"
        for name, count in bootstrap["undefined"].items()
    ]
    units = counted(bootstrap["units"], bootstrap["unit"])
    about = f"95 %, {bootstrap['resamples']} resamples of {units}"
    return "\n".join([*_in_lines(texts, 3), about, *undefined])


def _in_lines(texts: Sequence[str], count: int) -> list[str]:
    return [", ".join(texts[i : i + count]) for i in range(0, len(texts), count)]


def _errors_text(result: Json) -> str:
    """Return the number of wrong predictions, and the pairs of classes confused most."""
    names = result["classes"]
    pairs = [
        (count, names[i], names[j])
        for i, row in enumerate(result["confusion"] or ())
        for j, count in enumerate(row)
        if i != j and count
    ]
    pairs.sort(key=lambda pair: -pair[0])
    texts = [f"{true} as {predicted} {count}" for count, true, predicted in pairs[:_PAIRS_NAMED]]
    if num_more := len(pairs[_PAIRS_NAMED:]):
        texts.append(f"{num_more} more pairs of classes")
    total = f"{result['rows'] - result['correct']} of {result['rows']}"
    return f"{total}: {', '.join(texts)}" if pairs else total


def _near_text(result: Json) -> str:
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


def _notes_of_layers(result: Json) -> list[str]:
    """Return the notes of all layers and methods, a line for equal ones."""
    folds_of: dict[str, Counter[str]] = {}
    for layer, method, entry in layer_results(result):
        for note in entry["notes"]:
            folds = folds_of.setdefault(_FOLD.sub("", note), Counter())
            folds[f"{layer}, {method}"] += bool(_FOLD.match(note))
    return [
        "; ".join(
            f"{name} ({counted(count, 'fold')})" if count else name for name, count in folds.items()
        )
        + f": {note}"
        for note, folds in folds_of.items()
    ]
