"""Task of a probe: labelled rows, and the splits into rows to fit and to test on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe import splits
from featx.analysis.probe.groups import Groups, divided_groups, row_groups, shared_with
from featx.analysis.probe.labelled_rows import Labelled, labelled_rows, matched_by_name
from featx.analysis.probe.splits import Split
from featx.config import Config
from featx.errors import ConfigError, DataError, StoreMismatchError, counted
from featx.store import FeatureStore


@dataclass(frozen=True)
class Task:
    """Labels and splits, which are the same for all layers.

    Attributes:
        training: rows of the store.
        testing: rows of another store, or None if test rows come from the same store.
        y: (n,) class of each place, training rows first.
        groups: (n,) group of each place, or None if every row is a group of its own.
        splits: one split, or one per fold.
        seed: seed of the splits.
        about: description of the splits as JSON types.
        notes: sentences about rows and classes that were left out or leak.
    """

    training: Labelled
    testing: Labelled | None
    y: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64] | None
    splits: list[Split]
    seed: int
    about: dict[str, Any]
    notes: list[str]

    @property
    def keys(self) -> npt.NDArray[np.str_]:
        """(n,) key of each place, training rows first."""
        keys = self.training.store.keys[self.training.rows]
        if self.testing is None:
            return keys
        return np.concatenate([keys, self.testing.store.keys[self.testing.rows]])


def make_task(config: Config, store: FeatureStore, layers: Sequence[str]) -> Task:
    """Select the rows, their classes and the splits.

    Args:
        config: checked config with job=probe.
        store: the store.
        layers: names of the layers, which a test store must have as well.

    Raises:
        FeatxError: there are too few classes or rows, or a split leaves a set empty.
    """
    options, seed = config.probe, config.seed
    training = labelled_rows(store, options.label_column)
    if len(training.classes) < 2:
        raise DataError(
            f"{store.root} has rows of the class {training.classes[0]!r} only; a probe needs two "
            "classes or more."
        )
    y, notes, testing = training.y, list(training.notes), None
    column = options.group_column
    grouped = row_groups(training, column)
    # Groups of a single row each have no effect on splits.
    groups = None if grouped is None or grouped.num_groups == len(y) else grouped.of_row
    about: dict[str, Any] = {
        "kind": options.split,
        "validation_share": options.validation_share,
    }
    if options.label_column is not None:
        about |= {"label_column": options.label_column}
    if options.test_store is not None:
        other = _other_store(store, options.test_store, layers)
        testing = matched_by_name(labelled_rows(other, options.label_column), training.classes)
        notes += testing.notes + tuple(shared_with(training, testing, column))
        every = np.arange(len(y))
        y = np.concatenate([y, testing.y])
        groups = _with_groups_of(testing, column, groups, len(every))
        none, test = np.empty(0, np.int64), np.arange(len(every), len(y))
        found = [splits.given(y, every, none, test, options.validation_share, seed, groups)]
        about |= {"kind": "test_store", "test_store": str(testing.store.root)}
    else:
        found, settings = _splits_of_one_store(config, training, groups, notes)
        about |= settings
        if options.split != "column":
            notes += _small_classes(training, groups, settings.get("folds", 2))
        elif grouped is not None:
            notes += _divided(training, grouped, found[0])
    what = "row" if groups is None or grouped is None else f"group ({grouped.by})"
    for split in found:
        _check_split(split, y, training.classes, what)
    if grouped is not None and grouped.num_missing:
        notes.append(
            f"{counted(grouped.num_missing, 'row has', 'rows have')} no value of {column}: each is "
            "a group of its own"
        )
    about |= {
        "seed": seed,
        "groups": None if grouped is None else grouped.as_dict(),
        "fit": [len(split.fit) for split in found],
        "validation_rows": [len(split.validation) for split in found],
        "test_rows": [len(split.test) for split in found],
    }
    return Task(training, testing, y, groups, found, seed, about, notes)


@dataclass(frozen=True)
class RowSplits:
    """Splits of rows that have no classes.

    Attributes:
        groups: (n,) group of each row, or None if every row is a group of its own.
        splits: one split, or one per fold.
        about: description of the splits as JSON types.
        notes: sentences about rows that were left out or leak.
    """

    groups: npt.NDArray[np.int64] | None
    splits: list[Split]
    about: dict[str, Any]
    notes: list[str]


def split_rows(config: Config, training: Labelled) -> RowSplits:
    """Split rows of one store that have no classes, at random or as given.

    Args:
        config: checked config with job=probe.
        training: rows, all of class 0.

    Raises:
        FeatxError: there are too few rows or groups.
    """
    options, notes = config.probe, list(training.notes)
    grouped = row_groups(training, options.group_column)
    groups = None if grouped is None or grouped.num_groups == len(training.y) else grouped.of_row
    found, settings = _splits_of_one_store(config, training, groups, notes)
    if options.split == "column" and grouped is not None:
        notes += _divided(training, grouped, found[0])
    for split in found:
        if min(len(split.fit), len(split.validation), len(split.test)) == 0:
            raise DataError(
                f"{len(training.y)} rows with a value of {options.label_column} are too few to be "
                "divided into training, validation and test rows."
            )
    about = {
        "kind": options.split,
        "label_column": options.label_column,
        "validation_share": options.validation_share,
        **settings,
        "seed": config.seed,
        "groups": None if grouped is None else grouped.as_dict(),
        "fit": [len(split.fit) for split in found],
        "validation_rows": [len(split.validation) for split in found],
        "test_rows": [len(split.test) for split in found],
    }
    return RowSplits(groups, found, about, notes)


def _splits_of_one_store(
    config: Config,
    training: Labelled,
    groups: npt.NDArray[np.int64] | None,
    notes: list[str],
) -> tuple[list[Split], dict[str, Any]]:
    """Make the splits that probe.split describes.

    Args:
        config: checked config.
        training: labelled rows.
        groups: (n,) group of each row, or None.
        notes: list to which notes are added.

    Returns:
        the splits, and their settings for probe.json.
    """
    options, seed = config.probe, config.seed
    if options.split == "column":
        given = {key: getattr(options, key) for key in ("split_file", "split_column")}
        named = {key: value for key, value in given.items() if value is not None}
        return [_column_split(config, training, groups, notes)], named
    if options.split == "kfold":
        folds = options.folds or 5
        found = splits.kfold(training.y, folds, options.validation_share, seed, groups)
        return found, {"folds": folds}
    share = options.test_share or 0.2
    found = [splits.holdout(training.y, share, options.validation_share, seed, groups)]
    return found, {"test_share": share}


def _with_groups_of(
    testing: Labelled,
    column: str | None,
    groups: npt.NDArray[np.int64] | None,
    num_training: int,
) -> npt.NDArray[np.int64] | None:
    """Return (n,) groups of training rows, then of another store's rows, or None without groups."""
    found = row_groups(testing, column)
    if found is None and groups is None:
        return None
    ours = np.arange(num_training) if groups is None else groups
    theirs = np.arange(len(testing.rows)) if found is None else found.of_row
    return np.concatenate([ours, theirs + ours.max() + 1])


