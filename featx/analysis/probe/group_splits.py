"""Stratified selection of whole groups: a share of the rows of each class, or folds.

Both algorithms are greedy and deterministic for a seed. The cost of a selection is the sum over
classes c of (selected rows of c - wanted rows of c)^2 / (all rows of c)^2, so a rare class counts
as much as a frequent one. A class that lies in a single group is never selected for testing,
because no rows would remain to learn it from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_PASSES = 4
"""Maximum number of passes over all groups; a later pass can remove groups again."""


@dataclass(frozen=True)
class _Contents:
    """Rows of each class in each group."""

    local: Numbers
    starts: Numbers
    classes: Numbers
    counts: Numbers
    rows_of_class: npt.NDArray[np.float64]
    groups_of_class: Numbers

    @property
    def num_groups(self) -> int:
        """G, the number of groups."""
        return len(self.starts) - 1

    def of(self, group: int) -> tuple[Numbers, Numbers]:
        """Return the classes of a group, and the rows of each."""
        span = slice(self.starts[group], self.starts[group + 1])
        return self.classes[span], self.counts[span]

    def in_order(self, order: npt.NDArray[Any]) -> Iterator[tuple[int, Numbers, Numbers]]:
        """Yield groups in an order, each with its classes and the rows of each."""
        for group in order.tolist():
            yield group, *self.of(group)


def _contents(y: Numbers, groups: Numbers) -> _Contents:
    """Count the rows of each class in each group."""
    group_ids, local = np.unique(groups, return_inverse=True)
    num_classes = int(y.max()) + 1
    pairs, counts = np.unique(local * num_classes + y, return_counts=True)
    group_of, classes = np.divmod(pairs, num_classes)
    return _Contents(
        local,
        np.searchsorted(group_of, np.arange(len(group_ids) + 1)),
        classes,
        counts,
        np.maximum(np.bincount(y, minlength=num_classes), 1).astype(np.float64),
        np.bincount(classes, minlength=num_classes),
    )


class _Selection:
    """Groups that are selected so far."""

    def __init__(self, contents: _Contents, share: float) -> None:
        self._contents = contents
        self._wanted = share * contents.rows_of_class
        self.chosen = np.zeros(contents.num_groups, dtype=bool)
        self.rows = np.zeros(len(self._wanted))
        self.groups = np.zeros(len(self._wanted), dtype=np.int64)

    def improve(self, order: npt.NDArray[np.int64]) -> None:
        """Add or remove single groups in an order, as long as that lowers the cost."""
        for _ in range(_PASSES):
            changed = False
            for group, classes, counts in self._contents.in_order(order):
                if self.chosen[group]:
                    better = (self.groups[classes] > 1).all() and self._cost(classes, -counts) < 0
                else:
                    better = self._may_come(classes) and self._cost(classes, counts) < 0
                if better:
                    self._turn(group, classes, counts)
                    changed = True
            if not changed:
                break

    def add_one_of(self, candidates: npt.NDArray[np.int64]) -> None:
        """Add the group that costs least, the first of equal ones, if one may be added."""
        options = [
            (self._cost(classes, counts), place, group)
            for place, (group, classes, counts) in enumerate(self._contents.in_order(candidates))
            if self._may_come(classes)
        ]
        if options:
            group = min(options)[2]
            self._turn(group, *self._contents.of(group))

    def _cost(self, classes: Numbers, counts: Numbers) -> float:
        """Return by how much the cost changes with a group; negative counts remove it."""
        more = counts * (2 * (self.rows[classes] - self._wanted[classes]) + counts)
        return round(float((more / self._contents.rows_of_class[classes] ** 2).sum()), 12)

    def _may_come(self, classes: Numbers) -> bool:
        """Return whether another group of each class remains outside the selection."""
        return bool((self._contents.groups_of_class[classes] - self.groups[classes] > 1).all())

    def _turn(self, group: int, classes: Numbers, counts: Numbers) -> None:
        """Add a group to the selection, or remove it."""
        sign = -1 if self.chosen[group] else 1
        self.chosen[group] = not self.chosen[group]
        self.rows[classes] += sign * counts
        self.groups[classes] += sign


def share_of_groups(
    y: Numbers, groups: Numbers, share: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Select whole groups that contain about a share of the rows of each class.

    For each class that lies in two or more groups, at least one group is selected and one is not.

    Returns:
        (n,) bool, whether a place is selected.
    """
    contents = _contents(y, groups)
    selection = _Selection(contents, share)
    selection.improve(rng.permutation(contents.num_groups))
    for label in np.flatnonzero((selection.rows == 0) & (contents.groups_of_class > 1)).tolist():
        if not selection.groups[label]:  # not selected together with an earlier class
            selection.add_one_of(rng.permutation(np.unique(contents.local[y == label])))
    return selection.chosen[contents.local]


def fold_of_groups(y: Numbers, groups: Numbers, folds: int, rng: np.random.Generator) -> Numbers:
    """Assign each group of rows to a fold.

    Groups are assigned by falling size, in random order among equal sizes. Each goes to the fold
    that has the fewest rows of its classes, but never to a fold that would then hold all groups of
    a class.

    Returns:
        (n,) fold of each place; -1 if it is never tested.
    """
    contents = _contents(y, groups)
    fold_of = np.full(contents.num_groups, -1)
    rows, totals = np.zeros((folds, len(contents.rows_of_class))), np.zeros(folds)
    unassigned = contents.groups_of_class.copy()
    only_in = np.full(len(unassigned), -1)  # fold with all groups of a class so far, -2: several
    order = rng.permutation(contents.num_groups)
    sizes = np.bincount(contents.local)
    order = order[np.argsort(-sizes[order], kind="stable")]
    waiting = []
    for group, classes, counts in contents.in_order(order):
        if (contents.groups_of_class[classes] == 1).any():
            only_in[classes] = -2  # trained on in every fold
            unassigned[classes] -= 1
        else:
            waiting.append((group, classes, counts))
    for group, classes, counts in waiting:
        weights = counts / contents.rows_of_class[classes] ** 2
        costs = np.round(rows[:, classes] @ weights, 12)
        for label in classes[unassigned[classes] == 1].tolist():
            if only_in[label] >= 0:
                costs[only_in[label]] = np.inf
        fold = int(np.lexsort((totals, costs))[0])
        fold_of[group] = fold
        rows[fold, classes] += counts
        totals[fold] += counts.sum()
        unassigned[classes] -= 1
        old_only_in = only_in[classes]
        only_in[classes] = np.where((old_only_in == -1) | (old_only_in == fold), fold, -2)
    return fold_of[contents.local]
