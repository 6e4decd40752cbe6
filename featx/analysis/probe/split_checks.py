"""Checks of splits, and notes about classes and groups that a split does not treat as usual."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.groups import Groups, divided_groups
from featx.analysis.probe.labelled_rows import LabelledRows
from featx.analysis.probe.splits import Split
from featx.errors import DataError, counted


def small_classes(
    training: LabelledRows, groups: npt.NDArray[np.int64] | None, folds: int
) -> list[str]:
    """Return notes about classes with too few rows or groups to be tested."""
    if groups is None:
        if single := int((np.bincount(training.y) == 1).sum()):
            verb = "is" if single == 1 else "are"
            classes = counted(single, "class", "classes")
            return [f"{classes} with a single row {verb} trained on and never tested"]
        return []
    pairs = np.unique(np.stack([training.y, groups], axis=1), axis=0)
    counts = np.bincount(pairs[:, 0])
    notes = []
    for few, text in (
        (counts == 1, "in a single group, trained on and never tested"),
        (
            (counts > 1) & (counts < folds),
            f"in fewer groups than the {folds} folds, and not tested in every fold",
        ),
    ):
        if few.any():
            names = ", ".join(training.classes[label] for label in np.flatnonzero(few)[:5].tolist())
            num_few = int(few.sum())
            verb = "is" if num_few == 1 else "are"
            classes = counted(num_few, "class", "classes")
            notes.append(f"{classes}, such as {names}, {verb} {text}")
    return notes


def divided_group_notes(training: LabelledRows, groups: Groups, split: Split) -> list[str]:
    """Return notes about groups that a given split divides."""
    notes = []
    for some, others, between, effect in (
        (split.test, split.train, "test and training", "the accuracy is too high"),
        (split.validation, split.fit, "validation and training", "strengths are chosen too well"),
    ):
        divided = divided_groups(groups, some, others)
        if len(divided):
            rows = int(np.isin(groups.of_row[some], divided).sum())
            key = training.store.keys[training.rows[np.isin(groups.of_row, divided)][0]]
            notes.append(
                f"the given split divides {counted(len(divided), 'group')} ({groups.by}) between "
                f"{between} "
                f"rows, such as that of {key}, with {rows} of {len(some)} rows: {effect}"
            )
    return notes


def check_split(split: Split, y: npt.NDArray[np.int64], classes: Sequence[str], unit: str) -> None:
    """Check that a split can be used."""
    if not len(split.test):
        raise DataError(
            f"no row is left to test on: every class has a single {unit}. A probe needs more "
            f"{'images' if unit == 'row' else 'groups of a class'}."
        )
    if not len(split.validation):
        raise DataError(
            "no row is left for validation, which chooses settings and layers: every class has a "
            f"single {unit} besides the test rows. Give more "
            f"{'images' if unit == 'row' else 'groups'} of a class, or a smaller probe.test_share."
        )
    if len(np.unique(y[split.fit])) < 2:
        raise DataError("the training rows are of one class only; a probe needs two or more.")
    unseen = np.setdiff1d(y[split.test], y[split.train])
    if len(unseen):
        names = ", ".join(classes[label] for label in unseen[:5].tolist())
        raise DataError(
            f"{counted(len(unseen), 'class is', 'classes are')} tested and not trained on, such "
            f"as {names}. Put rows of "
            "them among the training rows, or leave them out."
        )
