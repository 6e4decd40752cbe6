"""Contents of probe.json and predictions.csv for the report, or a note if they are unusable."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe import output_folder
from featx.export.report.layer_comparison import (
    ComparedLayers,
    Difference,
    comparisons,
    differences_of,
)
from featx.export.report.predictions_file import TestPredictions, read_predictions
from featx.export.report.probe_metrics import Metric, SeedsAccuracy, metrics_of, repeated_of
from featx.export.report.segmentation_results import SegmentationResults, segmentation_results
from featx.export.report.value_results import ValueResults, value_results
from featx.export.selection import as_utf8
from featx.store import FeatureStore, layout, read_result

_METHODS = ("linear", "knn", "ridge", "attentive")


@dataclass(frozen=True)
class Score:
    """Accuracy on some test rows.

    Attributes:
        rows: number of rows.
        correct: number of rows that were predicted right.
        accuracy: share of correct rows, in [0, 1].
        interval: its 95 % interval.
    """

    rows: int
    correct: int
    accuracy: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class MethodResult:
    """Results of one method on one layer; unknown values are None.

    Attributes:
        layer: name of the layer.
        method: 'linear', 'knn', 'ridge' or 'attentive'.
        best: whether this is the best layer with its method.
        width: number of values of the vector of a row.
        accuracy: accuracy on the test rows, in [0, 1].
        interval: its 95 % interval.
        calibration: calibration error.
        few: (rows per class, mean accuracy, standard deviation) of few-shot fits.
        metrics: all metrics.
    """

    layer: str
    method: str
    best: bool
    width: int
    accuracy: float
    interval: tuple[float, float]
    calibration: float | None
    few: list[tuple[str, float, float | None]]
    metrics: tuple[Metric, ...]


@dataclass(frozen=True)
class Leakage:
    """Near-duplicates of training rows among the test rows.

    Attributes:
        layer: layer whose standardised vectors were compared.
        cosine: cosine from which rows count as near-duplicates.
        rows: number of test rows, or None if they were not searched.
        not_checked: reason why they were not, or ''.
        without: accuracy without these rows, or None.
        pairs: (row, training row, cosine) of some of them, in this store.
    """

    layer: str
    cosine: float
    rows: int | None
    not_checked: str
    without: Score | None
    pairs: list[tuple[int, int, float]]


@dataclass(frozen=True)
class Probes:
    """Contents of the files of the probe.

    Attributes:
        note: reason why there are none, or a warning, or ''.
        layer: best layer.
        method: its method.
        score: its accuracy; for k-fold over several layers, of the nested choice.
        folds: number of folds, or 0.
        layer_of_folds: number of folds by layer that they chose, or empty.
        split: description of the split.
        num_fit: number of training rows of the first split, without those for validation.
        num_validation: number of its validation rows.
        finished: date and time as text.
        notes: notes of the job.
        results: all results in the order of the file.
        compared: comparisons of the best layer with the others, the most similar first.
        leaked: near-duplicates across the split.
        calibration: calibration error of the best layer, or None.
        classes: class names.
        confusion: (C, C) int64; row i, column j: rows of class i that were predicted as j.
        predicted: contents of predictions.csv, or None if it is missing or of another probe.
        metrics: all metrics of the result.
        repeated: accuracy over the splits of several seeds, or None.
        repeated_differences: other layer -> its difference over these splits.
        values: results of a probe of numbers or of several labels; all others are then empty.
        segmentation: results of a probe of the classes of pixels; all others are then empty.
    """

    note: str
    layer: str = ""
    method: str = ""
    score: Score | None = None
    folds: int = 0
    layer_of_folds: dict[str, int] = field(default_factory=dict)
    split: str = ""
    num_fit: int = 0
    num_validation: int = 0
    finished: str = ""
    notes: tuple[str, ...] = ()
    results: tuple[MethodResult, ...] = ()
    compared: tuple[ComparedLayers, ...] = ()
    leaked: Leakage | None = None
    calibration: float | None = None
    classes: tuple[str, ...] = ()
    confusion: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    predicted: TestPredictions | None = None
    metrics: tuple[Metric, ...] = ()
    repeated: SeedsAccuracy | None = None
    repeated_differences: Mapping[str, Difference] = field(default_factory=dict)
    values: ValueResults | None = None
    segmentation: SegmentationResults | None = None

    @property
    def chance(self) -> float:
        """Accuracy of guessing a class."""
        return 1 / max(1, len(self.classes))

    @property
    def majority(self) -> float:
        """Accuracy of always predicting the class with most test rows."""
        support = self.confusion.sum(1)
        return float(support.max() / support.sum()) if support.sum() else 0.0

    def of_method(self, method: str) -> list[MethodResult]:
        """Return the results of one method, in the order of the layers."""
        return [each for each in self.results if each.method == method]

    def result(self, layer: str, method: str) -> MethodResult | None:
        """Return the result of a method on a layer, or None."""
        return next((each for each in self.of_method(method) if each.layer == layer), None)


def probes_of(store: FeatureStore) -> Probes:
    """Read probe.json and predictions.csv of a store."""
    folder = output_folder(store)
    path = folder / layout.PROBE
    try:
        result = read_result(path)
    except FileNotFoundError:
        return Probes("No probe yet.")
    except (OSError, ValueError) as error:
        return Probes(f"{layout.PROBE} cannot be read: {error}.")
    try:
        note = ""
        if result["fingerprint"] != str(store.attrs.get("fingerprint")):
            note = (
                f"{layout.PROBE} belongs to another state of this store (its fingerprint differs). "
                "The results below are of that state; run job=probe again."
            )
        if result["task"] != "classification":
            is_segmentation = result["task"] == "segmentation"
            values = None if is_segmentation else value_results(result, folder)
            segmentation = segmentation_results(result) if is_segmentation else None
            return Probes(
                note,
                layer=_utf8(result["layer"]),
                split=_split_text(result["split"]),
                finished=str(result["finished"]),
                notes=tuple(map(_utf8, result["notes_on_rows"])),
                values=values,
                segmentation=segmentation,
            )
        row_of = {str(key): row for row, key in enumerate(store.keys.tolist())}
        return _as_probes(result, note, folder, row_of)
    except (LookupError, TypeError, ValueError, AttributeError, csv.Error) as error:
        return Probes(
            f"{layout.PROBE} or {layout.PROBE_PREDICTIONS} is not as job=probe writes it: "
            f"{error!r}."
        )


def _as_probes(
    result: Mapping[str, Any], note: str, folder: Path, row_of: Mapping[str, int]
) -> Probes:
    """Convert the contents of probe.json.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, csv.Error: they are malformed.
    """
    best = str(result["layer"]), str(result["method"])
    results = [
        _method_result(layer, method, about, (layer, method) == best)
        for layer, about in result["layers"].items()
        for method in _METHODS
        if method in about
    ]
    split, classes = result["split"], tuple(_utf8(name) for name in result["classes"])
    confusion = np.array(result["confusion"], np.int64)
    if confusion.shape != (len(classes), len(classes)):
        raise ValueError(f"a confusion matrix of {confusion.shape} for {len(classes)} classes")
    folds = int(split["folds"]) if split["kind"] == "kfold" else 0
    return Probes(
        note=note,
        layer=best[0],
        method=best[1],
        score=_score(result),
        folds=folds,
        layer_of_folds=dict(Counter(map(str, result.get("layer_of_folds", ())))),
        split=_split_text(split),
        num_fit=int(split["fit"][0]),
        num_validation=int(split["validation_rows"][0]),
        finished=str(result["finished"]),
        notes=tuple(map(_utf8, result["notes_on_rows"])),
        results=tuple(results),
        compared=comparisons(result["paired_tests"]),
        leaked=_leakage(result["near_duplicates"], row_of),
        calibration=_number(result["calibration_error"]),
        classes=classes,
        confusion=confusion,
        predicted=None if note else read_predictions(result, folder, row_of, best),
        metrics=metrics_of(result, result),
        repeated=repeated_of(result["seeds"]),
        repeated_differences=differences_of(result["seeds"]),
    )


_SPLITS = {"holdout": "hold-out", "column": "given split", "test_store": "another store"}
"""Kind of split -> its name for people."""


def _split_text(split: Mapping[str, Any]) -> str:
    """Return the kind of a split with its seed, or its number of folds."""
    kind = str(split["kind"])
    if kind == "kfold":
        return f"{int(split['folds'])} folds"
    return f"{_SPLITS.get(kind, kind)}, seed {split.get('seed')}"


def _score(entry: Mapping[str, Any]) -> Score:
    """Convert an accuracy with its counts."""
    low, high = entry["interval"]
    return Score(
        int(entry["rows"]),
        int(entry["correct"]),
        float(entry["accuracy"]),
        (float(low), float(high)),
    )


def _method_result(
    layer: str, method: str, of_layer: Mapping[str, Any], best: bool
) -> MethodResult:
    """Convert the entry of one method."""
    about = of_layer[method]
    low, high = about["interval"]
    few_shot = [
        (str(shots), float(each["mean"]), _number(each["std"]))
        for shots, each in about.get("few_shot", {}).items()
    ]
    return MethodResult(
        layer, method, best, int(of_layer["features"]), float(about["accuracy"]),
        (float(low), float(high)), _number(about["calibration_error"]), few_shot,
        metrics_of(about, None),
    )  # fmt: skip


def _leakage(entry: Mapping[str, Any], row_of: Mapping[str, int]) -> Leakage:
    """Convert the near-duplicates across the split."""
    pairs = [
        (row_of[each["test"]], row_of[each["training"]], float(each["cosine"]))
        for each in entry["pairs"]
        if each["test"] in row_of and each["training"] in row_of
    ]
    return Leakage(
        str(entry["layer"]),
        float(entry["cosine"]),
        None if entry["rows"] is None else int(entry["rows"]),
        str(entry["not_checked"] or ""),
        None if entry["without"] is None else _score(entry["without"]),
        pairs,
    )


def _number(value: object) -> float | None:
    """Return a value as float or None. Raises TypeError or ValueError for anything else."""
    return None if value is None else float(value)  # type: ignore[arg-type]  # or it raises


def _utf8(text: object) -> str:
    """Return a text of the files as UTF-8 text."""
    return as_utf8(str(text))
