"""Contents of probe/predictions.csv for the report."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.base import csv_cell, csv_line
from featx.export.report.redaction import without_folder
from featx.export.selection import as_utf8
from featx.store import layout

ROLES = ("", "training", "validation", "test")
"""Roles of rows in the split; the first is for rows without one."""

_ROLE_OF = {"train": 1, "validation": 2, "test": 3}
"""Text in predictions.csv -> index into ROLES."""


@dataclass(frozen=True)
class ErrorRow:
    """A test row that was predicted wrong.

    Attributes:
        row: row of the store, or None if it belongs to another store.
        cell: its key as in predictions.csv.
        key: the same, an absolute path without its folders.
        true: true class.
        predicted: predicted class.
        p_true: probability of the true class, or None without probabilities.
        p_predicted: probability of the predicted class, or None.
    """

    row: int | None
    cell: str
    key: str
    true: str
    predicted: str
    p_true: float | None
    p_predicted: float | None


@dataclass(frozen=True)
class TestPredictions:
    """Contents of predictions.csv.

    Attributes:
        roles: (N,) index into ROLES of each row of the store.
        wrong: layer -> {row: predicted class} of its errors, with the first method.
        errors: errors of the best layer, the largest probability first.
        confidence: mean probability of the predicted class with the best layer, or None.
        test_store: path of the other store whose rows were tested, or None.
    """

    roles: npt.NDArray[np.int8]
    wrong: dict[str, dict[int, str]]
    errors: list[ErrorRow]
    confidence: float | None
    test_store: str | None


@dataclass(frozen=True)
class ValuePredictions:
    """True and predicted values of the test rows, (n, T) float64 each; n is 0 without the file."""

    truth: npt.NDArray[np.float64]
    predicted: npt.NDArray[np.float64]


def read_predictions(
    result: Mapping[str, Any], folder: Path, row_of: Mapping[str, int]
) -> TestPredictions | None:
    """Read predictions.csv of classes; None if it is missing or does not belong to probe.json."""
    lines = _lines(result, folder)
    if lines is None:
        return None
    # Keys of another store say nothing about the rows of this one.
    has_test_store = result["split"]["kind"] == "test_store"
    roles = np.zeros(len(row_of), np.int8)
    wrong: dict[str, dict[int, str]] = {layer: {} for layer in result["layers"]}
    errors, confidences = [], []
    row_of_cell = {csv_cell(key): row for key, row in row_of.items()}
    for line in lines:
        test = line["split"] == "test"
        row = None if test and has_test_store else row_of_cell.get(line["key"])
        if row is not None:
            roles[row] = _ROLE_OF[line["split"]]
        if not test or line["method"] != result["method"]:
            continue
        is_best = line["layer"] == result["layer"]
        if is_best and line["p_predicted"]:
            confidences.append(float(line["p_predicted"]))
        if line["true"] == line["predicted"]:
            continue
        predicted = as_utf8(line["predicted"])
        if row is not None:
            wrong[line["layer"]][row] = predicted
        if is_best:
            errors.append(
                ErrorRow(
                    row, line["key"], without_folder(as_utf8(line["key"])), as_utf8(line["true"]),
                    predicted,
                    float(line["p_true"]) if line["p_true"] else None,
                    float(line["p_predicted"]) if line["p_predicted"] else None,
                )
            )  # fmt: skip
    errors.sort(key=lambda error: -(error.p_predicted or 0))
    mean = float(np.mean(confidences)) if confidences else None
    test_store = str(result["split"]["test_store"]) if has_test_store else None
    return TestPredictions(roles, wrong, errors, mean, test_store)


def read_values(result: Mapping[str, Any], folder: Path) -> ValuePredictions:
    """Read predictions.csv of numbers or of several labels, with the layer that each fold chose."""
    targets = [str(name) for name in result["targets"]]
    numbers = result["task"] == "regression"
    true_columns = ["true"] if numbers else csv_line(f"true:{name}" for name in targets)
    predicted_columns = ["predicted"] if numbers else csv_line(f"score:{name}" for name in targets)
    layers = result.get("layer_of_folds") or [result["layer"]]
    truth, predicted = [], []
    for line in _lines(result, folder) or ():
        layer = layers[min(int(line["fold"] or 1), len(layers)) - 1]
        if (line["layer"], line["method"]) == (layer, result["method"]):
            truth.append([float(line[name]) for name in true_columns])
            predicted.append([float(line[name]) for name in predicted_columns])
    shape = len(truth), len(true_columns)
    return ValuePredictions(np.reshape(truth, shape), np.reshape(predicted, shape))


def _lines(result: Mapping[str, Any], folder: Path) -> list[dict[str, str]] | None:
    """Return the lines of the first seed, of which probe.json has the split.

    None if the file is missing or does not belong to probe.json.
    """
    try:
        # The name in probe.json is not used: a stranger's file could name any file.
        data = (folder / layout.PROBE_HEADS / layout.PROBE_PREDICTIONS).read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest() != result["predictions"]["sha256"]:
        return None
    text = io.StringIO(data.decode("utf-8", "surrogateescape"), newline="")
    first_seed = str(result["split"]["seed"])
    return [line for line in csv.DictReader(text) if line["seed"] == first_seed]
