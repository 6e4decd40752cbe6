"""Labelled rows of a store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.errors import DataError, StoreError, counted
from featx.store import FeatureStore


@dataclass(frozen=True)
class LabelledRows:
    """Rows of a store that a probe can use.

    Attributes:
        store: the store.
        rows: (n,) int64 rows of the store, increasing.
        y: (n,) int64 class of each row, in [0, C).
        classes: C names, those with at least one row.
        notes: sentences about what was left out.
    """

    store: FeatureStore
    rows: npt.NDArray[np.int64]
    y: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def labelled_rows(store: FeatureStore, column: str | None = None) -> LabelledRows:
    """Select the rows that have a label and did not fail, and the classes that have rows."""
    if not store.complete:
        raise StoreError(
            f"{store.root} is not complete: {store.num_rows_present} of {len(store)} rows are "
            "there. Complete it with the command that started it, then give this one again."
        )
    labels, classes = (
        (store.labels, store.classes) if column is None else _column_labels(store, column)
    )
    rows = np.flatnonzero(store.ok & (labels >= 0))
    if not len(rows):
        raise DataError(
            f"{store.root} has no labels{'' if column is None else f' in {column}'}, which a probe "
            "needs. With data=folder the first sub-folder of an image is its label."
        )
    present, y = np.unique(labels[rows], return_inverse=True)
    notes = []
    if num_failed := int((~store.ok).sum()):
        notes.append(f"{counted(num_failed, 'failed row is', 'failed rows are')} left out")
    if num_unlabelled := int((store.ok & (labels < 0)).sum()):
        notes.append(
            counted(num_unlabelled, "row without a label is", "rows without a label are")
            + " left out"
        )
    if num_absent := len(classes) - len(present):
        one, many = "class without a row is", "classes without a row are"
        notes.append(f"{counted(num_absent, one, many)} left out")
    names = tuple(classes[label] for label in present.tolist())
    return LabelledRows(store, rows, y.astype(np.int64), names, tuple(notes))


def _column_labels(
    store: FeatureStore, column: str
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Convert a column to labels."""
    values = store.column(column)
    if values.dtype.kind == "f":
        has_value = ~np.isnan(values)
        if (values[has_value] != np.floor(values[has_value])).any():
            raise DataError(
                f"probe.label_column={column} holds numbers that are not whole; classes are text, "
                "whole numbers or booleans. probe.task=regression predicts the numbers."
            )
        # Python's whole numbers have no limit: int64 would make one class of all beyond 2^63.
        distinct, numbers = np.unique(values[has_value], return_inverse=True)
        names = [int(value) if np.isfinite(value) else value for value in distinct.tolist()]
    else:
        has_value = values != "" if values.dtype.kind == "U" else np.ones(len(values), dtype=bool)
        distinct, numbers = np.unique(values[has_value], return_inverse=True)
        names = distinct.tolist()
    labels = np.full(len(values), -1, dtype=np.int64)
    labels[has_value] = numbers
    # Booleans are named as tables write them, instead of as Python does.
    return labels, tuple(
        str(name).lower() if isinstance(name, bool) else str(name) for name in names
    )


def match_classes(test: LabelledRows, classes: tuple[str, ...]) -> LabelledRows:
    """Renumber another store's classes by name, and leave out rows of other classes."""
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number.get(name, -1) for name in test.classes], np.int64)[test.y]
    is_trained = labels >= 0
    if not is_trained.any():
        raise DataError(
            f"{test.store.root} has the classes {', '.join(test.classes[:5])}, none of "
            f"{', '.join(classes[:5])}: classes are matched by name."
        )
    notes = list(test.notes)
    if num_others := int((~is_trained).sum()):
        one, many = "row of a class", "rows of classes"
        notes.append(f"{counted(num_others, one, many)} not trained on: left out")
    notes = [f"probe.test_store: {note}" for note in notes]
    return LabelledRows(
        test.store, test.rows[is_trained], labels[is_trained], classes, tuple(notes)
    )
