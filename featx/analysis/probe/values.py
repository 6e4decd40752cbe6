"""Targets that are no classes: numbers (regression), or several labels of a row (multilabel)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.labelled_rows import LabelledRows
from featx.config import ProbeConfig
from featx.errors import DataError, StoreError, counted
from featx.sources import MISSING_MARKS
from featx.store import FeatureStore

SEPARATOR = ";"
"""Default text between the labels of a row."""

MANY_NUMBERS = 20
"""Number of different whole numbers from which a note says that they are taken as classes."""


@dataclass(frozen=True)
class TaskKind:
    """Kind of the targets that a probe predicts.

    Attributes:
        name: 'classification', 'regression', 'multilabel' or 'segmentation'.
        reason: how it was decided, for people.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Values:
    """Rows with their targets.

    Attributes:
        labelled: the rows, all of class 0.
        values: (n, T) float64: numbers (T = 1), or 1 for each label of a row and 0 for others.
        names: T names: the column, or the labels.
    """

    labelled: LabelledRows
    values: npt.NDArray[np.float64]
    names: tuple[str, ...]


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
    store: FeatureStore,
    options: ProbeConfig,
    kind: TaskKind,
    names: tuple[str, ...] | None = None,
) -> Values:
    """Select the rows that have a value and did not fail."""
    if not store.complete:
        raise StoreError(
            f"{store.root} is not complete: {store.num_rows_present} of {len(store)} rows are "
            "there. Complete it with the command that started it, then give this one again."
        )
    column = str(options.label_column)
    column_values = store.column(column)
    has_value = _value_mask(column_values, column, kind)
    rows = np.flatnonzero(store.ok & has_value)
    if len(rows) < (2 if names is None else 1):
        raise DataError(f"{store.root} has {counted(len(rows), 'row')} with a value of {column}.")
    notes = []
    if num_failed := int((~store.ok).sum()):
        notes.append(f"{counted(num_failed, 'failed row is', 'failed rows are')} left out")
    if num_missing := int((store.ok & ~has_value).sum()):
        missing = counted(num_missing, "row")
        notes.append(f"{missing} without a value of {column} left out")
    if names is not None:
        notes = [f"probe.test_store: {note}" for note in notes]
    labelled = LabelledRows(store, rows, np.zeros(len(rows), np.int64), ("",), tuple(notes))
    if kind.name == "regression":
        values = column_values[rows].astype(np.float64)[:, None]
        if names is None and np.ptp(values) == 0:
            raise DataError(
                f"{column} is {values[0, 0]:g} in all rows; there is nothing to predict."
            )
        return Values(labelled, values, (column,))
    separator = options.label_separator or SEPARATOR
    return _indicators(labelled, column_values[rows].tolist(), separator, column, names)


def _value_mask(
    values: npt.NDArray[np.generic], column: str, kind: TaskKind
) -> npt.NDArray[np.bool_]:
    """Return (N,) whether a row has a value."""
    if kind.name == "multilabel":
        if values.dtype.kind != "U":
            raise DataError(f"probe.task=multilabel: {column} holds numbers; expected text.")
        is_known: npt.NDArray[np.bool_] = np.char.strip(values.astype(np.str_)) != ""
        return is_known
    if values.dtype.kind not in "fiub":
        raise DataError(
            f"probe.task=regression: {column} holds text{_example_of_text(values.tolist())}; "
            "expected numbers."
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
    labelled: LabelledRows,
    texts: list[str],
    separator: str,
    column: str,
    names: tuple[str, ...] | None,
) -> Values:
    """Return a column for each label, with 1 in the rows that have it."""
    lists = [{label.strip() for label in text.split(separator)} - {""} for text in texts]
    all_labels = set[str]().union(*lists)
    if names is not None:
        if unknown := sorted(all_labels - set(names)):
            note = (
                f"probe.test_store: {counted(len(unknown), 'label')} that no training row has, "
                f"such as {unknown[0]}: left out"
            )
            labelled = replace(labelled, notes=(*labelled.notes, note))
        lists = [labels & set(names) for labels in lists]
    else:
        names = tuple(sorted(all_labels))
    if len(names) < 2:
        raise DataError(
            f"{column} has {counted(len(names), 'label')} divided by {separator!r}; "
            "probe.task=multilabel needs two or more."
        )
    place = {name: i for i, name in enumerate(names)}
    values = np.zeros((len(lists), len(names)))
    for row, labels in enumerate(lists):
        values[row, [place[label] for label in labels]] = 1
    return Values(labelled, values, names)
