"""Contents of the files of job=probe: probe.json as it is, and what predictions.csv adds to it."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.analysis.probe import is_of_answer, layer_results, read_prediction_lines
from featx.base import as_utf8, csv_cell, csv_line
from featx.export.report.html import without_folder
from featx.store import FeatureStore, layout, read_result
from featx.types import Json

_SPLITS = {"holdout": "hold-out", "column": "given split", "test_store": "another store"}
"""Kind of split -> its name for people."""


ROLES = ("", "training", "validation", "test")
"""Roles of rows in the split; the first is for rows without one."""

TEST = ROLES.index("test")

_ROLE_OF = {"train": 1, "validation": 2, "test": TEST}
"""Text in predictions.csv -> index into ROLES."""


@dataclass(frozen=True)
class TestPredictions:
    """Contents of predictions.csv for classes.

    Attributes:
        roles: (N,) index into ROLES of each row of the store.
        wrong: layer -> {row: predicted class} of its errors, with the first method.
        errors: errors of the layer that each fold chose, the largest probability first. Each has
            `row` (None if it belongs to another store), `cell` (its key as in the file), `key` (an
            absolute path without its folders), `true`, `predicted`, and `p_true` and `p_predicted`
            or None.
        confidence: mean probability of the predicted class with these layers, or None.
        test_store: path of the other store whose rows were tested, or None.
    """

    roles: npt.NDArray[np.int8]
    wrong: dict[str, dict[int, str]]
    errors: list[Json]
    confidence: float | None
    test_store: str | None


@dataclass(frozen=True)
class ValuePredictions:
    """True and predicted values of the test rows, (n, T) float64 each; n is 0 without the file."""

    truth: npt.NDArray[np.float64]
    predicted: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Probes:
    """Contents of the files of the probe.

    Attributes:
        note: reason why there are none, or a warning, or ''.
        result: contents of probe.json, or None.
        confusion: (C, C) int64; row i, column j: rows of class i that were predicted as j. None for
            other tasks, and with too many classes.
        leakage_layer: layer in which near-duplicates across the split were searched, or ''.
        leaked_pairs: (row, training row, cosine) of some of them; none if the test rows are of
            another store, or the probe of another state of this one.
        predicted: contents of predictions.csv for classes, or None if it is missing or of another
            probe.
        values: contents of predictions.csv for numbers and several labels.
    """

    note: str
    result: Json | None = None
    confusion: npt.NDArray[np.int64] | None = None
    leakage_layer: str = ""
    leaked_pairs: tuple[tuple[int, int, float], ...] = ()
    predicted: TestPredictions | None = None
    values: ValuePredictions | None = None

    @property
    def task(self) -> str:
        """Task of the probe, or '' without one."""
        return "" if self.result is None else str(self.result["task"])

    @property
    def layer(self) -> str:
        """Best layer, or '' without a probe."""
        return "" if self.result is None else str(self.result["layer"])

    @property
    def split(self) -> str:
        """Kind of the split with its seed, or its number of folds."""
        if self.result is None:
            return ""
        split = self.result["split"]
        if split["kind"] == "kfold":
            return f"{split['folds']} folds"
        return f"{_SPLITS.get(split['kind'], split['kind'])}, seed {split.get('seed')}"

    @property
    def majority(self) -> float:
        """Accuracy of always predicting the class with most test rows."""
        if self.result is None or self.task != "classification" or not self.result["rows"]:
            return 0.0
        return float(max(self.result["support"]) / self.result["rows"])

    def of_method(self, method: str) -> dict[str, Mapping[str, object]]:
        """Return layer -> entry of one method, in the order of the layers."""
        results = [] if self.result is None else layer_results(self.result)
        return {layer: entry for layer, name, entry in results if name == method}

    @property
    def of_best_method(self) -> dict[str, Json]:
        """Layer -> entry of the method of the best layer."""
        return {} if self.result is None else self.of_method(str(self.result["method"]))


def probes_of(store: FeatureStore) -> Probes:
    """Read probe.json and predictions.csv of a store."""
    folder = store.folder
    path = folder / layout.PROBE
    try:
        result = read_result(path)
    except FileNotFoundError:
        return Probes("No probe yet.")
    except (OSError, ValueError) as error:
        return Probes(f"{layout.PROBE} cannot be read: {error}.")
    try:
        note = ""
        if result["rows_sha256"] != store.rows_sha256:
            note = (
                f"{layout.PROBE} belongs to another state of this store (its rows differ). "
                "The results below are of that state; run job=probe again."
            )
        if result["task"] == "segmentation":
            return Probes(note, result)
        if result["task"] != "classification":
            return Probes(note, result, values=read_values(result, folder))
        confusion, num_classes = None, len(result["classes"])
        if result["confusion"] is not None:
            confusion = np.array(result["confusion"], np.int64)
            if confusion.shape != (num_classes, num_classes):
                raise ValueError(f"a confusion matrix of {confusion.shape}, {num_classes} classes")
        row_of = {str(key): row for row, key in enumerate(store.keys.tolist())}
        leakage, pairs = result["near_duplicates"], []
        # Keys of another store may be those of other images of this one.
        if not note and result["split"]["kind"] != "test_store":
            pairs = [
                (row_of[each["test"]], row_of[each["training"]], float(each["cosine"]))
                for each in leakage["pairs"]
                if each["test"] in row_of and each["training"] in row_of
            ]
        predicted = None if note else read_predictions(result, folder, row_of)
        return Probes(note, result, confusion, str(leakage["layer"]), tuple(pairs), predicted)
    except (LookupError, TypeError, ValueError, AttributeError, csv.Error) as error:
        return malformed(error)


def malformed(error: Exception) -> Probes:
    """Return the probes of files that are not as job=probe writes them."""
    return Probes(
        f"{layout.PROBE} or {layout.PROBE_PREDICTIONS} is not as job=probe writes it: {error!r}."
    )


def read_predictions(
    result: Json, folder: Path, row_of: Mapping[str, int]
) -> TestPredictions | None:
    """Read predictions.csv of classes; None if it is missing or does not belong to probe.json."""
    lines = read_prediction_lines(folder, result)
    if lines is None:
        return None
    # Keys of another store say nothing about the rows of this one.
    has_test_store = result["split"]["kind"] == "test_store"
    roles = np.zeros(len(row_of), np.int8)
    wrong: dict[str, dict[int, str]] = {layer: {} for layer in result["layers"]}
    errors: list[Json] = []
    confidences = []
    row_of_cell = {csv_cell(key): row for key, row in row_of.items()}
    for line in lines:
        test = line["split"] == "test"
        row = None if test and has_test_store else row_of_cell.get(line["key"])
        if row is not None:
            roles[row] = _ROLE_OF[line["split"]]
        if not test or line["method"] != result["method"]:
            continue
        is_chosen = is_of_answer(line, result)
        if is_chosen and line["p_predicted"]:
            confidences.append(float(line["p_predicted"]))
        if line["true"] == line["predicted"]:
            continue
        predicted = as_utf8(line["predicted"])
        if row is not None:
            wrong[line["layer"]][row] = predicted
        if is_chosen:
            errors.append(
                {
                    "row": row,
                    "cell": line["key"],
                    "key": without_folder(as_utf8(line["key"])),
                    "true": as_utf8(line["true"]),
                    "predicted": predicted,
                    "p_true": float(line["p_true"]) if line["p_true"] else None,
                    "p_predicted": float(line["p_predicted"]) if line["p_predicted"] else None,
                }
            )
    errors.sort(key=lambda error: -(error["p_predicted"] or 0))
    mean = float(np.mean(confidences)) if confidences else None
    test_store = str(result["split"]["test_store"]) if has_test_store else None
    return TestPredictions(roles, wrong, errors, mean, test_store)


def read_values(result: Json, folder: Path) -> ValuePredictions:
    """Read predictions.csv of numbers or of several labels, with the layer that each fold chose."""
    targets = [str(name) for name in result["targets"]]
    numbers = result["task"] == "regression"
    true_columns = ["true"] if numbers else csv_line(f"true:{name}" for name in targets)
    predicted_columns = ["predicted"] if numbers else csv_line(f"score:{name}" for name in targets)
    truth, predicted = [], []
    for line in read_prediction_lines(folder, result) or ():
        if is_of_answer(line, result):
            truth.append([float(line[name]) for name in true_columns])
            predicted.append([float(line[name]) for name in predicted_columns])
    shape = len(truth), len(true_columns)
    return ValuePredictions(np.reshape(truth, shape), np.reshape(predicted, shape))
