"""export.format=csv: one table of the rows, and one table of values for each layer."""

from __future__ import annotations

import math
from pathlib import Path

from featx.base import name_text, write_csv
from featx.export.base import FORMATS, ExportFolder, Format, FormatMember, literal
from featx.export.selection import as_json_values
from featx.types import Status

_LISTING = ("row", "key", "label", "class", "status")

_BLOCK_VALUES = 1 << 18
"""Maximum number of values that are held as text at a time, about 200 bytes each."""

_VALUE_BYTES = 12
"""Approximate bytes of a number as text, with its comma."""


class Csv(Format):
    """rows.csv and features/<layer>.csv, in UTF-8 with a header, for spreadsheets and pandas.

    rows.csv has the columns row, key, label (-1 without one), class, status (a word) and those of
    the data set. A table of features has the key and one column per value, `LAYER.0` and so on in
    the order of the flattened row. Numbers read back in the dtype of the layer without a
    difference; missing numbers and the values of failed rows are empty.
    """

    def write(self, folder: ExportFolder) -> None:
        """Write the table of rows, then the tables of the layers block by block."""
        selection, n = self.selection, len(self.selection)
        columns = selection.named_columns(_LISTING)
        classes = [*selection.store.classes, ""]  # a label of -1 is the last one
        with folder.file("rows.csv") as file:
            write_csv(file, [(*_LISTING, *columns)])
            for start, stop in selection.spans(0, n):
                block = slice(start, stop)
                listing = [
                    selection.rows[block].tolist(),
                    map(name_text, selection.keys[block].tolist()),
                    selection.labels[block].tolist(),
                    [classes[label] for label in selection.labels[block].tolist()],
                    [Status(status).label for status in selection.status[block].tolist()],
                    *(as_json_values(values[block]) for values in columns.values()),
                ]
                write_csv(file, zip(*listing, strict=True))
        for layer in selection.layers:
            with folder.file(f"features/{layer}.csv") as file:
                width = math.prod(selection.row_shape(layer))
                step = min(selection.block_rows([layer]), max(1, _BLOCK_VALUES // max(1, width)))
                # Programs such as DuckDB take a line of numbers for a row, not for names.
                write_csv(file, [("key", *(f"{layer}.{i}" for i in range(width)))])
                for start, stop, values in selection.blocks(0, n, [layer], step):
                    texts = values[layer].reshape(stop - start, width).astype(str)
                    texts[texts == "nan"] = ""
                    keys = map(name_text, selection.keys[start:stop].tolist())
                    rows = zip(keys, texts.tolist(), strict=True)
                    write_csv(file, ((key, *row) for key, row in rows))

    @property
    def num_bytes(self) -> int:
        shapes = map(self.selection.row_shape, self.selection.layers)
        return _VALUE_BYTES * len(self.selection) * sum(map(math.prod, shapes))

    def opening(self, out: Path) -> str:
        layer = self.selection.layers[0]
        columns = self.selection.named_columns(_LISTING)
        texts = [name for name, values in columns.items() if values.dtype.kind == "S"]
        return (
            "import pandas as pd\n"
            # A class 007 or NA is a text, which pandas would make a number or NaN.
            f"texts = dict.fromkeys({['key', 'class', *texts]}, str)\n"
            f"rows = pd.read_csv({literal(f'{out}/rows.csv')}, dtype=texts, na_values='', "
            "keep_default_na=False)\n"
            f"X = pd.read_csv({literal(f'{out}/features/{layer}.csv')}, index_col=0)"
            f'.to_numpy("{self.selection.dtype(layer)}")'
        )


FORMATS.register(
    FormatMember("csv", "Tables for spreadsheets and pandas: rows, and values of layers.", make=Csv)
)
