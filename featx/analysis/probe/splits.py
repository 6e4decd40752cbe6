"""Splits of labelled rows into rows to fit on, to choose settings on, and to test on.

These are pure functions of labels and a seed. Places are indices into the labelled rows, not rows
of a store.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.group_splits import fold_of_groups, share_of_groups
from featx.errors import DataError

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Increasing places; no place is in two of the three sets.

    Attributes:
        fit: places on which every setting is fitted.
        validation: places on which settings are compared.
        test: places that are used once, at the end.
    """

    fit: Places
    validation: Places
    test: Places

    @property
    def train(self) -> Places:
        """Union of `fit` and `validation`, for the final fit."""
        return np.sort(np.concatenate([self.fit, self.validation]))


def holdout(
    y: npt.NDArray[np.int64],
    share: float,
    validation: float,
    seed: int,
    groups: npt.NDArray[np.int64] | None = None,
) -> Split:
    """Select a share of each class for testing, and a share of the rest for validation."""
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
            raise DataError(
                f"probe.folds={folds} are more than the {'rows' if groups is None else 'groups'} "
                f"allow: fold {fold + 1} is empty. Give fewer."
            )
        train = np.flatnonzero(fold_of != fold)
        splits.append(_with_validation(y, train, test, validation, seed + fold, groups))
    return splits


def _fold_of_rows(y: npt.NDArray[np.int64], folds: int, rng: np.random.Generator) -> Places:
    """Return a fold for each row, -1 for the only row of a class."""
    fold_of = np.full(len(y), -1)
    num_assigned = 0
    for label in np.unique(y):
        places = rng.permutation(np.flatnonzero(y == label))
        if len(places) > 1:
            # Continuing after the last class's fold keeps folds equal in size.
            fold_of[places] = (np.arange(len(places)) + num_assigned) % folds
            num_assigned += len(places)
    return fold_of


def split_from_places(
    y: npt.NDArray[np.int64],
    train: Places,
    validation: Places,
    test: Places,
    share: float,
    seed: int,
    groups: npt.NDArray[np.int64] | None = None,
) -> Split:
    """Make a split from given places; validation rows are drawn if none are given."""
    if len(validation):
        return Split(np.sort(train), np.sort(validation), np.sort(test))
    return _with_validation(y, train, test, share, seed, groups)


def few_shot_places(
    y: npt.NDArray[np.int64], train: Places, shots: int, draw: int, seed: int
) -> Places:
    """Select at most `shots` random places of each class."""
    rng = np.random.default_rng([seed, 3, shots, draw])
    places_of_classes = [
        rng.permutation(train[y[train] == label])[:shots] for label in np.unique(y[train]).tolist()
    ]
    return np.sort(np.concatenate(places_of_classes))


def _with_validation(
    y: npt.NDArray[np.int64],
    train: Places,
    test: Places,
    share: float,
    seed: int,
    groups: npt.NDArray[np.int64] | None,
) -> Split:
    """Split training places into fit and validation."""
    validation = _some_of_each_class(y, train, share, np.random.default_rng([seed, 2]), groups)
    return Split(np.setdiff1d(train, validation), validation, np.sort(test))


def _some_of_each_class(
    y: npt.NDArray[np.int64],
    places: Places,
    share: float,
    rng: np.random.Generator,
    groups: npt.NDArray[np.int64] | None,
) -> Places:
    """Select a share of the rows of each class: at least one and not all; none of a single row.

    With groups, whole groups are selected, under the same rule.
    """
    if groups is not None:
        return np.sort(places[share_of_groups(y[places], groups[places], share, rng)])
    selected = [np.empty(0, np.int64)]
    for label in np.unique(y[places]).tolist():
        members = rng.permutation(places[y[places] == label])
        count = min(max(1, round(len(members) * share)), len(members) - 1)
        selected.append(members[:count])
    return np.sort(np.concatenate(selected))
