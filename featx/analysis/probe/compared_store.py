"""Comparison of a probe with the predictions of that of another store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.comparisons import compare
from featx.analysis.probe.heads import output_folder
from featx.analysis.probe.metrics import Predictions
from featx.analysis.probe.output_files import is_of_answer, read_prediction_lines
from featx.base import csv_cell
from featx.errors import DataError, StoreError, StoreMismatchError
from featx.store import FeatureStore, layout, read_result
from featx.types import count_different_images


@dataclass(frozen=True)
class OtherProbe:
    """Predictions of the best layer of another store: by key, the true and predicted class of each
    test row, and the checksum of its image.
    """

    store: str
    layer: str
    method: str
    tested: Mapping[str, tuple[str, str]]
    checksums: Mapping[str, int]


def read_probe(path: str) -> OtherProbe:
    """Read the predictions of the best layer of a store, as its probe.json names it."""
    store = FeatureStore(path)
    folder = output_folder(store)
    remedy = f"python -m featx job=probe store={path} makes it."
    try:
        about = read_result(folder / layout.PROBE)
        if about["task"] != "classification":
            raise StoreError(
                f"the probe in {folder} is of probe.task={about['task']}; stores are compared by "
                "their predictions of classes. Probe it again for classes."
            )
        if about["fingerprint"] != str(store.attrs["fingerprint"]):
            raise StoreError(f"the probe in {folder} belongs to another state of it. {remedy}")
        lines = read_prediction_lines(folder, about)
        if lines is None:
            raise StoreError(
                f"{layout.PROBE_PREDICTIONS} in {folder} is missing or was changed. {remedy}"
            )
        keys = {csv_cell(str(key)): str(key) for key in store.keys.tolist()}
        classes = {csv_cell(name): name for name in about["classes"]}
        tested = {
            keys[line["key"]]: (classes[line["true"]], classes[line["predicted"]])
            for line in lines
            if is_of_answer(line, about)
        }
        pairs = zip(store.keys.tolist(), store.image_checksums.tolist(), strict=True)
        checksums = {key: checksum for key, checksum in pairs if key in tested}
        layer, method = str(about["layer"]), str(about["method"])
        return OtherProbe(str(store.root), layer, method, tested, checksums)
    except FileNotFoundError as error:
        raise StoreError(f"{folder} has no probe to compare with: {remedy}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise StoreError(f"the probe in {folder} cannot be read: {error!r}. {remedy}") from error


def compared_store_entry(
    other: OtherProbe,
    ours: Predictions,
    keys: npt.NDArray[Any],
    checksums: npt.NDArray[np.uint64],
    classes: Sequence[str],
) -> dict[str, Any]:
    """Compare the predictions for the rows that both probes tested. Return store, layer and method
    of the other probe; rows, the number of rows that both tested; rows_left_out, the number of test
    rows of this store that the other did not test; rows_of_other_images, the number of compared
    rows whose images have other bytes there; the accuracies of both on these rows; and the entries
    of `paired_tests.compare`.
    """
    is_tested = np.array([str(key) in other.tested for key in keys.tolist()])
    if not is_tested.any():
        raise DataError(
            f"probe.compare_store={other.store} has tested none of the {len(keys)} test rows of "
            "this probe. Probe both with the same rows, labels, seed and split; "
            f"probe.split=column probe.split_file={other.store}/{layout.PROBE_HEADS}/"
            f"{layout.PROBE_PREDICTIONS} takes the split of the other one."
        )
    rows = np.flatnonzero(is_tested)
    number = {name: i for i, name in enumerate(classes)}
    classes_there = [other.tested[str(key)] for key in keys[rows].tolist()]
    for row, (true, _) in zip(rows.tolist(), classes_there, strict=True):
        if true != classes[ours.y[row]]:
            raise StoreMismatchError(
                f"{keys[row]} is of the class {classes[ours.y[row]]} in this store and of {true} "
                f"in {other.store}; stores are compared on rows with the same labels."
            )
    there = np.array([other.checksums[str(key)] for key in keys[rows].tolist()], np.uint64)
    # A class that this store does not have is a wrong prediction.
    predicted = np.array([number.get(name, -1) for _, name in classes_there])
    groups = None if ours.groups is None else ours.groups[rows]
    a = Predictions(ours.y[rows], ours.predicted[rows], None, None, groups)
    b = Predictions(ours.y[rows], predicted, None, None, groups)
    return {
        "store": other.store,
        "layer": other.layer,
        "method": other.method,
        "rows": len(rows),
        "rows_left_out": len(keys) - len(rows),
        "rows_of_other_images": count_different_images(checksums[rows], there),
        "accuracies": [float(a.right.mean()), float(b.right.mean())],
        **compare(a, b),
    }
