"""Conversion of labels of data sets, numbers or names, to the labels and classes of a listing.

The rules are the same for every source: docs/data.md, "Labels and names".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from featx.base import name_bytes
from featx.errors import DataError, counted, nearest
from featx.sources.listing_checks import MAX_CLASS, check_indices, refuse_first
from featx.sources.table_columns import AS_NO_LABEL, AS_VALUE, MISSING_MARKS, warning_of_marks
from featx.types import Array

_BOOLEAN = re.compile(r"[Tt]rue|TRUE|[Ff]alse|FALSE")
_WHOLE = re.compile(r"[-+]?\d{1,300}(\.0*)?", re.ASCII)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


_LABEL_WORDS = frozenset(
    {
        "label",
        "labels",
        "class",
        "classes",
        "cls",
        "category",
        "categories",
        "target",
        "targets",
        "y",
    }
)
"""Words of the names of columns and datasets that may hold labels."""


class Labels(NamedTuple):
    """Labels as a listing holds them.

    Attributes:
        labels: (N,) int64, -1 for none.
        classes: class names in the order of the indices.
        warnings: sentences about labels that are probably not meant so.
    """

    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @classmethod
    def none(cls, count: int) -> Labels:
        """Return the labels of `count` rows without a label."""
        return cls(np.full(count, -1, dtype=np.int64), ())


def from_numbers(
    values: Array,
    origin: str,
    missing: npt.NDArray[np.bool_] | None = None,
    names: Sequence[str] | None = None,
) -> Labels:
    """Use whole numbers as class indices."""
    missing = np.zeros(len(values), np.bool_) if missing is None else missing
    if values.dtype.kind == "f":
        missing = missing | np.isnan(values)
        values = np.where(missing, 0, values).astype(np.float64)  # float16 ends below MAX_CLASS
        refuse_first(values != np.rint(values), values.tolist(), origin)
    # Compared in their own dtype: an unsigned one cannot hold -1, int64 not every uint64.
    is_wrong = (values > MAX_CLASS) & ~missing
    if values.dtype.kind != "u":
        is_wrong |= (values < -1) & ~missing
    refuse_first(is_wrong, values.tolist(), origin)
    labels = values.astype(np.int64)
    labels[missing] = -1
    are_minus_one = (labels == -1) & ~missing
    warnings: tuple[str, ...] = ()
    top = int(labels.max(initial=-1))
    if are_minus_one.any():
        if names is None and top == 1 and not (labels == 0).any():
            raise DataError(
                f"{origin}: the labels are -1 and 1. -1 stands for no label, so the class -1 would "
                "be lost. Write 0 and 1, or names such as no and yes."
            )
        num_rows = counted(int(are_minus_one.sum()), "row has", "rows have")
        warnings = (f"{origin}: {num_rows} the label -1, which counts as no label",)
    if names is None:
        return Labels(labels, tuple(str(number) for number in range(top + 1)), warnings)
    check_indices(labels, names, origin)
    return Labels(labels, tuple(str(name) for name in names), warnings)


def from_names(values: Iterable[str | None]) -> Labels:
    """Number class names in bytewise order; None and '' mean no label."""
    codes_of_names: dict[str, int] = {}
    codes = [codes_of_names.setdefault(name or "", len(codes_of_names)) for name in values]
    return renumber(np.array(list(codes_of_names), dtype=object), np.array(codes, dtype=np.int64))


def from_encoded_texts(names: Sequence[str], codes: npt.NDArray[np.int64], origin: str) -> Labels:
    """Convert the cells of a column of CSV, whose distinct texts are known.

    Texts are class indices if all of them are whole numbers, such as 7 or 7.0, and no two of them
    are the same number; otherwise they are names. A mark of a missing number is no label among
    numbers and booleans.
    """
    num_rows = np.bincount(codes + 1, minlength=len(names) + 1)[1:]
    used = {n: count for n, count in zip(names, num_rows.tolist(), strict=True) if n and count}
    marks = {name: count for name, count in used.items() if name.lower() in MISSING_MARKS}
    texts = [name for name in used if name not in marks]
    are_numbers = bool(texts) and all(_NUMBER.fullmatch(text) for text in texts)
    warnings: list[str] = []
    if are_numbers and (same := _same_numbers(texts)):
        warnings.append(
            f"{origin}: {same[0]!r} and {same[1]!r} are the same number, so the labels are names "
            "and these are two classes; write them alike if they are one"
        )
        are_numbers = False
    if not are_numbers:
        are_booleans = bool(texts) and all(_BOOLEAN.fullmatch(text) for text in texts)
        if marks:
            meaning = AS_NO_LABEL if are_booleans else AS_VALUE
            warnings.append(warning_of_marks(marks, origin, meaning))
        kept = ["" if are_booleans and name in marks else name for name in names]
        labels, classes, _ = renumber(np.array(kept, dtype=object), codes)
        return Labels(labels, classes, tuple(warnings))
    if marks:
        warnings.append(warning_of_marks(marks, origin, AS_NO_LABEL))
    numbers = {text: _whole_number(text) for text in texts}
    is_wrong = [not -1 <= numbers.get(name, -1) <= MAX_CLASS for name in names]
    if any(is_wrong):
        refuse_first(np.array([*is_wrong, False])[codes], [names[c] for c in codes], origin)
    is_missing = np.array([name not in numbers for name in names] + [True])[codes]
    table = np.array([*(numbers.get(name, -1) for name in names), -1], dtype=np.int64)
    labels, classes, more = from_numbers(table[codes], origin, is_missing)
    return Labels(labels, classes, (*warnings, *more))


def _whole_number(text: str) -> int:
    """Return the number that a text of `_NUMBER` is; MAX_CLASS + 1 if it has a fraction."""
    return int(text.partition(".")[0]) if _WHOLE.fullmatch(text) else MAX_CLASS + 1


def _same_numbers(texts: Sequence[str]) -> tuple[str, str] | None:
    """Return two texts that are the same whole number, such as 1 and 01 or 1 and 1.0, or None."""
    seen: dict[int, str] = {}
    for text in texts:
        if _WHOLE.fullmatch(text):
            other = seen.setdefault(int(text.partition(".")[0]), text)
            if other is not text:
                return other, text
    return None


def renumber(names: npt.NDArray[np.object_], codes: npt.NDArray[np.int64]) -> Labels:
    """Convert indices into any list of names to indices into the sorted names that are in use."""
    used_codes = np.unique(codes[codes >= 0])
    used_names = sorted({names[i] for i in used_codes if names[i]}, key=name_bytes)
    number_of_name = {name: i for i, name in enumerate(used_names)}
    table = np.array([*(number_of_name.get(name, -1) for name in names), -1], dtype=np.int64)
    return Labels(table[codes], tuple(used_names))


def from_values(
    values: Sequence[object], origin: str, names: Sequence[str] | None = None
) -> Labels:
    """Convert labels of unknown type: whole numbers or names; None and NaN mean no label."""
    all_kinds = [_kind(value) for value in values]
    kinds = set(all_kinds)
    if kinds <= {"none"}:
        labels = Labels.none(len(values))
        return labels if names is None else labels._replace(classes=tuple(map(str, names)))
    if kinds <= {"number", "none"}:
        missing = np.array([kind == "none" for kind in all_kinds])
        numbers = [0 if is_none else int(v) for v, is_none in zip(values, missing, strict=True)]  # type: ignore[call-overload]
        # Compared as Python's numbers, which may be too large for int64.
        is_wrong = np.array([not -1 <= number <= MAX_CLASS for number in numbers])
        refuse_first(is_wrong, numbers, origin)
        return from_numbers(np.array(numbers, dtype=np.int64), origin, missing, names)
    if kinds <= {"name", "none"}:
        return from_names([value if isinstance(value, str) else None for value in values])
    common = next((kind for kind in ("number", "name") if kind in kinds), "")
    first = next(i for i, kind in enumerate(all_kinds) if kind not in ("none", common))
    raise DataError(
        f"{origin}: found labels of kind {', '.join(sorted(kinds - {'none'}))}, such as "
        f"{values[first]!s:.100} in row {first}; expected whole numbers or names throughout, None "
        "where there is no label."
    )


def _kind(value: object) -> str:
    """Return 'none', 'name' or 'number' for a label, or its type's name if it is not supported.

    A number is whole, such as 1, 1.0, True, or an integer of NumPy or torch.
    """
    if value is None:
        return "none"
    if isinstance(value, str):
        return "name"
    if isinstance(value, bool | np.bool_):
        return "number"
    try:
        if isinstance(value, float | np.floating) and np.isnan(value):
            return "none"
        is_whole = int(value) == value  # type: ignore[call-overload]
        is_number = hasattr(value, "__index__") or isinstance(value, float | np.floating)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return type(value).__name__
    return "number" if is_whole and is_number else type(value).__name__


def looks_like_labels(name: str) -> bool:
    """Return whether a column or dataset of this name may hold labels, such as fine_label."""
    words = re.findall("[A-Z]?[a-z]+|[A-Z]+", name)
    return any(word.lower() in _LABEL_WORDS for word in words)


def choose_label_column(names: Sequence[str], chosen: str | None, origin: str) -> str | None:
    """Return the column that data.label_column chooses, by default label, or None for no labels."""
    if chosen is None:
        return find_column(names, "label")
    return existing_column(origin, "data.label_column", chosen, names) if chosen else None


def existing_column(origin: str, option: str, name: str, names: Sequence[str]) -> str:
    """Return a column that an option names, after checking that the table has it."""
    if name not in names:
        known = ", ".join(names)
        raise DataError(f"{option}={name}: {origin} has {known}.{nearest(name, list(names))}")
    return name


def find_column(names: Collection[str], wanted: str) -> str | None:
    """Return the column of this name, or the only one that differs in case or blanks."""
    if wanted in names:
        return wanted
    alike = [name for name in names if name.strip().casefold() == wanted]
    return alike[0] if len(alike) == 1 else None


def note_on_columns(
    names: Sequence[str], used: str | None, option: str = "data.label_column="
) -> str:
    """Return which columns look like labels and are not used, and what was looked for."""
    others = [name for name in names if name != used and looks_like_labels(name)]
    missing = "" if used is not None else "there is no column label"
    if not others:
        takes_another = bool(missing and option and names)
        return f"{missing}; {option}NAME takes another" if takes_another else missing
    hint = f": {option}{others[0]}" if option else "; rename the one that holds the labels to label"
    verbs = "looks like labels and is" if len(others) == 1 else "look like labels and are"
    looks = f"{', '.join(map(repr, others))} {verbs} not used{hint}"
    return f"{missing}; {looks}" if missing else looks
