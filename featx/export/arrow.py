"""Arrow arrays of a selection: its listing, the columns of its store, and its features."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from featx.export.selection import ExportSelection, about_text, with_texts
from featx.types import Array

if TYPE_CHECKING:
    import pyarrow as pa

OTHER_ROW_BYTES = 128
"""Approximate bytes of a row of a table without its features."""


def listing(
    selection: ExportSelection,
    start: int,
    stop: int,
    names: Sequence[str],
    columns: Mapping[str, Array],
) -> dict[str, pa.Array]:
    """Return the columns of a table other than layers, for rows [start, stop).

    `names` are those of the listing: 'key', or 'image_path' for it, 'row', 'label', 'class' and
    'status'.
    """
    import pyarrow as pa

    keys = pa.array(selection.key_texts(start, stop), pa.string())
    arrays = {
        "key": keys,
        "image_path": keys,
        "row": pa.array(selection.rows[start:stop]),
        "label": pa.array(selection.labels[start:stop]),
        "class": pa.array(selection.class_texts(start, stop), pa.string()),
        "status": pa.array(selection.status[start:stop]),
    }
    of_store = {name: pa.array(with_texts(values[start:stop])) for name, values in columns.items()}
    return {name: arrays[name] for name in names} | of_store


def lists(rows: Array, nested: bool = False) -> pa.Array:
    """Convert (m, ...) rows to fixed-size lists: of all values, or nested ones of each axis."""
    import pyarrow as pa

    array = pa.array(rows.reshape(-1))
    for size in reversed(rows.shape[1:] if nested else (math.prod(rows.shape[1:]),)):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def table(
    selection: ExportSelection,
    columns: Mapping[str, pa.Array],
    field_metadata: Mapping[str, Mapping[str, str]] | None = None,
    **metadata: str,
) -> pa.Table:
    """Return a table with the origin of the rows in its metadata."""
    import pyarrow as pa

    fields = [
        pa.field(name, array.type, metadata=(field_metadata or {}).get(name))
        for name, array in columns.items()
    ]
    schema = pa.schema(fields, {"featx": about_text(selection), **metadata})
    return pa.Table.from_arrays(list(columns.values()), schema=schema)


def write_parquet(file: BinaryIO, tables: Iterator[pa.Table], **options: Any) -> None:
    """Write tables of one schema, at least one, as the row groups of a Parquet file."""
    from pyarrow import parquet

    first = next(tables)
    with parquet.ParquetWriter(file, first.schema, **options) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table, row_group_size=len(table))
