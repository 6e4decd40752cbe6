"""Contents of the files of job=probe: probe.json as it is, and what predictions.csv adds to it."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe import output_folder
from featx.export.report.predictions_file import (
    TestPredictions,
    ValuePredictions,
    read_predictions,
    read_values,
)
from featx.store import FeatureStore, layout, read_result

METHODS = ("linear", "knn", "ridge", "attentive")

_SPLITS = {"holdout": "hold-out", "column": "given split", "test_store": "another store"}
"""Kind of split -> its name for people."""


@dataclass(frozen=True)
class Probes:
    """Contents of the files of the probe.

    Attributes:
        note: reason why there are none, or a warning, or ''.
        result: contents of probe.json, or None.
        confusion: (C, C) int64; row i, column j: rows of class i that were predicted as j. None for
            other tasks.
        leakage_layer: layer in which near-duplicates across the split were searched, or ''.
        leaked_pairs: (row, training row, cosine) of some of them, in this store.
        predicted: contents of predictions.csv for classes, or None if it is missing or of another
            probe.
        values: contents of predictions.csv for numbers and several labels.
    """

    note: str
    result: Mapping[str, Any] | None = None
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
        if self.confusion is None or not self.confusion.sum():
            return 0.0
        return float(self.confusion.sum(1).max() / self.confusion.sum())

    @property
    def results(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Layer, method and entry of each result, in the order of the file."""
        layers = {} if self.result is None else self.result["layers"]
        return [
            (layer, method, of_layer[method])
            for layer, of_layer in layers.items()
            for method in METHODS
            if method in of_layer
        ]

    def of_method(self, method: str) -> dict[str, Mapping[str, Any]]:
        """Return layer -> entry of one method, in the order of the layers."""
        return {layer: entry for layer, name, entry in self.results if name == method}

    @property
    def of_best_method(self) -> dict[str, Mapping[str, Any]]:
        """Layer -> entry of the method of the best layer."""
        return {} if self.result is None else self.of_method(str(self.result["method"]))


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
        if result["task"] == "segmentation":
            return Probes(note, result)
        if result["task"] != "classification":
            return Probes(note, result, values=read_values(result, folder))
        confusion, num_classes = np.array(result["confusion"], np.int64), len(result["classes"])
        if confusion.shape != (num_classes, num_classes):
            raise ValueError(f"a confusion matrix of {confusion.shape} for {num_classes} classes")
        row_of = {str(key): row for row, key in enumerate(store.keys.tolist())}
        leakage = result["near_duplicates"]
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
