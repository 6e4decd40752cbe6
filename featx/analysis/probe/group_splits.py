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
    """Rows of each class in each group.

    Attributes:
        local: (n,) group of each place, in [0, G).
        starts: (G + 1,) start of each group's entries in `classes` and `counts`.
        classes: (entries,) class of an entry.
        counts: (entries,) rows of that class in the group.
        rows_of_class: (C,) rows of each class.
        groups_of_class: (C,) groups that contain each class.
    """

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
    """Select whole groups that contain about a share of the rows of each class.

    For each class that lies in two or more groups, at least one group is selected and one is not.

    Args:
        y: (n,) class of each place.
        groups: (n,) group of each place.
        share: wanted share of the rows of each class.
        rng: determines the order in which groups are considered.

    Returns:
        (n,) bool, whether a place is selected.
    """
    found = _contents(y, groups)
    wanted = share * found.rows_of_class
    have = np.zeros(len(wanted))
    inside = np.zeros(len(wanted), dtype=np.int64)  # chosen groups of each class
    chosen = np.zeros(found.num_groups, dtype=bool)

    def cost(classes: Numbers, counts: Numbers) -> float:
        """Return by how much the cost changes with a group; negative counts remove it."""
        more = counts * (2 * (have[classes] - wanted[classes]) + counts)
        return round(float((more / found.rows_of_class[classes] ** 2).sum()), 12)

    def may_come(classes: Numbers) -> bool:
        """Return whether another group of each class remains outside the selection."""
        return bool((found.groups_of_class[classes] - inside[classes] > 1).all())

    def turn(group: int, classes: Numbers, counts: Numbers) -> None:
        """Add a group to the selection, or remove it."""
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
            continue  # selected together with an earlier class
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
    """Assign each group of rows to a fold.

    Groups are assigned by falling size, in random order among equal sizes. Each goes to the fold
    that has the fewest rows of its classes, but never to a fold that would then hold all groups of
    a class.

    Args:
        y: (n,) class of each place.
        groups: (n,) group of each place.
        folds: number of folds.
        rng: determines the order of groups of equal size.

    Returns:
        (n,) fold of each place; -1 if it is never tested.
    """
    found = _contents(y, groups)
    fold_of = np.full(found.num_groups, -1)
    rows, totals = np.zeros((folds, len(found.rows_of_class))), np.zeros(folds)
    left = found.groups_of_class.copy()
    only_in = np.full(len(left), -1)  # fold with all groups of a class so far, -2: several
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
