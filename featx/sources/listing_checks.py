"""Checks of what a source has listed: its keys, labels, names of classes, and columns."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from featx.config import column_name_problem
from featx.errors import DataError, counted
from featx.types import Listing

MAX_CLASS = 1_000_000
"""Largest number that counts as a class index."""

_WARNINGS = 3
"""Largest number of pairs of similar classes that are named."""


def check_listing(listing: Listing) -> None:
    """Check types, shapes, order, classes and columns of what a source has listed."""
    if not isinstance(listing, Listing):
        raise DataError(
            f"listing() returned {type(listing).__name__}; expected a featx.types.Listing."
        )
    keys, labels = listing.keys, listing.labels
    if not (isinstance(keys, np.ndarray) and keys.dtype.kind == "S" and keys.ndim == 1):
        raise DataError("listing().keys: expected an array (N,) of fixed-length bytes.")
    if not len(keys):
        raise DataError("listing() has no rows.")
    if not (isinstance(labels, np.ndarray) and labels.shape == keys.shape):
        raise DataError(f"listing().labels: expected an array of shape {keys.shape}, int64.")
    if not (keys[1:] > keys[:-1]).all():
        raise DataError("listing().keys: expected different keys in bytewise order.")
    check_indices(labels, listing.classes, "listing().labels")
    origin, columns = "listing().columns", listing.columns
    if problem := column_name_problem(list(columns)):
        raise DataError(f"{origin}: {problem}")
    if list(columns) != sorted(columns):
        raise DataError(f"{origin}: expected columns in the order of their names.")
    for name, values in columns.items():
        fits = isinstance(values, np.ndarray) and values.shape == keys.shape
        if not fits or not (values.dtype.kind in "Sb" or values.dtype.str in ("<i8", "<f8")):
            raise DataError(
                f"{origin}: column {name}: expected an array ({len(keys)},) of int64, float64, "
                "bool or fixed-length bytes."
            )


def check_indices(labels: npt.NDArray[np.integer], names: Sequence[str], origin: str) -> None:
    """Raise DataError unless every label is -1 or the index of a class."""
    refuse_first(labels < -1, labels, origin)
    if len(labels) and labels.max() >= len(names):
        row = int(labels.argmax())
        raise DataError(f"{origin}: {int(labels[row])} in row {row}, of {len(names)} classes.")


def refuse_first(
    is_wrong: npt.NDArray[np.bool_],
    values: Sequence[object] | npt.NDArray[np.integer],
    origin: str,
) -> None:
    """Raise DataError for the first value that is wrong, if there is one."""
    if is_wrong.any():
        row = int(np.flatnonzero(is_wrong)[0])
        raise DataError(
            f"{origin}: {values[row]} in row {row} is no class index (a whole number from 0 to "
            f"{MAX_CLASS}, -1 for none). If the numbers are names of classes, write them as text "
            "that is no number, such as c7."
        )


def check_class_names(names: Iterable[str]) -> None:
    """Refuse names of classes that a store would give back as others.

    Raises DataError if a name contains NUL, or is no text.
    """
    for name in names:
        if re.search("[\0\ud800-\udc7f\udd00-\udfff]", name):
            raise DataError(
                f"the class {name!r} contains NUL or half of a character, which a store cannot "
                "hold. Give it another name."
            )


def similar_names(classes: Sequence[str]) -> list[str]:
    """Return warnings of classes whose names differ only by case, blanks or Unicode's form."""
    first: dict[str, str] = {}
    warnings = []
    for name in classes:
        same = unicodedata.normalize("NFC", " ".join(name.split()).casefold())
        if (other := first.setdefault(same, name)) != name:
            warnings.append(
                f"{other!a} and {name!a} are two classes, whose names differ only by case, blanks "
                "or the form of their characters"
            )
    if (num_more := len(warnings) - _WARNINGS) > 0:
        names = counted(num_more, "more name of a class is", "more names of classes are")
        warnings[_WARNINGS:] = [f"{names} as similar"]
    return warnings
