"""Contents of probe.json for the report, or a note if the file is missing or malformed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from featx.analysis.probe import output_folder
from featx.export.selection import as_utf8
from featx.store import FeatureStore, layout

CLASSES_SHOWN = 40
"""Maximum number of classes in the confusion matrix."""

PAIRS_SHOWN = 6
"""Maximum number of confused pairs of classes that are listed."""

_METHODS = ("linear", "knn", "ridge")


@dataclass(frozen=True)
class Probed:
    """Results of one method on one layer; unknown values are None.

    Attributes:
        layer: name of the layer.
        method: 'linear', 'knn' or 'ridge'.
        best: whether this is the best layer with its method.
        accuracy: accuracy on the test rows, in [0, 1].
        interval: its 95 % interval.
        balanced: balanced accuracy.
        top5: top-5 accuracy.
        calibration: calibration error.
        few: (rows per class, mean accuracy, standard deviation) of few-shot fits.
    """

    layer: str
    method: str
    best: bool
    accuracy: float
    interval: tuple[float, float]
    balanced: float | None
    top5: float | None
    calibration: float | None
    few: list[tuple[str, float, float | None]]


@dataclass(frozen=True)
class Confusion:
    """Confusion of classes on the test rows.

    Attributes:
        classes: names of at most CLASSES_SHOWN classes.
        counts: row i, column j: number of rows of class i that were predicted as j.
        left_out: number of classes that are not shown, those with the fewest mistakes.
        pairs: (rows, true class, predicted class) of the most frequent mistakes.
    """

    classes: list[str]
    counts: list[list[int]]
    left_out: int
    pairs: list[tuple[int, str, str]]


@dataclass(frozen=True)
class Probes:
    """Contents of probe.json.

    Attributes:
        note: reason why there are none, or a warning, or ''.
        layer: best layer.
        method: its method.
        rows: number of test rows.
        split: description of the split.
        finished: date and time as text.
        notes: notes of the job.
        results: all results in the order of the file.
        confusion: confusion of the best layer's method.
    """

    note: str
    layer: str = ""
    method: str = ""
    rows: int = 0
    split: str = ""
    finished: str = ""
    notes: tuple[str, ...] = ()
    results: tuple[Probed, ...] = ()
    confusion: Confusion | None = None


def probes_of(store: FeatureStore) -> Probes:
    """Read probe.json of a store."""
    path = output_folder(store) / layout.PROBE
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        root = as_utf8(str(store.root))
        return Probes(f"No probe yet: python -m featx job=probe store={root} fits one.")
    except (OSError, ValueError) as error:
        return Probes(f"{layout.PROBE} cannot be read: {error}.")
    try:
        if found["fingerprint"] != str(store.attrs.get("fingerprint")):
            note = (
                f"{layout.PROBE} belongs to another state of this store (its fingerprint differs). "
                "The results below are of that state; run job=probe again."
            )
        else:
            note = ""
        return _as_probes(found, note)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return Probes(f"{layout.PROBE} is not as job=probe writes it: {error!r}.")


def _as_probes(found: Mapping[str, Any], note: str) -> Probes:
    """Convert the contents of probe.json.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: they are malformed.
    """
    best = str(found["layer"]), str(found["method"])
    results = [
        _probed(layer, method, about[method], (layer, method) == best)
        for layer, about in found["layers"].items()
        for method in _METHODS
        if method in about
    ]
    split = found["split"]
    kind, seed = str(split["kind"]), split.get("seed")
    return Probes(
        note=note,
        layer=best[0],
        method=best[1],
        rows=int(found["rows"]),
        split=f"{split['folds']} folds" if kind == "kfold" else kind + f", seed {seed}",
        finished=str(found["finished"]),
        notes=(*_nested(found), *map(str, found["notes_on_rows"])),
        results=tuple(results),
        confusion=_confusion(list(map(_spelled, found["classes"])), found["confusion"]),
    )


def _nested(found: Mapping[str, Any]) -> list[str]:
    """Return a note on k-fold over several layers, which chooses the best layer on test rows."""
    if "layer_of_folds" not in found:
        return []
    low, high = found["interval"]
    return [
        f"With the layer chosen within the training rows of each fold, the accuracy is "
        f"{found['accuracy']:.1%} ({low:.1%} to {high:.1%}). The lines below are of layers chosen "
        "beforehand, and the best of them is an optimistic estimate."
    ]


def _probed(layer: str, method: str, about: Mapping[str, Any], best: bool) -> Probed:
    """Convert the entry of one method."""
    low, high = about["interval"]
    few = [
        (str(shots), float(each["mean"]), _number(each["std"]))
        for shots, each in about.get("few_shot", {}).items()
    ]
    return Probed(
        layer, method, best, float(about["accuracy"]), (float(low), float(high)),
        _number(about["balanced_accuracy"]), _number(about["top5"]),
        _number(about["calibration_error"]), few,
    )  # fmt: skip


def _confusion(classes: list[str], matrix: list[list[int]]) -> Confusion:
    """Select the classes with the most mistakes, and the most frequent mistakes."""
    counts = np.array(matrix, np.int64)
    if counts.shape != (len(classes), len(classes)):
        raise ValueError(f"a confusion matrix of {counts.shape} for {len(classes)} classes")
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS_SHOWN]
    places = [divmod(int(place), len(classes)) for place in order]
    pairs = [(int(wrong[i, j]), classes[i], classes[j]) for i, j in places if wrong[i, j]]
    mistakes = wrong.sum(0) + wrong.sum(1)
    shown = np.sort(np.argsort(-mistakes, kind="stable")[:CLASSES_SHOWN])
    return Confusion(
        classes=[classes[i] for i in shown.tolist()],
        counts=counts[np.ix_(shown, shown)].tolist(),
        left_out=len(classes) - len(shown),
        pairs=pairs,
    )


def _number(value: object) -> float | None:
    """Return a value as float or None. Raises TypeError or ValueError for anything else."""
    return None if value is None else float(value)  # type: ignore[arg-type]  # or it raises


def _spelled(name: object) -> str:
    """Return a class name as UTF-8 text."""
    return as_utf8(str(name))
