"""Conversion of Arrow columns to the column types of a listing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from featx.errors import DataError, counted
from featx.types import Array

if TYPE_CHECKING:
    import pyarrow as pa

MISSING_MARKS = frozenset(
    {
        *("na", "n/a", "#na", "#n/a", "#n/a n/a", "<na>", "nan", "-nan", "null", "none"),
        *("1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan"),
    }
)
"""Texts in lower case that mark a missing number: those of pandas.read_csv, in any case."""

AS_VALUE = "which counts as a value like any other; leave a cell empty where the value is missing"
"""Clause on the meaning of a mark of a missing number in a column of text, with a remedy."""

AS_NO_LABEL = (
    "which counts as no label because the other labels are numbers or booleans; if it names a "
    "class, rename it"
)
"""Clause on the meaning of such a mark among numeric or boolean labels, with a remedy."""

_MARKS_SHOWN = 3
"""Maximum number of different marks that a warning quotes."""

MAX_TEXT_BYTES = 4096
"""Maximum length of a text in a column in bytes. Texts have a fixed length per column, so the
longest one determines the size of every row in memory and in the store."""

_WITH_COMMA = r"^[+-]?\d+,\d+$"
"""Numbers with a decimal comma."""

_WHOLE = r"^[+-]?\d+$"

_BATCH_ROWS = 1 << 16
"""Rows whose texts are Python objects at a time."""


def column_values(column: pa.ChunkedArray, origin: str) -> Array:
    """Convert a column of a table to a column of a listing.

    Returns (N,) int64, bool, float64 with NaN for missing values, or UTF-8 bytes with '' for
    missing ones. Whole numbers and booleans with missing values become float64.
    """
    import pyarrow as pa

    kind = column.type
    if pa.types.is_null(kind):
        return np.zeros(len(column), dtype="S1")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _texts(column, origin)
    if pa.types.is_boolean(kind) and not column.null_count:
        return np.asarray(column.to_numpy(), dtype=np.bool_)
    if pa.types.is_boolean(kind):
        column, kind = column.cast(pa.int8()), pa.int8()
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(
            f"{origin} is {kind}; expected whole numbers, numbers, booleans or text. Write it as "
            "text, or leave it out of data.columns."
        )
    are_whole = pa.types.is_integer(kind) and not column.null_count
    try:
        numbers = column.cast(pa.int64() if are_whole else pa.float64())
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{origin} has a number that a store cannot hold exactly ({error}): whole numbers go "
            "up to 2^63 - 1, and up to 2^53 if some are missing. Write it as text."
        ) from error
    return np.asarray(numbers.to_numpy(), dtype=np.int64 if are_whole else np.float64)


def text_bytes(column: pa.ChunkedArray) -> npt.NDArray[np.bytes_]:
    """Convert a column of text to (N,) fixed-length bytes, `_BATCH_ROWS` rows at a time.

    Longer texts are cut at `MAX_TEXT_BYTES`: no system has a file of such a path, so its row fails.
    """
    batches = [
        np.array([text.encode()[:MAX_TEXT_BYTES] for text in batch.to_pylist()], dtype=np.bytes_)
        for chunk in column.chunks
        for batch in (
            chunk.slice(start, _BATCH_ROWS) for start in range(0, len(chunk), _BATCH_ROWS)
        )
    ]
    return np.concatenate(batches) if batches else np.empty(0, dtype="S1")


def is_missing_mark(text: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return whether each text of a pyarrow.ChunkedArray is one of `MISSING_MARKS`, in any case."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lower = pc.utf8_lower(text)
    return pc.is_in(lower, value_set=pa.array(sorted(MISSING_MARKS), lower.type))


def marks_in_text(column: pa.ChunkedArray) -> dict[str, int]:
    """Count the marks of missing numbers in a column of text.

    Returns mark, as written -> number of rows; empty for columns of other types.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return {}
    marks = pc.value_counts(column.filter(is_missing_mark(column)))
    return {each["values"]: each["counts"] for each in marks.to_pylist()}


def warning_of_marks(counts: Mapping[str, int], origin: str, meaning: str) -> str:
    """Return the warning of marks of missing numbers in a column of text or labels."""
    shown = [repr(mark) for mark in sorted(counts, key=lambda mark: (-counts[mark], mark))]
    if len(shown) > _MARKS_SHOWN:
        shown = [*shown[:_MARKS_SHOWN], "..."]
    num_rows = counted(sum(counts.values()), "row has", "rows have")
    return f"{origin}: {num_rows} the text {' or '.join(shown)}, {meaning}"


def warning_of_commas(column: pa.ChunkedArray, origin: str) -> str | None:
    """Return a warning if a column of text holds numbers with a decimal comma; missing values and
    whole numbers may be among them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_string(column.type):
        return None
    texts = pc.drop_null(pc.utf8_trim_whitespace(column))
    others = texts.filter(pc.invert(pc.or_(is_missing_mark(texts), pc.equal(texts, ""))))
    with_comma = others.filter(pc.match_substring_regex(others, _WITH_COMMA))
    num_whole = pc.sum(pc.match_substring_regex(others, _WHOLE)).as_py() or 0
    if not len(with_comma) or len(with_comma) + num_whole < len(others):
        return None
    return (
        f"{origin}: {counted(len(with_comma), 'row has', 'rows have')} a number with a comma, such "
        f"as {with_comma[0].as_py()!r}, so that the column is text; write numbers with a decimal "
        "point if they are to be numbers"
    )


def _texts(column: pa.ChunkedArray, origin: str) -> npt.NDArray[np.bytes_]:
    """Convert a column of text to (N,) UTF-8 bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = column.fill_null("")
    too_long = pc.greater(pc.binary_length(column), MAX_TEXT_BYTES)
    for is_refused, description in (
        (pc.match_substring(column, "\0"), "a text with NUL in it"),
        (too_long, f"a text of more than {MAX_TEXT_BYTES} bytes"),
    ):
        if (row := pc.index(is_refused, pa.scalar(True)).as_py()) >= 0:
            raise DataError(f"{origin} has {description} in row {row}, which a store cannot hold.")
    return text_bytes(column)
