"""Which rows a probe is fitted on, on which its strengths are chosen, and which it is tested on.

Pure functions of labels and a seed: places are indices into the labelled rows, not rows of a store.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.group_splits import fold_of_groups, share_of_groups
from featx.errors import DataError

Places = npt.NDArray[np.int64]

ROLES = {"train": "train", "test": "test", "validation": "validation", "val": "validation"}
"""What a split file may say of a row."""


@dataclass(frozen=True)
class Split:
    """Places, increasing; no place is in two of fit, validation and test.

    Attributes:
        fit: what every choice is fitted on.
        validation: what the choices are compared on.
        test: what is looked at once, in the end.
    """

    fit: Places
    validation: Places
    test: Places

    @property
    def train(self) -> Places:
        """Fit and validation together: what the last fit is made on."""
        return np.sort(np.concatenate([self.fit, self.validation]))


def holdout(
    y: npt.NDArray[np.int64],
    share: float,
    validation: float,
    seed: int,
    groups: npt.NDArray[np.int64] | None = None,
) -> Split:
    """A share of each class for testing, a share of the rest of each class for validation.

    Args:
        y: (n,) class of each place.
        share: for testing; at least one row of each class with two or more, never all of it.
        validation: of what remains, in the same way.
        seed: of both choices.
        groups: (n,) group of each place; a group is never divided, and `share` is met as far as
            groups allow.
    """
    every = np.arange(len(y))
    test = _some_of_each_class(y, every, share, np.random.default_rng([seed, 1]), groups)
    return _with_validation(y, np.setdiff1d(every, test), test, validation, seed, groups)


def kfold(
    y: npt.NDArray[np.int64],
    folds: int,
    validation: float,
    seed: int,
    groups: npt.NDArray[np.int64] | None = None,
) -> list[Split]:
    """Every row is tested in one fold; a class's rows are dealt out evenly.

    A class with a single row, or a single group, stays in training: there is nothing else to learn
    it from.

    Raises:
        DataError: a fold has no rows.
    """
    rng = np.random.default_rng([seed, 1])
    fold_of = (
        _dealt_rows(y, folds, rng) if groups is None else fold_of_groups(y, groups, folds, rng)
    )
    splits = []
    for fold in range(folds):
        test = np.flatnonzero(fold_of == fold)
        if not len(test):
            raise DataError(
                f"probe.folds={folds} are more than the {'rows' if groups is None else 'groups'} "
                f"allow: fold {fold + 1} is empty. Give fewer."
            )
        rest = np.flatnonzero(fold_of != fold)
        splits.append(_with_validation(y, rest, test, validation, seed + fold, groups))
    return splits


def _dealt_rows(y: npt.NDArray[np.int64], folds: int, rng: np.random.Generator) -> Places:
    """A fold for each row, -1 for the only row of a class."""
    fold_of = np.full(len(y), -1)
    dealt = 0
    for label in np.unique(y):
        places = rng.permutation(np.flatnonzero(y == label))
        if len(places) > 1:
            # Going on where the last class ended keeps the folds of equal size.
            fold_of[places] = (np.arange(len(places)) + dealt) % folds
            dealt += len(places)
    return fold_of


def given(
    y: npt.NDArray[np.int64],
    train: Places,
    chosen: Places,
    test: Places,
    share: float,
    seed: int,
    groups: npt.NDArray[np.int64] | None = None,
) -> Split:
    """A split that somebody else made; validation rows are drawn where none are given.

    Args:
        y: (n,) class of each place.
        train, chosen, test: places for training, validation and testing.
        share: of each class of `train` for validation, where `chosen` is empty.
        seed: of that choice.
        groups: (n,) group of each place; a drawn validation set divides none.
    """
    if len(chosen):
        return Split(np.sort(train), np.sort(chosen), np.sort(test))
    return _with_validation(y, train, test, share, seed, groups)


def few(y: npt.NDArray[np.int64], train: Places, shots: int, draw: int, seed: int) -> Places:
    """At most `shots` random places of each class in `train`, for one draw."""
    rng = np.random.default_rng([seed, 3, shots, draw])
    found = [
        rng.permutation(train[y[train] == label])[:shots] for label in np.unique(y[train]).tolist()
    ]
    return np.sort(np.concatenate(found))


def roles_of(said: npt.NDArray[Any], where: str) -> npt.NDArray[np.str_]:
    """What a column of a store says of each row.

    Args:
        said: (n,) the column's values.
        where: it comes from, for messages.

    Returns:
        (n,) train, validation, test, or '' where it says nothing.

    Raises:
        DataError: it says something else.
    """
    found = np.empty(len(said), dtype="U10")
    for text in np.unique(said).tolist():
        if text != "" and text not in ROLES:
            raise DataError(f"{where} says {text!r}; expected train, validation or test.")
        found[said == text] = ROLES.get(text, "")
    return found


def read_split_file(path: Path, keys: Sequence[str]) -> tuple[npt.NDArray[np.str_], int]:
    """What a CSV file with the columns key and split says of each key.

    Returns:
        (n,) train, validation, test, or '' for a key it does not name; and how many of its keys are
        not among `keys`.

    Raises:
        DataError: it is not there or no such file, names a key twice, or says something else.
    """
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            reader = csv.DictReader(file)
            missing = {"key", "split"} - set(reader.fieldnames or ())
            if missing:
                raise DataError(
                    f"probe.split_file={path} has no column {' and '.join(sorted(missing))}; its "
                    f"first line is {','.join(reader.fieldnames or ())!r}."
                )
            said: dict[str, str] = {}
            for line in reader:
                key, role = line["key"], (line["split"] or "").strip()
                if role not in ROLES:
                    raise DataError(
                        f"probe.split_file={path}, line {reader.line_num}: split is {role!r}, "
                        "expected train, validation or test."
                    )
                if said.setdefault(key, ROLES[role]) != ROLES[role]:
                    raise DataError(f"probe.split_file={path} names {key!r} for two splits.")
    except OSError as error:
        raise DataError(f"probe.split_file={path} cannot be read: {error.strerror}.") from error
    except csv.Error as error:
        raise DataError(f"probe.split_file={path} is no CSV file: {error}.") from error
    roles = np.array([said.get(str(key), "") for key in keys], dtype=np.str_)
    return roles, len(said.keys() - {str(key) for key in keys})


def _with_validation(
    y: npt.NDArray[np.int64],
    train: Places,
    test: Places,
    share: float,
    seed: int,
    groups: npt.NDArray[np.int64] | None,
) -> Split:
    chosen = _some_of_each_class(y, train, share, np.random.default_rng([seed, 2]), groups)
    return Split(np.setdiff1d(train, chosen), chosen, np.sort(test))


def _some_of_each_class(
    y: npt.NDArray[np.int64],
    places: Places,
    share: float,
    rng: np.random.Generator,
    groups: npt.NDArray[np.int64] | None,
) -> Places:
    """A share of each class, rounded; one at least and not all, of a single row none.

    With groups, whole groups: one of a class at least and not all, of a single group none.
    """
    if groups is not None:
        return np.sort(places[share_of_groups(y[places], groups[places], share, rng)])
    found = [np.empty(0, np.int64)]
    for label in np.unique(y[places]).tolist():
        members = rng.permutation(places[y[places] == label])
        count = min(max(1, round(len(members) * share)), len(members) - 1)
        found.append(members[:count])
    return np.sort(np.concatenate(found))
