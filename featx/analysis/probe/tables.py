"""Tables of what job=probe found, from the content of probe.json."""

from __future__ import annotations

from collections.abc import Sequence

from featx.analysis.probe.metrics import METHODS, METRICS, Metric
from featx.analysis.probe.texts import interval_text, points_text, score_text, spread_text
from featx.base import Table, number_text, percent_text
from featx.types import Json

_T_TEST = (
    "p: corrected resampled t-test (Nadeau and Bengio, 2003), corrected for the number of layers "
    "(Holm); told apart: p < 0.05."
)


def layer_results(result: Json) -> list[tuple[str, str, Json]]:
    """Return layer, method and entry of each result, in the order of probe.json."""
    return [
        (layer, method, entry)
        for layer, about in result["layers"].items()
        for method, entry in about.items()
        if method in METHODS
    ]


def not_available(entry: Json) -> list[str]:
    """Return one line per reason for which metrics are not available."""
    titles = {metric.key: metric.title for metrics in METRICS.values() for metric in metrics}
    names: dict[str, list[str]] = {}
    for key, reason in entry.get("not_available", {}).items():
        names.setdefault(reason, []).append(titles[key])
    return [f"not available: {', '.join(each)}; {reason}" for reason, each in names.items()]


def _methods(result: Json) -> list[str]:
    return list(dict.fromkeys(method for _, method, _ in layer_results(result)))


def metrics_table(result: Json, columns: Sequence[str], metrics: Sequence[Metric]) -> Table:
    """Make a table of metrics of probe.json with one row per layer and method, in the order of the
    store, after columns of `_layer_cells`.
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
    titles = ("\n".join(metric.title.rsplit(" ", 1)) for metric in metrics)
    header = ("layer", *columns, *titles)
    return Table(header, rows, 1 + ("method" in columns), notes=reasons, best=best)


def _layer_cells(about: Json, method: str, entry: Json) -> dict[str, str]:
    name = "k" if method == "knn" else "l2"
    # With several folds it is a list of their settings, which are named once each.
    settings = entry[name] if isinstance(entry[name], list) else [entry[name]]
    setting = ",".join(f"{each:g}" for each in dict.fromkeys(settings))
    return {
        "method": method,
        "width": str(about["features"]),
        "patches": "{} x {}".format(*about.get("grid", ("", ""))),
        name: setting,
        "chosen": f"{name}={setting}",
    }


def _test_cells(test: Json) -> tuple[str, str]:
    """Format the corrected p-value of a test, and whether it tells two layers apart."""
    p, told_apart = test["p_holm"], test["told_apart"]
    answer = "-" if told_apart is None else "yes" if told_apart else "no"
    return "-" if p is None else f"{p:.2g}", answer


def accuracies_table(result: Json) -> Table:
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
            # The tests are of the chosen layer minus another one; here the other one is seen.
            edges = [points_text(-edge, "+") for edge in reversed(test["interval"] or ())]
            cells += [points_text(-test["difference"], "+"), " to ".join(edges) or "-"]
            cells += _test_cells(test)
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


def seeds_table(result: Json) -> Table:
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


def _difference_cells(difference: Json | None, is_accuracy: bool) -> list[str]:
    """Format how a layer differs from the chosen one over the splits; None is the chosen one."""
    if difference is None:
        return ["chosen", "", ""] + [""] * is_accuracy
    mean, std, values = (difference[name] for name in ("mean", "std", "values"))
    if not is_accuracy:
        return [f"{number_text(-mean, sign='+')} ± {number_text(std)}", *_test_cells(difference)]
    better = f"{sum(value < 0 for value in values)} of {len(values)}"
    return [f"{points_text(-mean, '+')} ± {100 * std:.1f}", better, *_test_cells(difference)]


def settings_table(result: Json) -> Table:
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


def few_shot_table(result: Json) -> Table | None:
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


def _shortage_text(shots: str, entry: Json) -> str:
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


def pixel_classes_table(result: Json, most: int | None, note: str) -> Table:
    """Make a table of the classes of the test images in probe.json for masks, those with most
    pixels first. If more than `most` exist, `note` stands below with {count} of all and {more} left
    out.
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
    more = len(order) - len(rows)
    notes = [note.format(count=len(order), more=more)] if more else []
    return Table(("class", "IoU", "accuracy", "share of\ntest pixels"), rows, notes=notes)
