"""Stratified choices of whole groups: a share of the rows of each class, or folds.

Both are greedy and decided by the seed. A group counts for a class c with n_c rows; a choice is
judged by the sum over classes of (rows of c - wanted rows of c)^2 / (all rows of c)^2, so that a
rare class counts as much as a frequent one. A class that lies in one group is never chosen for
testing: nothing would be left to learn it from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_PASSES = 4
"""Looks at every group, at the most; a later one takes groups out again that are too many."""


@dataclass(frozen=True)
class _Contents:
    """Rows of each class in each group, for some places.

    Attributes:
        local: (n,) group of each place, in [0, G).
        starts: (G + 1,) where the entries of each group begin in the next two.
        classes, counts: (entries,) a class of the group and its rows.
        rows_of_class, groups_of_class: (C,) in all places.
    """

    local: Numbers
    starts: Numbers
    classes: Numbers
    counts: Numbers
    rows_of_class: npt.NDArray[np.float64]
    groups_of_class: Numbers

    @property
    def num_groups(self) -> int:
        return len(self.starts) - 1

    def of(self, group: int) -> tuple[Numbers, Numbers]:
        """Classes of a group, and rows of each."""
        span = slice(self.starts[group], self.starts[group + 1])
        return self.classes[span], self.counts[span]

    def in_order(self, order: npt.NDArray[Any]) -> Iterator[tuple[int, Numbers, Numbers]]:
        """Each group with its classes and the rows of each."""
        for group in order.tolist():
            yield group, *self.of(group)


def _contents(y: Numbers, groups: Numbers) -> _Contents:
    found, local = np.unique(groups, return_inverse=True)
    num_classes = int(y.max()) + 1
    pairs, counts = np.unique(local * num_classes + y, return_counts=True)
    group_of, classes = np.divmod(pairs, num_classes)
    return _Contents(
        local,
        np.searchsorted(group_of, np.arange(len(found) + 1)),
        classes,
        counts,
        np.maximum(np.bincount(y, minlength=num_classes), 1).astype(np.float64),
        np.bincount(classes, minlength=num_classes),
    )


def share_of_groups(
    y: Numbers, groups: Numbers, share: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Whole groups with about a share of the rows of each class.

    Of each class that lies in two groups or more, at least one is chosen and one is not.

    Args:
        y, groups: (n,) class and group of each place.
        share: of the rows of each class.
        rng: decides the order in which groups are looked at.

    Returns:
        (n,) whether a place is chosen.
    """
    found = _contents(y, groups)
    wanted = share * found.rows_of_class
    have = np.zeros(len(wanted))
    inside = np.zeros(len(wanted), dtype=np.int64)  # chosen groups of each class
    chosen = np.zeros(found.num_groups, dtype=bool)

    def cost(classes: Numbers, counts: Numbers) -> float:
        """By how much the sum of squares grows with a group; counts are negative to take it out."""
        more = counts * (2 * (have[classes] - wanted[classes]) + counts)
        return round(float((more / found.rows_of_class[classes] ** 2).sum()), 12)

    def may_come(classes: Numbers) -> bool:
        return bool((found.groups_of_class[classes] - inside[classes] > 1).all())

    def turn(group: int, classes: Numbers, counts: Numbers) -> None:
        sign = -1 if chosen[group] else 1
        chosen[group] = not chosen[group]
        have[classes] += sign * counts
        inside[classes] += sign

    order = rng.permutation(found.num_groups)
    for _ in range(_PASSES):
        changed = False
        for group, classes, counts in found.in_order(order):
            if chosen[group]:
                better = (inside[classes] > 1).all() and cost(classes, -counts) < 0
            else:
                better = may_come(classes) and cost(classes, counts) < 0
            if better:
                turn(group, classes, counts)
                changed = True
        if not changed:
            break
    for label in np.flatnonzero((have == 0) & (found.groups_of_class > 1)).tolist():
        if inside[label]:
            continue  # a group chosen for an earlier class brought it along
        with_label = rng.permutation(np.unique(found.local[y == label]))
        options = [
            (cost(classes, counts), place, group)
            for place, (group, classes, counts) in enumerate(found.in_order(with_label))
            if may_come(classes)
        ]
        if options:
            group = min(options)[2]
            turn(group, *found.of(group))
    return chosen[found.local]


def fold_of_groups(y: Numbers, groups: Numbers, folds: int, rng: np.random.Generator) -> Numbers:
    """A fold for each row, the same for all rows of a group; -1 where it is never tested.

    Large groups come first, equal ones in random order. Each goes to the fold that has the fewest
    rows of its classes, and never to one that would then hold all groups of a class.

    Args:
        y, groups: (n,) class and group of each place.
        folds: how many.
        rng: decides the order among groups of one size.
    """
    found = _contents(y, groups)
    fold_of = np.full(found.num_groups, -1)
    rows, totals = np.zeros((folds, len(found.rows_of_class))), np.zeros(folds)
    left = found.groups_of_class.copy()
    only_in = np.full(len(left), -1)  # the one fold with all groups of a class so far; -2: several
    order = rng.permutation(found.num_groups)
    sizes = np.bincount(found.local)
    order = order[np.argsort(-sizes[order], kind="stable")]
    waiting = []
    for group, classes, counts in found.in_order(order):
        if (found.groups_of_class[classes] == 1).any():
            only_in[classes] = -2  # trained on in every fold
            left[classes] -= 1
        else:
            waiting.append((group, classes, counts))
    for group, classes, counts in waiting:
        weights = counts / found.rows_of_class[classes] ** 2
        costs = np.round(rows[:, classes] @ weights, 12)
        for label in classes[left[classes] == 1].tolist():
            if only_in[label] >= 0:
                costs[only_in[label]] = np.inf
        fold = int(np.lexsort((totals, costs))[0])
        fold_of[group] = fold
        rows[fold, classes] += counts
        totals[fold] += counts.sum()
        left[classes] -= 1
        before = only_in[classes]
        only_in[classes] = np.where((before == -1) | (before == fold), fold, -2)
    return fold_of[found.local]
