"""Groups of rows that a split must not divide, and the selection of whole groups.

Boxes of one image, frames of one video, and rows that share a value in a column (a patient, a
slide) are not independent: a classifier that was trained on one of them recognises the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.labelled_rows import LabelledRows
from featx.analysis.probe.metrics import Ints, Matrix
from featx.errors import counted
from featx.sources import origins_of
from featx.types import NO_IMAGE, Array


@dataclass(frozen=True)
class Groups:
    """Group of each labelled row.

    Attributes:
        of_row: (n,) int64 in [0, num_groups).
        by: what the rows of a group share: 'image', 'video', the name of a column, or both.
        num_missing: rows without a value in the column, each of which is a group of its own.
    """

    of_row: Ints
    by: str
    num_missing: int = 0

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return int(self.of_row.max()) + 1

    def as_dict(self) -> dict[str, object]:
        """Return the entry `groups` of probe.json as JSON types."""
        sizes = np.bincount(self.of_row)
        return {
            "by": self.by,
            "groups": len(sizes),
            "largest": int(sizes.max()),
            "rows_without_value": self.num_missing,
        }


def row_groups(labelled: LabelledRows, column: str | None = None) -> Groups | None:
    """Group labelled rows by the image or video in their keys, and by a column.

    With both, rows are in one group if a chain of shared images, videos or values links them.
    Return None if neither keys nor a column define any.
    """
    origins, kind = origins_of(labelled.store.key_bytes[labelled.rows])
    if column is None:
        return None if kind is None else Groups(np.unique(origins, return_inverse=True)[1], kind)
    values, is_missing = _column_values(labelled, column)
    numbers = np.unique(values, return_inverse=True)[1].astype(np.int64)
    num_missing = int(is_missing.sum())
    numbers[is_missing] = len(values) + np.arange(num_missing)
    numbers = np.unique(numbers, return_inverse=True)[1]
    if kind is None:
        return Groups(numbers, column, num_missing)
    joined = _connected_components(np.unique(origins, return_inverse=True)[1], numbers)
    return Groups(joined, f"{kind} and {column}", num_missing)


def overlap_notes(training: LabelledRows, testing: LabelledRows, column: str | None) -> list[str]:
    """Return notes about what occurs both in training rows and in test rows of another store."""
    notes = []
    (ours, kind), (theirs, _) = (
        origins_of(rows.store.key_bytes[rows.rows]) for rows in (training, testing)
    )
    sums, their_sums = (rows.store.image_checksums[rows.rows] for rows in (training, testing))
    if kind != "video" and (sums > NO_IMAGE).all() and (their_sums > NO_IMAGE).all():
        if count := int(np.isin(their_sums, sums).sum()):
            notes.append(
                f"{_test_rows(count, 'is', 'are')} of the same images as training rows, byte for "
                "byte: the accuracy is too high"
            )
    elif count := int((both := np.isin(theirs, ours)).sum()):
        # Keys are relative to data.root, so equal keys in two stores may be different images.
        origins_text = f"{kind or 'key'}s"
        example = theirs[both][0].decode("utf-8", "replace")
        notes.append(
            f"{_test_rows(count, 'has', 'have')} {origins_text} that the training rows "
            f"have too, such as {example}: if they are the same images, the accuracy is too high"
        )
    if column is not None:
        (ours, _), (theirs, missing) = (
            _column_values(rows, column) for rows in (training, testing)
        )
        if count := int((both := np.isin(theirs, ours) & ~missing).sum()):
            notes.append(
                f"{_test_rows(count, 'has', 'have')} a value of {column} that training rows "
                f"have too, such as {theirs[both][0]}: the accuracy may be too high"
            )
    return notes


def _test_rows(count: int, verb: str, verbs: str) -> str:
    rows = counted(count, "test row", "test rows")
    return f"{rows} of probe.test_store {verb if count == 1 else verbs}"


def _column_values(labelled: LabelledRows, column: str) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return the (n,) values of a column, and (n,) bool whether a row has none."""
    values = labelled.store.column(column)[labelled.rows]
    if values.dtype.kind == "f":
        return values, np.isnan(values)
    if values.dtype.kind == "U":
        return values, values == ""
    return values, np.zeros(len(values), dtype=bool)


