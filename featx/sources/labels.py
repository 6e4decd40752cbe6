"""Conversion of labels of data sets, numbers or names, to the labels and classes of a listing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from featx.errors import DataError

MAX_CLASS = 1_000_000
"""Largest number that counts as a class index."""

Labels = tuple[npt.NDArray[np.int64], tuple[str, ...]]
"""Labels (N,) int64, -1 for none, and the class names in the order of the indices."""


def from_numbers(values: npt.NDArray[np.integer], origin: str) -> Labels:
    """Use whole numbers as class indices; the name of each class is its number.

    Args:
        values: (N,) integers, -1 for no label.
        origin: origin of the labels, for error messages.

    Raises:
        DataError: a number is below -1 or above `MAX_CLASS`.
    """
    wrong = (values < -1) | (values > MAX_CLASS)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"{origin}: {int(values[row])} in row {row} is no class index (0 to {MAX_CLASS}, -1 "
            "for none). If the numbers are names of classes, write them as text."
        )
    top = int(values.max(initial=-1))
    return values.astype(np.int64), tuple(str(number) for number in range(top + 1))


def from_names(values: Iterable[str | None]) -> Labels:
    """Number class names in bytewise order; None and '' mean no label."""
    numbers: dict[str, int] = {}
    codes = np.fromiter((numbers.setdefault(v or "", len(numbers)) for v in values), dtype=np.int64)
    return renumber(np.array(list(numbers), dtype=object), codes)


def renumber(names: npt.NDArray[np.object_], codes: npt.NDArray[np.int64]) -> Labels:
    """Convert indices into any list of names to indices into the sorted names that are in use.

    Args:
        names: (C,) str objects; '' means no label.
        codes: (N,) int64 indices into `names`, -1 for no label.
    """
    used_codes = np.unique(codes[codes >= 0])
    used_names = sorted({names[i] for i in used_codes if names[i]}, key=os.fsencode)
    number_of_name = {name: i for i, name in enumerate(used_names)}
    table = np.array([*(number_of_name.get(name, -1) for name in names), -1], dtype=np.int64)
    return table[codes], tuple(used_names)


def from_indices(values: npt.NDArray[np.integer], names: Sequence[str], origin: str) -> Labels:
    """Combine class indices with class names that are known already.

    Args:
        values: (N,) integers, -1 for no label.
        names: class names in the order of the indices.
        origin: origin of the labels, for error messages.

    Raises:
        DataError: an index has no name.
    """
    labels, _ = from_numbers(values, origin)
    if len(labels) and labels.max() >= len(names):
        row = int(labels.argmax())
        raise DataError(f"{origin}: {int(labels[row])} in row {row}, of {len(names)} classes.")
    return labels, tuple(str(name) for name in names)


def from_values(values: Sequence[object], origin: str) -> Labels:
    """Convert labels of unknown type: whole numbers or names, with None for no label.

    Args:
        values: N labels.
        origin: origin of the labels, for error messages.

    Raises:
        DataError: the labels are of mixed or unsupported types.
    """
    kinds = {_kind(value) for value in values}
    if kinds <= {"none"}:
        return np.full(len(values), -1, dtype=np.int64), ()
    if kinds <= {"number", "none"}:
        numbers = [-1 if value is None else int(value) for value in values]  # type: ignore[call-overload]
        return from_numbers(np.array(numbers, dtype=np.int64), origin)
    if kinds <= {"name", "none"}:
        return from_names([None if value is None else str(value) for value in values])
    raise DataError(
        f"{origin}: found labels of kind {', '.join(sorted(kinds - {'none'}))}; expected whole "
        "numbers or names throughout, None where there is no label."
    )


def _kind(value: object) -> str:
    """Return 'none', 'name' or 'number' for a label, or its type's name if it is not supported.

    A number must have `__index__` and be whole: 1.0 is not a label, integers of NumPy and torch
    are.
    """
    if value is None:
        return "none"
    if isinstance(value, str):
        return "name"
    if isinstance(value, bool | np.bool_):
        return "number"
    try:
        is_whole = int(value) == value  # type: ignore[call-overload]
        has_index = hasattr(value, "__index__")
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return type(value).__name__
    return "number" if is_whole and has_index else type(value).__name__
