"""Splits of rows: at random, as given, or with another store for the test; groups stay whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe import splits
from featx.analysis.probe.given_split import given_split
from featx.analysis.probe.groups import Groups, overlap_notes, row_groups
from featx.analysis.probe.labelled_rows import LabelledRows
from featx.analysis.probe.other_store import groups_of_both
from featx.analysis.probe.split_checks import divided_group_notes
from featx.analysis.probe.splits import Split
from featx.config import Config
from featx.errors import counted

_FEW_GROUPS = 20
"""Number of groups of test rows below which the intervals of the bootstrap are too narrow."""


@dataclass(frozen=True)
class RowSplits:
    """Splits of rows, and their description.

    Attributes:
        groups: (n,) group of each row, or None if every row is a group of its own.
        splits: one split, or one per fold.
        settings: entries of probe.json that only this kind of split has.
        grouped: the groups and what they share, or None without groups.
        notes: sentences about rows that were left out or leak.
    """

    groups: npt.NDArray[np.int64] | None
    splits: list[Split]
    settings: dict[str, Any]
    grouped: Groups | None
    notes: list[str]

    def as_dict(self, config: Config) -> dict[str, Any]:
        """Return the entry `split` of probe.json as JSON types."""
        options = config.probe
        column = {} if options.label_column is None else {"label_column": options.label_column}
        return {
            "kind": options.split,
            **column,
            "validation_share": options.validation_share,
            **self.settings,
            "seed": config.seed,
            "groups": None if self.grouped is None else self.grouped.as_dict(),
            "fit": [len(split.fit) for split in self.splits],
            "validation_rows": [len(split.validation) for split in self.splits],
            "test_rows": [len(split.test) for split in self.splits],
        }


def split_rows(config: Config, training: LabelledRows) -> RowSplits:
    """Split the rows of one store, at random or as given."""
    options, notes = config.probe, list[str]()
    grouped = row_groups(training, options.group_column)
    # Groups of a single row each have no effect on splits.
    groups = None if grouped is None or grouped.num_groups == len(training.y) else grouped.of_row
    row_splits, settings = _splits(config, training, groups, notes)
    if options.split == "column" and grouped is not None:
        notes += divided_group_notes(training, grouped, row_splits[0])
    return RowSplits(groups, row_splits, settings, grouped, notes)


def split_by_store(config: Config, training: LabelledRows, testing: LabelledRows) -> RowSplits:
    """Return the split that trains on all rows of a store and tests all rows of another one."""
    options, count = config.probe, len(training.y)
    grouped = row_groups(training, options.group_column)
    groups = None if grouped is None or grouped.num_groups == count else grouped.of_row
    groups = groups_of_both(testing, options.group_column, groups, count)
    y = np.concatenate([training.y, testing.y])
    train, validation, test = np.arange(count), np.empty(0, np.int64), np.arange(count, len(y))
    split = splits.split_from_places(
        y, train, validation, test, options.validation_share, config.seed, groups
    )
    notes = [*testing.notes, *overlap_notes(training, testing, options.group_column)]
    settings = {"kind": "test_store", "test_store": str(testing.store.root)}
    return RowSplits(groups, [split], settings, grouped, notes)


def missing_group_notes(rows: RowSplits, column: str | None) -> list[str]:
    """Return a note about rows without a value in the column of the groups."""
    grouped = rows.grouped
    if grouped is None or not grouped.num_missing:
        return []
    return [
        f"{counted(grouped.num_missing, 'row has', 'rows have')} no value of {column}: each is "
        "a group of its own"
    ]


def few_group_notes(rows: RowSplits) -> list[str]:
    """Return a note about test rows of so few groups that their intervals are too narrow."""
    if rows.groups is None:
        return []
    tested = np.concatenate([split.test for split in rows.splits])
    num_groups = len(np.unique(rows.groups[tested]))
    if num_groups >= _FEW_GROUPS:
        return []
    return [
        f"the test rows are of {counted(num_groups, 'group')}; with fewer than {_FEW_GROUPS} the "
        "intervals are too narrow"
    ]


def _splits(
    config: Config,
    training: LabelledRows,
    groups: npt.NDArray[np.int64] | None,
    notes: list[str],
) -> tuple[list[Split], dict[str, Any]]:
    """Make the splits that probe.split describes."""
    options, seed = config.probe, config.seed
    if options.split == "column":
        options_of_split = {key: getattr(options, key) for key in ("split_file", "split_column")}
        settings = {key: value for key, value in options_of_split.items() if value is not None}
        return [given_split(config, training, groups, notes)], settings
    if options.split == "kfold":
        folds = options.folds or 5
        row_splits = splits.kfold(training.y, folds, options.validation_share, seed, groups)
        return row_splits, {"folds": folds}
    share = options.test_share or 0.2
    row_splits = [splits.holdout(training.y, share, options.validation_share, seed, groups)]
    return row_splits, {"test_share": share}
