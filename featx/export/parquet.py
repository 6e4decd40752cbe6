"""export.format=parquet: a fixed-size list column per layer, with key, label and other columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from featx.base import import_extra
from featx.config import Config
from featx.export import arrow
from featx.export.base import (
    FORMATS,
    ExportFolder,
    FormatMember,
    ShardedFormat,
    ShardOptions,
    literal,
)
from featx.export.selection import ExportSelection
from featx.types import Array

if TYPE_CHECKING:
    import pyarrow as pa

_LISTING = ("key", "row", "label", "class", "status")


class Parquet(ShardedFormat):
    """data/features-*.parquet; a map is one long list, with its shape in the metadata.

    Layers of reduce=sample have a column <layer>.positions as well.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        import_extra("pyarrow.parquet", "export.format=parquet", "the package pyarrow", "export")
        selection = self.selection
        self._sampled = [name for name in selection.layers if selection.is_sampled(name)]
        positions = [f"{name}.positions" for name in self._sampled]
        self._columns = selection.named_columns([*_LISTING, *positions])

    def write(self, folder: ExportFolder) -> None:
        """Write the shards, one row group per block."""
        # Dictionary encoding pays off for repeated values, which features seldom have.
        options = {"use_dictionary": ["class", "label", "status"], "compression": "snappy"}
        row_bytes = self.selection.row_bytes() + arrow.OTHER_ROW_BYTES
        for name, start, stop in self.shards(row_bytes, "data/features-{}.parquet"):
            tables = (self._table(*block) for block in self.selection.blocks(start, stop))
            with folder.file(name) as file:
                arrow.write_parquet(file, tables, **options)

    def _table(self, start: int, stop: int, values: dict[str, Array]) -> pa.Table:
        selection = self.selection
        columns = arrow.listing(selection, start, stop, _LISTING, self._columns)
        columns |= {name: arrow.lists(rows) for name, rows in values.items()}
        for name in self._sampled:
            columns[f"{name}.positions"] = arrow.lists(selection.positions(name, start, stop))
        shapes = {name: {"shape": json.dumps(selection.row_shape(name))} for name in values}
        return arrow.table(selection, columns, shapes)

    def opening(self, out: Path) -> str:
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
