"""What is told from what: the labelled rows of a store, and which of them are fitted and tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.config import Config
from featx.errors import ConfigError, DataError, StoreMismatchError
from featx.probe import splits
from featx.probe.data import Labelled, labelled_rows, matched_by_name
from featx.probe.splits import Split
from featx.store.reader import FeatureStore


@dataclass(frozen=True)
class Task:
    """What is told from what, the same for all layers.

    Attributes:
        training: rows of the store.
        testing: rows of another store, None where they are of the same one.
        y: (n,) class of each place, training rows first.
        splits: one, or one a fold.
        about: the split in JSON types.
        notes: what was left out.
    """

    training: Labelled
    testing: Labelled | None
    y: npt.NDArray[np.int64]
    splits: list[Split]
    about: dict[str, Any]
    notes: list[str]


def make_task(config: Config, store: FeatureStore, layers: Sequence[str]) -> Task:
    """The rows, their classes and the splits.

    Raises:
        FeatxError: too few classes or rows, or a split that leaves a side empty.
    """
    options, seed = config.probe, config.seed
    training = labelled_rows(store, options.label_column)
    if len(training.classes) < 2:
        raise DataError(
            f"{store.root} has rows of the class {training.classes[0]!r} only; a probe needs two "
            "classes or more."
        )
    y, notes, testing = training.y, list(training.notes), None
    alone = int((np.bincount(y) == 1).sum())
    about: dict[str, Any] = {"kind": options.split, "validation": options.validation}
    if options.label_column is not None:
        about |= {"label_column": options.label_column}
    if options.test_store is not None:
        other = _other_store(store, options.test_store, layers)
        testing = matched_by_name(labelled_rows(other, options.label_column), training.classes)
        notes += testing.notes
        every = np.arange(len(y))
        y = np.concatenate([y, testing.y])
        none = np.empty(0, np.int64)
        found = [
            splits.given(y, every, none, np.arange(len(every), len(y)), options.validation, seed)
        ]
        about |= {"kind": "test_store", "test_store": str(testing.store.root)}
    else:
        found, settings = _splits_of_one_store(config, training, notes)
        about |= settings
    if alone and testing is None and options.split != "column":
        notes.append(f"{alone} classes with a single row are trained on and never tested")
    for split in found:
        _check_split(split, y, training.classes)
    about |= {
        "seed": seed,
        "fit": [len(split.fit) for split in found],
        "validation_rows": [len(split.validation) for split in found],
        "test_rows": [len(split.test) for split in found],
    }
    return Task(training, testing, y, found, about, notes)


def _splits_of_one_store(
    config: Config, training: Labelled, notes: list[str]
) -> tuple[list[Split], dict[str, Any]]:
    """The splits as probe.split says, and what probe.json says of them; notes are added to."""
    options, seed = config.probe, config.seed
    if options.split == "column":
        given = {key: getattr(options, key) for key in ("split_file", "split_column")}
        named = {key: value for key, value in given.items() if value is not None}
        return [_column_split(config, training, notes)], named
    if options.split == "kfold":
        folds = options.folds or 5
        return splits.kfold(training.y, folds, options.validation, seed), {"folds": folds}
    share = options.test or 0.2
    return [splits.holdout(training.y, share, options.validation, seed)], {"test": share}


def _check_split(split: Split, y: npt.NDArray[np.int64], classes: Sequence[str]) -> None:
    if not len(split.test):
        raise DataError(
            "no row is left to test on: every class has a single row. A probe needs more pictures."
        )
    if not len(split.validation):
        raise DataError(
            "no row is left to choose strengths on: every class has a single row to train on. A "
            "probe needs more pictures of a class."
        )
    if len(np.unique(y[split.fit])) < 2:
        raise DataError("the training rows are of one class only; a probe needs two or more.")
    unseen = np.setdiff1d(y[split.test], y[split.train])
    if len(unseen):
        names = ", ".join(classes[label] for label in unseen[:5].tolist())
        raise DataError(
            f"{len(unseen)} classes are tested and not trained on, such as {names}. Put rows of "
            "them among the training rows, or leave them out."
        )


def _column_split(config: Config, training: Labelled, notes: list[str]) -> Split:
    keys = training.store.keys[training.rows]
    if (column := config.probe.split_column) is not None:
        where = f"probe.split_column={column}"
        roles = splits.roles_of(training.store.column(column)[training.rows], where)
        if unnamed := int((roles == "").sum()):
            notes.append(f"{unnamed} labelled rows for which {column} is empty are left out")
    else:
        path = Path(config.probe.split_file or "").expanduser()
        where = f"probe.split_file={path}"
        roles, unknown = splits.read_split_file(path, keys.tolist())
        if unknown:
            notes.append(f"{unknown} keys of {path} are not among the labelled rows of the store")
        if unnamed := int((roles == "").sum()):
            notes.append(f"{unnamed} labelled rows that {path} does not name are left out")
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
        config.probe.validation,
        config.seed,
    )


_SAME = ("weights_sha256", "transform")
_SAME_OF_A_LAYER = ("layer", "capture", "reduce")


def _other_store(store: FeatureStore, path: str, layers: Sequence[str]) -> FeatureStore:
    """probe.test_store, whose features have to mean the same."""
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