def _connected_components(a: Ints, b: Ints) -> Ints:
    """Return the (n,) connected components of rows that share a number in `a` or in `b`.

    Components are numbered by their first rows.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # The numbers are the nodes of a graph, and each row is an edge between its two.
    others = b + int(a.max()) + 1
    num_nodes = int(others.max()) + 1
    graph = coo_array((np.ones(len(a)), (a, others)), shape=(num_nodes, num_nodes))
    component = connected_components(graph, directed=False)[1][a]
    _, first_rows, of_row = np.unique(component, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first_rows))[of_row]


_PASSES = 4
"""Maximum number of passes over all groups; a later pass can remove groups again."""


class _Contents:
    """Rows of each class in each group."""

    def __init__(self, y: Ints, groups: Ints) -> None:
        group_ids, self.local = np.unique(groups, return_inverse=True)
        self.num_groups, num_classes = len(group_ids), int(y.max()) + 1
        pairs, self._counts = np.unique(self.local * num_classes + y, return_counts=True)
        group_of, self._classes = np.divmod(pairs, num_classes)
        self._starts = np.searchsorted(group_of, np.arange(self.num_groups + 1))
        rows_of_class = np.maximum(np.bincount(y, minlength=num_classes), 1)
        self.rows_of_class: Matrix = rows_of_class.astype(np.float64)
        self.groups_of_class = np.bincount(self._classes, minlength=num_classes)

    def of(self, group: int) -> tuple[Ints, Ints]:
        """Return the classes of a group, and the rows of each."""
        span = slice(self._starts[group], self._starts[group + 1])
        return self._classes[span], self._counts[span]

    def in_order(self, order: Array) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield groups in an order, each with its classes and the rows of each."""
        for group in order.tolist():
            yield group, *self.of(group)


class _Selection:
    """Groups that are selected so far."""

    def __init__(self, contents: _Contents, share: float) -> None:
        self._contents = contents
        self._wanted = share * contents.rows_of_class
        self.chosen = np.zeros(contents.num_groups, dtype=bool)
        self.rows = np.zeros(len(self._wanted))
        self.groups = np.zeros(len(self._wanted), dtype=np.int64)

    def improve(self, order: Ints) -> None:
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

    def add_one_of(self, candidates: Ints) -> None:
        """Add the group that costs least, the first of equal ones, if one may be added."""
        options = [
            (self._cost(classes, counts), place, group)
            for place, (group, classes, counts) in enumerate(self._contents.in_order(candidates))
            if self._may_come(classes)
        ]
        if options:
            group = min(options)[2]
            self._turn(group, *self._contents.of(group))

    def _cost(self, classes: Ints, counts: Ints) -> float:
        """Return by how much the cost changes with a group; negative counts remove it."""
        more = counts * (2 * (self.rows[classes] - self._wanted[classes]) + counts)
        return round(float((more / self._contents.rows_of_class[classes] ** 2).sum()), 12)

    def _may_come(self, classes: Ints) -> bool:
        """Return whether another group of each class remains outside the selection."""
        return bool((self._contents.groups_of_class[classes] - self.groups[classes] > 1).all())

    def _turn(self, group: int, classes: Ints, counts: Ints) -> None:
        sign = -1 if self.chosen[group] else 1
        self.chosen[group] = not self.chosen[group]
        self.rows[classes] += sign * counts
        self.groups[classes] += sign


def share_of_groups(
    y: Ints, groups: Ints, share: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Select whole groups that contain about a share of the rows of each class; return (n,) bool,
    whether a place is selected.

    A class that lies in two or more groups has at least one that is not selected, and one that is
    unless that would select the last group of another class.
    """
    contents = _Contents(y, groups)
    selection = _Selection(contents, share)
    selection.improve(rng.permutation(contents.num_groups))
    for label in np.flatnonzero((selection.rows == 0) & (contents.groups_of_class > 1)).tolist():
        if not selection.groups[label]:  # not selected together with an earlier class
            selection.add_one_of(rng.permutation(np.unique(contents.local[y == label])))
    return selection.chosen[contents.local]


def fold_of_groups(y: Ints, groups: Ints, folds: int, rng: np.random.Generator) -> Ints:
    """Assign each group of rows to a fold. Return the (n,) fold of each place, -1 if it is never
    tested.

    Groups are assigned by falling size, in random order among equal sizes. Each goes to the fold
    that has the fewest rows of its classes, but never to a fold that would then hold all groups of
    a class.
    """
    contents = _Contents(y, groups)
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
