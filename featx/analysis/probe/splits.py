"""Splits of labelled rows into rows to fit on, to choose settings on, and to test on.

Splits are made at random, as given, or with another store for the test; groups stay whole. Ints
are indices into the labelled rows, not rows of a store.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.groups import (
    Groups,
    fold_of_groups,
    overlap_notes,
    row_groups,
    share_of_groups,
)
from featx.analysis.probe.labelled_rows import LabelledRows
from featx.analysis.probe.metrics import Ints
from featx.base import csv_cell
from featx.config import ProbeConfig
from featx.errors import DataError, counted
from featx.types import Array, rows_by_label


@dataclass(frozen=True)
class Split:
    """Increasing places, none of them in two of the sets: `fit`, on which every setting is fitted;
    `validation`, on which settings are compared; `test`, used once at the end.
    """

    fit: Ints
    validation: Ints
    test: Ints

    @property
    def train(self) -> Ints:
        """Union of `fit` and `validation`, for the final fit."""
        return np.sort(np.concatenate([self.fit, self.validation]))


VALIDATION_SHARE = 0.2
"""Share of the training rows of each class on which settings are chosen."""


def holdout(y: Ints, share: float, seed: int, groups: Ints | None = None) -> Split:
    """Select a share of each class for testing, and a share of the rest for validation."""
    every = np.arange(len(y))
    test = _some_of_each_class(y, every, share, np.random.default_rng([seed, 1]), groups)
    return with_validation(y, np.setdiff1d(every, test), test, seed, groups)


_FEWEST_UNITS = 3
"""Least number of rows or groups: one to test, one to choose settings on, one to fit."""


def kfold(y: Ints, folds: int, seed: int, groups: Ints | None = None) -> list[Split]:
    """Make k splits that test every row once, with the rows of a class spread over the folds.

    A class with a single row or group is always trained on and never tested.
    """
    rng = np.random.default_rng([seed, 1])
    fold_of = (
        _fold_of_rows(y, folds, rng) if groups is None else fold_of_groups(y, groups, folds, rng)
    )
    splits = []
    for fold in range(folds):
        test = np.flatnonzero(fold_of == fold)
        if not len(test):
            units, of_row = ("rows", np.arange(len(y))) if groups is None else ("groups", groups)
            num_tested = len(np.unique(of_row[fold_of >= 0]))
            has_few = num_tested < 2 or len(np.unique(of_row)) < _FEWEST_UNITS
            raise DataError(
                f"probe.folds={folds} are more than the {units} allow: fold {fold + 1} is empty. "
                + (f"Give more {units}." if has_few else "Give fewer.")
            )
        train = np.flatnonzero(fold_of != fold)
        splits.append(with_validation(y, train, test, seed + fold, groups))
    return splits


def _fold_of_rows(y: Ints, folds: int, rng: np.random.Generator) -> Ints:
    """Return a fold for each row, -1 for the only row of a class."""
    fold_of = np.full(len(y), -1)
    num_assigned = 0
    for members in rows_by_label(y):
        places = rng.permutation(members)
        if len(places) > 1:
            # Continuing after the last class's fold keeps folds equal in size.
            fold_of[places] = (np.arange(len(places)) + num_assigned) % folds
            num_assigned += len(places)
    return fold_of


def few_shot_places(y: Ints, train: Ints, shots: int, draw: int, seed: int) -> Ints:
    """Select at most `shots` random places of each class."""
    rng = np.random.default_rng([seed, 3, shots, draw])
    places_of_classes = [
        rng.permutation(train[members])[:shots] for members in rows_by_label(y[train])
    ]
    return np.sort(np.concatenate(places_of_classes))


def with_validation(
    y: Ints, train: Ints, test: Ints, seed: int, groups: Ints | None = None
) -> Split:
    """Make a split whose validation rows are a share of the training rows."""
    rng = np.random.default_rng([seed, 2])
    validation = _some_of_each_class(y, train, VALIDATION_SHARE, rng, groups)
    return Split(np.setdiff1d(train, validation), validation, np.sort(test))


def _some_of_each_class(
    y: Ints, places: Ints, share: float, rng: np.random.Generator, groups: Ints | None
) -> Ints:
    """Select a share of the rows of each class: at least one and not all; none of a single row.

    With groups, whole groups are selected, under the same rule.
    """
    if groups is not None:
        return np.sort(places[share_of_groups(y[places], groups[places], share, rng)])
    selected = [np.empty(0, np.int64)]
    for rows in rows_by_label(y[places]):
        members = rng.permutation(places[rows])
        count = min(max(1, round(len(members) * share)), len(members) - 1)
        selected.append(members[:count])
    return np.sort(np.concatenate(selected))


ROLES = {"train": "train", "test": "test", "validation": "validation", "val": "validation"}
"""Texts that a split file or column may contain, and their meaning."""


def is_split_file(split: str) -> bool:
    """Return whether `probe.split` is a file, not a column of the store."""
    return split.lower().endswith(".csv")


def _given_split(
    options: ProbeConfig, seed: int, training: LabelledRows, groups: Ints | None, notes: list[str]
) -> Split:
    given = str(options.split)
    path = Path(given).expanduser()
    where = f"probe.split={given}"
    if not is_split_file(given):
        hint = ""
        roles = _roles_of(training.store.column(given)[training.rows], where)
        without = f"for which {given} is empty"
    else:
        hint = f" Keys are those of the store, such as {str(training.keys[0])!r}."
        roles, unknown = read_split_file(path, training.keys.tolist())
        if unknown:
            notes.append(
                f"{counted(unknown, f'key of {path} is', f'keys of {path} are')} not among the "
                "labelled rows of the store"
            )
        without = f"without a split in {path}"
    if unnamed := int((roles == "").sum()):
        notes.append(f"{counted(unnamed, 'labelled row')} {without}: left out")
    sides = {role: np.flatnonzero(roles == role) for role in ("train", "validation", "test")}
    for role in ("train", "test"):
        if not len(sides[role]):
            raise DataError(f"{where} names no labelled row of the store for {role}.{hint}")
    train, validation, test = sides.values()
    if len(validation):
        if count := int((~np.isin(training.y[validation], training.y[train])).sum()):
            rows = counted(count, "validation row is", "validation rows are")
            notes.append(f"{rows} of a class without a training row: the others choose settings")
        return Split(train, validation, test)
    return with_validation(training.y, train, test, seed, groups)


def _roles_of(texts: Array, where: str) -> npt.NDArray[np.str_]:
    """Parse a column of a store as 'train', 'validation', 'test', or '' for an empty value."""
    roles = np.empty(len(texts), dtype="U10")
    for text in np.unique(texts).tolist():
        if text != "" and text not in ROLES:
            raise DataError(f"{where} is {text!r}; expected train, validation or test.")
        roles[texts == text] = ROLES.get(text, "")
    return roles


def read_split_file(path: Path, keys: Sequence[str]) -> tuple[npt.NDArray[np.str_], int]:
    """Read a CSV file with the columns `key` and `split`. Return (n,) 'train', 'validation',
    'test', or '' for a key that the file gives no split; and the number of keys with a split in the
    file that are not among `keys`.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.DictReader(file)
            missing_columns = {"key", "split"} - set(reader.fieldnames or ())
            if missing_columns:
                raise DataError(
                    f"probe.split={path} has no column "
                    f"{' and '.join(sorted(missing_columns))}; its "
                    f"first line is {','.join(reader.fieldnames or ())!r}."
                )
            role_of_key: dict[str, str] = {}
            for line in reader:
                key, role = line["key"], (line["split"] or "").strip()
                if role == "" and line["split"] is not None:
                    continue  # a row without a split; a line that ends before it is an error
                if role not in ROLES:
                    raise DataError(
                        f"probe.split={path}, line {reader.line_num}: split is {role!r}, "
                        "expected train, validation or test."
                    )
                if role_of_key.setdefault(key, ROLES[role]) != ROLES[role]:
                    raise DataError(f"probe.split={path} names {key!r} for two splits.")
    except OSError as error:
        raise DataError(f"probe.split={path} cannot be read: {error.strerror}.") from error
    except csv.Error as error:
        raise DataError(f"probe.split={path} is no CSV file: {error}.") from error
    # predictions.csv has the cells of `csv_cell`, a file of a user may have the keys themselves.
    names = [name if (name := csv_cell(key)) in role_of_key else key for key in keys]
    roles = np.array([role_of_key.get(name, "") for name in names], dtype=np.str_)
    return roles, len(role_of_key.keys() - set(names))


