"""Rows of a store that a probe can use, and their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.metrics import Ints, Matrix
from featx.analysis.value_settings import refuse_other_layer
from featx.config import ProbeConfig
from featx.errors import ConfigError, DataError, StoreError, counted
from featx.sources import MISSING_MARKS
from featx.store import FeatureStore, layout
from featx.types import Array


@dataclass(frozen=True)
class LabelledRows:
    """Rows of a store that a probe can use.

    Attributes:
        rows: (n,) int64 rows of the store, increasing.
        y: (n,) int64 class of each row, in [0, C); 0 for rows with `values`.
        classes: C names, those with at least one row; or T names of the values, the column or the
            labels.
        notes: sentences about what was left out.
        values: (n, T) float64 numbers (T = 1), or 1 for each label of a row and 0 for others; None
            for classes.
    """

    store: FeatureStore
    rows: Ints
    y: Ints
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    values: Matrix | None = None

    @property
    def targets(self) -> Array:
        """What is predicted: the classes (n,), or the values (n, T)."""
        return self.y if self.values is None else self.values

    @cached_property
    def keys(self) -> npt.NDArray[np.str_]:
        """(n,) key of each row."""
        return np.array([self.store.key_of(row) for row in self.rows.tolist()], np.str_)


def require_complete(store: FeatureStore) -> None:
    """Check that no row of a store is missing."""
    if not store.complete:
        raise StoreError(
            f"{store.root} is not complete: {store.num_rows_present} of {len(store)} rows are "
            "there. Complete it with the command that started it, then give this one again."
        )


def failed_notes(store: FeatureStore) -> list[str]:
    """Return a note about failed rows."""
    return _left_out(int((~store.ok).sum()), "failed row is", "failed rows are")


def _left_out(count: int, one: str, many: str) -> list[str]:
    return [f"{counted(count, one, many)} left out"] if count else []


def labelled_rows(store: FeatureStore, column: str | None = None) -> LabelledRows:
    """Select the rows that have a label and did not fail, and the classes that have rows."""
    require_complete(store)
    labels, classes = (
        (store.labels, store.classes) if column is None else _column_labels(store, column)
    )
    if not store.ok.any():
        raise DataError(
            f"{store.root} has no row that is ok; its {layout.FAILURES_CSV} says why they failed."
        )
    rows = np.flatnonzero(store.ok & (labels >= 0))
    if not len(rows):
        raise DataError(
            f"no row of {store.root} that is ok has "
            + (_no_label(store) if column is None else f"a value of {column}.")
        )
    present, y = np.unique(labels[rows], return_inverse=True)
    num_unlabelled = int((store.ok & (labels < 0)).sum())
    num_absent = len(classes) - len(present)
    notes = [
        *failed_notes(store),
        *_left_out(num_unlabelled, "row without a label is", "rows without a label are"),
        *_left_out(num_absent, "class without a row is", "classes without a row are"),
    ]
    names = tuple(classes[label] for label in present.tolist())
    return LabelledRows(store, rows, y.astype(np.int64), names, tuple(notes))


def _no_label(store: FeatureStore) -> str:
    """End of the message that no row of a store has a label."""
    if store.columns:
        return (
            "a label. probe.label_column=NAME takes those of a column; the store has "
            f"{', '.join(store.columns)}."
        )
    return (
        "a label, which a probe needs. Extract the images to another out=DIR: with data=folder the "
        "first sub-folder of an image is its label, with data=table the column "
        "data.label_column=NAME."
    )


def _column_labels(store: FeatureStore, column: str) -> tuple[Ints, tuple[str, ...]]:
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
    one, many = "row of a class not trained on:", "rows of classes not trained on:"
    notes = [*test.notes, *_left_out(int((~is_trained).sum()), one, many)]
    notes = [f"probe.test_store: {note}" for note in notes]
    return LabelledRows(
        test.store, test.rows[is_trained], labels[is_trained], classes, tuple(notes)
    )


SEPARATOR = ";"
"""Default text between the labels of a row."""

MANY_NUMBERS = 20
"""Number of different whole numbers from which a note says that they are taken as classes."""


@dataclass(frozen=True)
class TaskKind:
    """Kind of the targets that a probe predicts ('classification', 'regression', 'multilabel' or
    'segmentation'), and how it was decided, for people.
    """

    name: str
    reason: str


def task_kind(store: FeatureStore, options: ProbeConfig) -> TaskKind:
    """Decide what the probe predicts (probe.task).

    Whole numbers are often class numbers, so that auto never takes them as numbers.
    """
    if options.masks is not None:
        return TaskKind("segmentation", "probe.masks has classes of pixels")
    if options.task != "auto":
        return TaskKind(options.task, f"probe.task={options.task}")
    if options.label_column is None:
        return TaskKind("classification", "the labels of a store are classes")
    column = options.label_column
    values = store.column(column)
    if values.dtype.kind == "U":
        return TaskKind("classification", f"{column} holds text")
    if values.dtype.kind == "f":
        finite = values[np.isfinite(values)]
        if (finite != np.floor(finite)).any():
            return TaskKind(
                "regression",
                f"{column} holds fractional numbers; probe.task=regression says so explicitly",
            )
        values = finite
    if values.dtype.kind == "b":
        return TaskKind("classification", f"{column} holds booleans")
    count = len(np.unique(values))
    hint = "; probe.task=regression predicts them as numbers" if count >= MANY_NUMBERS else ""
    return TaskKind("classification", f"{column} holds {count} different whole numbers{hint}")


def valued_rows(
    store: FeatureStore, options: ProbeConfig, kind: TaskKind, names: tuple[str, ...] | None = None
) -> LabelledRows:
    """Select the rows that have a value and did not fail."""
    require_complete(store)
    column = str(options.label_column)
    column_values = store.column(column)
    shown_column = column if names is None else f"{column} of {store.root}"
    has_value = _value_mask(column_values, shown_column, kind)
    rows = np.flatnonzero(store.ok & has_value)
    if len(rows) < (2 if names is None else 1):
        raise DataError(f"{store.root} has {counted(len(rows), 'row')} with a value of {column}.")
    notes = failed_notes(store)
    if num_missing := int((store.ok & ~has_value).sum()):
        missing = counted(num_missing, "row")
        notes.append(f"{missing} without a value of {column} left out")
    if names is not None:
        notes = [f"probe.test_store: {note}" for note in notes]
    y = np.zeros(len(rows), np.int64)
    if kind.name == "regression":
        values = column_values[rows].astype(np.float64)[:, None]
        if names is None and np.ptp(values) == 0:
            raise DataError(
                f"{column} is {values[0, 0]:g} in all rows; there is nothing to predict."
            )
        return LabelledRows(store, rows, y, (column,), tuple(notes), values)
    separator = options.label_separator or SEPARATOR
    texts: list[str] = column_values[rows].tolist()
    values, names = _indicators(texts, separator, column, names, notes)
    return LabelledRows(store, rows, y, names, tuple(notes), values)


def _value_mask(values: Array, column: str, kind: TaskKind) -> npt.NDArray[np.bool_]:
    if kind.name == "multilabel":
        if values.dtype.kind != "U":
            raise DataError(f"probe.task=multilabel: {column} holds numbers; expected text.")
        is_known: npt.NDArray[np.bool_] = np.char.strip(values.astype(np.str_)) != ""
        return is_known
    if values.dtype.kind not in "fiub":
        raise DataError(
            f"probe.task=regression: {column} holds text{_example_of_text(values.tolist())}; "
            "expected numbers with a decimal point, such as 0.5."
        )
    numbers = values.astype(np.float64)
    if num_infinite := int(np.isinf(numbers).sum()):
        raise DataError(
            f"probe.task=regression: {column} holds infinite numbers in {num_infinite} of "
            f"{counted(len(values), 'row')}; expected finite ones, or none where the value is "
            "missing."
        )
    return ~np.isnan(numbers)


def _example_of_text(texts: list[str]) -> str:
    """Quote the first text that is no number, and count the rows with such texts."""
    given = [text for text in texts if text and text.lower() not in MISSING_MARKS]
    # Numbers with leading zeros, such as 007, are kept as text by tables.
    others = [text for text in given if not _is_number(text)] or given
    if not others:
        return ""
    also = "" if len(set(others)) == 1 else " and others"
    return f" ({others[0]!r}{also} in {len(others)} of {counted(len(texts), 'row')})"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _indicators(
    texts: list[str], separator: str, column: str, names: tuple[str, ...] | None, notes: list[str]
) -> tuple[Matrix, tuple[str, ...]]:
    """Return a column for each label, with 1 in the rows that have it, and the labels."""
    lists = [{label.strip() for label in text.split(separator)} - {""} for text in texts]
    all_labels = set[str]().union(*lists)
    if names is None:
        names = tuple(sorted(all_labels))
        if not any(separator in text for text in texts):
            notes.append(
                f"no value of {column} has {separator!r}, so that every row has one label, such as "
                f"{texts[0]!r}; probe.label_separator names what divides labels"
            )
    elif unknown := sorted(all_labels - set(names)):
        notes.append(
            f"probe.test_store: {counted(len(unknown), 'label')} that no training row has, "
            f"such as {unknown[0]}: left out"
        )
    if len(names) < 2:
        raise DataError(
            f"{column} has {counted(len(names), 'label')} divided by {separator!r}; "
            "probe.task=multilabel needs two or more."
        )
    return np.array([[float(name in labels) for name in names] for labels in lists]), names


def open_other_store(store: FeatureStore, path: str, layers: Sequence[str]) -> FeatureStore:
    """Open probe.test_store and check that its features are comparable."""
    other = FeatureStore(path, verify="rows")
    if other.root == store.root or other.attrs["fingerprint"] == store.attrs["fingerprint"]:
        raise ConfigError(
            f"probe.test_store={path} is the store that is trained on: its rows would be tested on "
            "themselves. Use probe.test_share or probe.folds."
        )
    for layer in layers:
        refuse_other_layer(store, other, layer)
    return other
