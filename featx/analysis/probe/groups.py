"""Groups of rows that a split must not divide.

Boxes of one image, frames of one video, and rows that share a value in a column (a patient, a
slide) are not independent: a classifier that was trained on one of them recognises the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.labelled_rows import LabelledRows
from featx.sources import origin_of
from featx.types import NO_IMAGE

GroupNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Groups:
    """Group of each labelled row.

    Attributes:
        of_row: (n,) int64 in [0, num_groups).
        by: what the rows of a group share: 'image', 'video', the name of a column, or both.
        num_missing: rows without a value in the column, each of which is a group of its own.
    """

    of_row: GroupNumbers
    by: str
    num_missing: int = 0

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return int(self.of_row.max()) + 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """(num_groups,) number of rows of each group."""
        return np.bincount(self.of_row)

    def as_dict(self) -> dict[str, Any]:
        """Return the entry `groups` of probe.json as JSON types."""
        sizes = self.sizes
        return {
            "by": self.by,
            "groups": len(sizes),
            "largest": int(sizes.max()),
            "rows_without_value": self.num_missing,
        }


def row_groups(labelled: LabelledRows, column: str | None = None) -> Groups | None:
    """Group labelled rows by the image or video in their keys, and by a column.

    With both, rows are in one group if a chain of shared images, videos or values links them.

    Returns:
        the groups, or None if neither keys nor a column define any.
    """
    origins, kind = _origins(labelled)
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
    """Describe what occurs both in training rows and in test rows of another store.

    Returns:
        sentences for the notes of the result.
    """
    notes = []
    (ours, kind), (theirs, _) = _origins(training), _origins(testing)
    sums, their_sums = (rows.store.image_checksums[rows.rows] for rows in (training, testing))
    if kind != "video" and (sums > NO_IMAGE).all() and (their_sums > NO_IMAGE).all():
        if count := int(np.isin(their_sums, sums).sum()):
            notes.append(
                f"{count} test rows of probe.test_store are of the same images as training rows, "
                "byte for byte: the accuracy is too high"
            )
    elif count := int((both := np.isin(theirs, ours)).sum()):
        # Keys are relative to data.root, so equal keys in two stores may be different images.
        origins_text = f"{kind or 'key'}s"
        example = theirs[both][0].decode("utf-8", "replace")
        notes.append(
            f"{count} test rows of probe.test_store have {origins_text} that the training rows "
            f"have too, such as {example}: if they are the same images, the accuracy is too high"
        )
    if column is not None:
        (ours, _), (theirs, missing) = (
            _column_values(rows, column) for rows in (training, testing)
        )
        if count := int((both := np.isin(theirs, ours) & ~missing).sum()):
            notes.append(
                f"{count} test rows of probe.test_store have a value of {column} that training "
                f"rows have too, such as {theirs[both][0]}: the accuracy may be too high"
            )
    return notes


def divided_groups(
    groups: Groups, some: npt.NDArray[np.int64], others: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the groups with rows among both of two sets of places.

    Returns:
        (k,) int64 group numbers.
    """
    return np.intersect1d(groups.of_row[some], groups.of_row[others])


def _origins(labelled: LabelledRows) -> tuple[npt.NDArray[Any], str | None]:
    """Return the origin of each row."""
    origins = [origin_of(key) for key in labelled.store.key_bytes[labelled.rows].tolist()]
    kinds = {kind for _, kind in origins if kind is not None}
    kind = " or ".join(sorted(kinds)) or None
    return np.array([origin for origin, _ in origins], dtype=np.bytes_), kind


def _column_values(
    labelled: LabelledRows, column: str
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return the (n,) values of a column, and (n,) bool whether a row has none."""
    values = labelled.store.column(column)[labelled.rows]
    if values.dtype.kind == "f":
        return values, np.isnan(values)
    if values.dtype.kind == "U":
        return values, values == ""
    return values, np.zeros(len(values), dtype=bool)


def _connected_components(a: GroupNumbers, b: GroupNumbers) -> GroupNumbers:
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