def small_classes(training: LabelledRows, rows: RowSplits, folds: int) -> list[str]:
    """Return notes about classes with too few rows or groups to be tested, and about rows that no
    fold tests because they are in a group with such a class.
    """
    groups = rows.groups
    if groups is None:
        if single := int((np.bincount(training.y) == 1).sum()):
            verb = "is" if single == 1 else "are"
            classes = counted(single, "class", "classes")
            return [f"{classes} with a single row {verb} trained on and never tested"]
        return []
    pairs = np.unique(np.stack([training.y, groups], axis=1), axis=0)
    counts = np.bincount(pairs[:, 0])
    is_tested = np.bincount(training.y[rows.test_places], minlength=len(counts)) > 0
    notes = []
    for few, text in (
        (counts == 1, "in a single group, trained on and never tested"),
        (
            (counts > 1) & ~is_tested,
            "never tested: that would leave another class without training rows",
        ),
        (
            (counts > 1) & (counts < folds) & is_tested,
            f"in fewer groups than the {folds} folds, and not tested in every fold",
        ),
    ):
        if few.any():
            names = ", ".join(training.classes[label] for label in np.flatnonzero(few)[:5].tolist())
            num_few = int(few.sum())
            verb = "is" if num_few == 1 else "are"
            classes = counted(num_few, "class", "classes")
            notes.append(f"{classes}, such as {names}, {verb} {text}")
    is_left = is_tested[training.y]
    is_left[rows.test_places] = False
    if rows.has_folds and (num_left := int(is_left.sum())):
        left = counted(num_left, "row of another class is", "rows of other classes are")
        notes.append(f"{left} in a group with such a class, and never tested")
    return notes


