"""Task of a probe: labelled rows, and the splits into rows to fit and to test on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.labelled_rows import LabelledRows, labelled_rows, match_classes
from featx.analysis.probe.other_store import open_other_store
from featx.analysis.probe.row_splits import (
    few_group_notes,
    missing_group_notes,
    split_by_store,
    split_rows,
)
from featx.analysis.probe.split_checks import check_split, small_classes
from featx.analysis.probe.splits import Split
from featx.config import Config
from featx.errors import DataError
from featx.store import FeatureStore


@dataclass(frozen=True)
class ProbeTask:
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

    training: LabelledRows
    testing: LabelledRows | None
    y: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64] | None
    splits: list[Split]
    seed: int
    about: dict[str, Any]
    notes: list[str]

    @property
    def keys(self) -> npt.NDArray[np.str_]:
        """(n,) key of each place, training rows first."""
        return np.concatenate([each.store.keys[each.rows] for each in self._stores])

    @property
    def image_checksums(self) -> npt.NDArray[np.uint64]:
        """(n,) image checksum of each place, training rows first."""
        return np.concatenate([each.store.image_checksums[each.rows] for each in self._stores])

    @property
    def _stores(self) -> list[LabelledRows]:
        """Rows of the store, then those of the other one, if any."""
        return [self.training] if self.testing is None else [self.training, self.testing]


def make_task(config: Config, store: FeatureStore, layers: Sequence[str]) -> ProbeTask:
    """Select the rows, their classes and the splits."""
    options = config.probe
    training = labelled_rows(store, options.label_column)
    if len(training.classes) < 2:
        raise DataError(
            f"{store.root} has rows of the class {training.classes[0]!r} only; a probe needs two "
            "classes or more."
        )
    y, testing = training.y, None
    if options.test_store is None:
        rows = split_rows(config, training)
        if options.split != "column":
            rows.notes.extend(small_classes(training, rows.groups, rows.settings.get("folds", 2)))
    else:
        other = open_other_store(store, options.test_store, layers)
        testing = match_classes(labelled_rows(other, options.label_column), training.classes)
        y = np.concatenate([y, testing.y])
        rows = split_by_store(config, training, testing)
    grouped = rows.grouped
    unit = "row" if rows.groups is None or grouped is None else f"group ({grouped.by})"
    for split in rows.splits:
        check_split(split, y, training.classes, unit)
    notes = [
        *training.notes,
        *rows.notes,
        *missing_group_notes(rows, options.group_column),
        *few_group_notes(rows),
    ]
    about = rows.as_dict(config)
    return ProbeTask(training, testing, y, rows.groups, rows.splits, config.seed, about, notes)