def _small_classes(
    training: Labelled, groups: npt.NDArray[np.int64] | None, folds: int
) -> list[str]:
    """Return notes about classes with too few rows or groups to be tested."""
    if groups is None:
        if single := int((np.bincount(training.y) == 1).sum()):
            return [f"{single} classes with a single row are trained on and never tested"]
        return []
    pairs = np.unique(np.stack([training.y, groups], axis=1), axis=0)
    counts = np.bincount(pairs[:, 0])
    notes = []
    for few, text in (
        (counts == 1, "lie in a single group: they are trained on and never tested"),
        (
            (counts > 1) & (counts < folds),
            f"lie in fewer groups than the {folds} folds: they are not tested in every fold",
        ),
    ):
        if few.any():
            names = ", ".join(training.classes[label] for label in np.flatnonzero(few)[:5].tolist())
            notes.append(f"{int(few.sum())} classes, such as {names}, {text}")
    return notes


def _divided(training: Labelled, groups: Groups, split: Split) -> list[str]:
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


def _check_split(split: Split, y: npt.NDArray[np.int64], classes: Sequence[str], what: str) -> None:
    """Check that a split can be used.

    Args:
        split: the split.
        y: (n,) class of each place.
        classes: class names.
        what: 'row', or the kind of groups, for messages.

    Raises:
        DataError: a set is empty, or a class is tested but not trained on.
    """
    if not len(split.test):
        raise DataError(
            f"no row is left to test on: every class has a single {what}. A probe needs more "
            f"{'images' if what == 'row' else 'groups of a class'}."
        )
    if not len(split.validation):
        raise DataError(
            f"no row is left to choose strengths on: every class has a single {what} to train on. "
            f"A probe needs more {'images' if what == 'row' else 'groups'} of a class."
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


def _column_split(
    config: Config,
    training: Labelled,
    groups: npt.NDArray[np.int64] | None,
    notes: list[str],
) -> Split:
    """Make a split from probe.split_column or probe.split_file.

    Raises:
        DataError: no row is for training, or none for testing.
    """
    keys = training.store.keys[training.rows]
    if (column := config.probe.split_column) is not None:
        where = f"probe.split_column={column}"
        roles = splits.roles_of(training.store.column(column)[training.rows], where)
        if unnamed := int((roles == "").sum()):
            notes.append(
                counted(unnamed, "labelled row", "labelled rows")
                + f" for which {column} is empty: left out"
            )
    else:
        path = Path(config.probe.split_file or "").expanduser()
        where = f"probe.split_file={path}"
        roles, unknown = splits.read_split_file(path, keys.tolist())
        if unknown:
            notes.append(
                f"{counted(unknown, f'key of {path} is', f'keys of {path} are')} not among the "
                "labelled rows of the store"
            )
        if unnamed := int((roles == "").sum()):
            notes.append(f"{counted(unnamed, 'labelled row')} that {path} does not name: left out")
    sides = {role: np.flatnonzero(roles == role) for role in ("train", "validation", "test")}
    for role in ("train", "test"):
        if not len(sides[role]):
            raise DataError(
                f"{where} names no labelled row of the store for {role}. Keys are those of the "
                f"store, such as {keys[0]!r}."
            )
    return splits.given(
        training.y,
        sides["train"],
        sides["validation"],
        sides["test"],
        config.probe.validation_share,
        config.seed,
        groups,
    )


_SAME = ("weights_sha256", "transform")
"""Attributes that two stores must have in common."""
_SAME_OF_A_LAYER = ("layer", "capture", "reduce")
"""Attributes that a layer must have in common in two stores."""


def _other_store(store: FeatureStore, path: str, layers: Sequence[str]) -> FeatureStore:
    """Open probe.test_store and check that its features are comparable.

    Raises:
        ConfigError: it is the same store.
        StoreMismatchError: model, transform or a layer differs.
    """
    other = FeatureStore(path, verify="rows")
    if other.root == store.root or other.attrs["fingerprint"] == store.attrs["fingerprint"]:
        raise ConfigError(
            f"probe.test_store={path} is the store that is trained on: its rows would be tested on "
            "themselves. Use probe.split."
        )
    wrong = [
        f"  {name}: {store.attrs[name]!r} and {other.attrs[name]!r}"
        for name in _SAME
        if store.attrs.get(name) != other.attrs.get(name)
    ]
    for layer in layers:
        mine, theirs = store[layer], other[layer]
        pairs: list[tuple[str, Any, Any]] = [("shape", mine.shape[1:], theirs.shape[1:])]
        pairs += [(name, mine.attrs.get(name), theirs.attrs.get(name)) for name in _SAME_OF_A_LAYER]
        wrong += [f"  {layer}, {name}: {a} and {b}" for name, a, b in pairs if a != b]
    if wrong:
        raise StoreMismatchError(
            f"features of {store.root} and {other.root} are not comparable:\n" + "\n".join(wrong)
        )
    return other