def _divided_group_notes(training: LabelledRows, groups: Groups, split: Split) -> list[str]:
    """Return notes about groups that a given split divides."""
    notes = []
    for some, others, between, effect in (
        (split.test, split.train, "test and training", "the accuracy is too high"),
        (split.validation, split.fit, "validation and training", "strengths are chosen too well"),
    ):
        divided = np.intersect1d(groups.of_row[some], groups.of_row[others])
        if len(divided):
            rows = int(np.isin(groups.of_row[some], divided).sum())
            key = training.keys[np.isin(groups.of_row, divided)][0]
            notes.append(
                f"the given split divides {counted(len(divided), 'group')} ({groups.by}) between "
                f"{between} "
                f"rows, such as that of {key}, with {rows} of {len(some)} rows: {effect}"
            )
    return notes


def check_split(
    split: Split, y: Ints, classes: Sequence[str], unit: str, has_share: bool = False
) -> None:
    """Check that a split can be used; `has_share` says whether probe.test_share has made it."""
    # The only group of one class may also be one of several of another class.
    shared = "" if unit == "row" else ", or shares its groups with such a class"
    if not len(split.test):
        raise DataError(
            f"no row is left to test on: every class has a single {unit}{shared}, such as "
            f"{classes[y[0]]}. A probe needs more "
            f"{'images' if unit == 'row' else 'groups of a class'}."
        )
    if not len(split.validation):
        has_many_tested = max(np.bincount(y[split.test])) > 1  # one row of a class remains with any
        raise DataError(
            "no row is left for validation, which chooses settings and layers: every class has a "
            f"single {unit} besides the test rows{shared}. Give more "
            f"{'images' if unit == 'row' else 'groups'} of a class"
            f"{', or a smaller probe.test_share' if has_share and has_many_tested else ''}."
        )
    if not np.isin(y[split.validation], y[split.fit]).any():
        raise DataError(
            "no validation row, on which settings are chosen, is of a class with a row to fit on. "
            "Put rows of its classes among the training rows."
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


@dataclass(frozen=True)
class RowSplits:
    """Splits of rows by one seed, and their description.

    Attributes:
        groups: (n,) group of each place, or None if every row is a group of its own.
        settings: entries of probe.json that only this kind of split has.
        grouped: the groups and what they share, or None without groups.
        notes: sentences about rows that were left out or leak.
    """

    seed: int
    groups: Ints | None
    splits: list[Split]
    settings: dict[str, Any]
    grouped: Groups | None
    notes: list[str]

    @property
    def has_folds(self) -> bool:
        """Whether there are several splits."""
        return len(self.splits) > 1

    @property
    def test_places(self) -> Ints:
        """(n,) test places of all splits, one after the other."""
        return np.concatenate([split.test for split in self.splits])

    def as_dict(self, options: ProbeConfig, keys: Sequence[str]) -> dict[str, object]:
        """Return the entry `split` of probe.json as JSON types; `keys` are those of all places.

        The digest of the test keys tells apart splits of equal sizes: a seed chooses places, which
        are those of other rows in a store that grew.
        """
        tested = [sorted(keys[place] for place in split.test.tolist()) for split in self.splits]
        column = {} if options.label_column is None else {"label_column": options.label_column}
        return {
            **column,
            "validation_share": VALIDATION_SHARE,
            **self.settings,
            "seed": self.seed,
            "groups": None if self.grouped is None else self.grouped.as_dict(),
            "fit": [len(split.fit) for split in self.splits],
            "validation_rows": [len(split.validation) for split in self.splits],
            "test_rows": [len(split.test) for split in self.splits],
            "test_keys_sha256": hashlib.sha256(repr(tested).encode()).hexdigest(),
        }


def split_rows(
    options: ProbeConfig, seed: int, training: LabelledRows, testing: LabelledRows | None = None
) -> RowSplits:
    """Split the rows of one store at random or as given, or test all rows of another store."""
    grouped, count = row_groups(training, options.group_column), len(training.y)
    # Groups of a single row each have no effect on splits.
    groups = None if grouped is None or grouped.num_groups == count else grouped.of_row
    if testing is not None:
        groups = _groups_of_both(testing, options.group_column, groups, count)
        y = np.concatenate([training.y, testing.y])
        train, test = np.arange(count), np.arange(count, len(y))
        row_splits = [with_validation(y, train, test, seed, groups)]
        settings: dict[str, Any] = {"kind": "test_store", "test_store": str(testing.store.root)}
        notes = [*testing.notes, *overlap_notes(training, testing, options.group_column)]
    elif options.split is not None:
        notes = list[str]()
        row_splits = [_given_split(options, seed, training, groups, notes)]
        kind = "split_file" if is_split_file(options.split) else "split_column"
        settings = {"kind": "column", kind: options.split}
        if grouped is not None:
            notes += _divided_group_notes(training, grouped, row_splits[0])
    elif options.folds is not None:
        settings, notes = {"kind": "kfold", "folds": options.folds}, []
        row_splits = kfold(training.y, options.folds, seed, groups)
    else:
        share = options.test_share or 0.2
        settings, notes = {"kind": "holdout", "test_share": share}, []
        row_splits = [holdout(training.y, share, seed, groups)]
    return RowSplits(seed, groups, row_splits, settings, grouped, notes)


def _groups_of_both(
    testing: LabelledRows, column: str | None, groups: Ints | None, num_training: int
) -> Ints | None:
    """Return (n,) groups of training rows, then of another store's rows, or None without groups."""
    test_groups = row_groups(testing, column)
    if test_groups is None and groups is None:
        return None
    training_groups = np.arange(num_training) if groups is None else groups
    testing_groups = np.arange(len(testing.rows)) if test_groups is None else test_groups.of_row
    return np.concatenate([training_groups, testing_groups + training_groups.max() + 1])


def check_sizes(rows: RowSplits, subject: str) -> None:
    """Check that no set of rows is empty; `subject` says how many rows there are."""
    for split in rows.splits:
        if len(split.fit) and len(split.validation) and len(split.test):
            continue
        if rows.groups is None or rows.grouped is None:
            raise DataError(
                f"{subject} are too few to be divided into training, validation and test rows."
            )
        aim, besides, remedy = "to test on", "", "Give rows of more groups"
        if len(split.test):
            aim, besides = "for validation, which chooses settings", " besides the test rows"
            if "test_share" in rows.settings and rows.grouped.num_groups > 2:
                remedy += f", or a smaller probe.test_share than {rows.settings['test_share']:g}"
        raise DataError(
            f"no row is left {aim}: {subject} have a single group ({rows.grouped.by}){besides}, "
            f"and a group stays whole. {remedy}."
        )
