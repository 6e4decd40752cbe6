"""export.format=parquet: a fixed-size list column per layer, with key, label and other columns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

from featx.base import import_extra
from featx.export.base import (
    FORMATS,
    File,
    FormatMember,
    ShardedFormat,
    ShardOptions,
    literal,
)
from featx.export.selection import about_text

COLUMNS = ("key", "row", "label", "class", "status")
"""Names of the columns other than layers and columns of the store."""

OTHER_ROW_BYTES = 128
"""Approximate bytes of a row without its features."""


class Parquet(ShardedFormat):
    """data/features-*.parquet; a map is one long list, with its shape in the metadata.

    Layers of reduce=sample have a column <layer>.positions as well.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        import_extra("pyarrow.parquet", "export.format=parquet", "the package pyarrow", "export")
        selection = self.selection
        self._sampled = [name for name in selection.layers if selection.is_sampled(name)]
        positions = [f"{name}.positions" for name in self._sampled]
        self._columns = selection.named_columns([*COLUMNS, *positions])

    def files(self) -> list[File]:
        """Return the shards."""
        row_bytes = self.selection.row_bytes() + OTHER_ROW_BYTES
        return self.shards("data/features", "parquet", row_bytes, self._write)

    def _write(self, file: BinaryIO, start: int, stop: int) -> None:
        """Write rows [start, stop), one row group per block."""
        import pyarrow as pa
        from pyarrow import parquet

        schema = self._schema()
        # Dictionary encoding pays off for repeated values, which features seldom have.
        options = {"use_dictionary": ["class", "label", "status"], "compression": "snappy"}
        with parquet.ParquetWriter(file, schema, **options) as writer:
            for first, last, values in self.selection.blocks(start, stop):
                lists = [
                    pa.FixedSizeListArray.from_arrays(
                        pa.array(rows.reshape(-1)), type=schema.field(name).type
                    )
                    for name, rows in values.items()
                ]
                lists += [
                    pa.FixedSizeListArray.from_arrays(
                        pa.array(self.selection.positions(name, first, last).reshape(-1)),
                        type=schema.field(f"{name}.positions").type,
                    )
                    for name in self._sampled
                ]
                table = pa.Table.from_arrays([*self._listing(first, last), *lists], schema=schema)
                writer.write_table(table, row_group_size=last - first)

    def _listing(self, start: int, stop: int) -> list[Any]:
        """Return the columns of rows [start, stop) other than layers."""
        import pyarrow as pa

        selection = self.selection
        return [
            pa.array(selection.key_texts(start, stop), pa.string()),
            pa.array(selection.rows[start:stop]),
            pa.array(selection.labels[start:stop]),
            pa.array(selection.class_texts(start, stop), pa.string()),
            pa.array(selection.status[start:stop]),
            *(pa.array(values[start:stop]) for values in self._columns.values()),
        ]

    def _schema(self) -> Any:
        """Return the Arrow schema, with the origin of the rows in its metadata."""
        import pyarrow as pa

        types = (pa.string(), pa.int64(), pa.int64(), pa.string(), pa.uint8())
        fields = [pa.field(name, kind) for name, kind in zip(COLUMNS, types, strict=True)]
        for name, values in self._columns.items():
            fields.append(pa.field(name, pa.array(values[:1]).type))
        for name in self.selection.layers:
            shape = self.selection.row_shape(name)
            kind = pa.list_(pa.from_numpy_dtype(self.selection.dtype(name)), math.prod(shape))
            fields.append(pa.field(name, kind, metadata={"shape": json.dumps(shape)}))
        for name in self._sampled:
            kind = pa.list_(pa.int32(), self.selection.row_shape(name)[0])
            fields.append(pa.field(f"{name}.positions", kind))
        return pa.schema(fields, metadata={"featx": about_text(self.selection)})

    def opening(self, out: Path) -> str:
        """Return lines that read the table with pandas."""
        return (
            "import numpy as np, pandas as pd\n"
            f"table = pd.read_parquet({literal(f'{out}/data')})  # also polars, duckdb, pyarrow\n"
            f"X = np.stack(table[{literal(self.selection.layers[0])}])"
        )


FORMATS.register(
    FormatMember(
        "parquet",
        "Parquet files with one row per image.",
        ShardOptions,
        extra="export",
        make=Parquet,
    )
)
