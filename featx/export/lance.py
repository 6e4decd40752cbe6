"""export.format=lance: Lance data sets of vectors, or of tokens with a row for each token."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from featx.base import import_extra
from featx.errors import ConfigError
from featx.export.base import FORMATS, Folder, Format, FormatMember, literal
from featx.export.selection import about_text

_COLUMNS = ("row", "position", "key", "label", "class")
"""Columns other than layers and columns of the store."""

_RESERVED = (
    *("_rowid", "_rowaddr", "_rowoffset"),
    *("_row_created_at_version", "_row_last_updated_at_version"),
)
"""Names that Lance has for columns of its own."""

_OTHER_ROW_BYTES = 128
"""Approximate bytes of a row without its features."""


class Lance(Format):
    """features.lance with all layers of vectors, and <layer>.lance for each layer of tokens.

    Vectors are columns of fixed-size lists named as their layers, with "_" for each dot, which
    Lance reads as a path into a struct. A table of tokens has a line for each token, with its
    `position` on the token axis.

    Raises:
        ConfigError: a layer holds maps, or two columns would have the same name.
        MissingExtraError: pylance is not installed.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        selection = self.selection
        maps = [name for name in selection.layers if len(selection.row_shape(name)) > 2]
        if maps:
            raise ConfigError(
                f"a table of Lance has a vector or tokens per row; {', '.join(maps)} hold maps. "
                "Name the layers you want with layers=[...]."
            )
        import_extra("lance", "export.format=lance", "the package pylance", "lance")
        columns = selection.named_columns((*_COLUMNS, *_RESERVED))
        _check_distinct([*_COLUMNS, *columns, *selection.layers])
        self._columns = {_field_name(name): values for name, values in columns.items()}
        self._vectors = [name for name in selection.layers if len(selection.row_shape(name)) == 1]

    @property
    def num_bytes(self) -> int:
        """Approximate size of the export in bytes."""
        selection = self.selection
        tokens = (
            selection.row_shape(name) for name in selection.layers if name not in self._vectors
        )
        lines = 1 + sum(shape[0] for shape in tokens)
        return super().num_bytes + len(selection) * lines * _OTHER_ROW_BYTES

    def files(self) -> list[Folder]:
        """Return the folders of the tables."""
        selection, n = self.selection, len(self.selection)
        tables = {"features": self._vectors} if self._vectors else {}
        tables |= {name: [name] for name in selection.layers if name not in self._vectors}
        return [
            Folder(f"{name}.lance", functools.partial(self._write, layers), 0, n)
            for name, layers in tables.items()
        ]

    def _write(self, layers: list[str], folder: Path) -> None:
        """Write the table of some layers into an empty folder."""
        import lance
        import pyarrow as pa

        schema = self._schema(layers)
        reader = pa.RecordBatchReader.from_batches(schema, self._batches(layers, schema))
        lance.write_dataset(reader, str(folder), schema)

    def _batches(self, layers: list[str], schema: Any) -> Iterator[Any]:
        """Yield the record batches of a table."""
        import pyarrow as pa

        selection = self.selection
        shape = selection.row_shape(layers[0])
        num_tokens = shape[0] if len(shape) == 2 else None
        repeat = num_tokens or 1
        for start, stop, values in selection.blocks(0, len(selection), layers):
            # One index per line of the table.
            lines = np.repeat(np.arange(start, stop), repeat)
            columns = {
                "row": pa.array(selection.rows[lines]),
                "key": pa.array(selection.key_texts(start, stop), pa.string()).take(
                    pa.array(lines - start)
                ),
                "label": pa.array(selection.labels[lines]),
                "class": pa.array(selection.class_texts(start, stop), pa.string()).take(
                    pa.array(lines - start)
                ),
                **{name: pa.array(column[lines]) for name, column in self._columns.items()},
            }
            if num_tokens is not None:
                if selection.is_sampled(layers[0]):
                    positions = selection.positions(layers[0], start, stop).reshape(-1)
                else:
                    positions = np.tile(np.arange(num_tokens, dtype=np.int32), stop - start)
                columns["position"] = pa.array(positions)
            for name in layers:
                flat = pa.array(values[name].reshape(-1))
                field = _field_name(name)
                kind = schema.field(field).type
                columns[field] = pa.FixedSizeListArray.from_arrays(flat, type=kind)
            ordered = [columns[name] for name in schema.names]
            yield pa.RecordBatch.from_arrays(ordered, schema=schema)

    def _schema(self, layers: list[str]) -> Any:
        """Return the Arrow schema of a table, with the origin of the rows in its metadata."""
        import pyarrow as pa

        selection = self.selection
        fields = [pa.field("row", pa.int64()), pa.field("key", pa.string())]
        fields += [pa.field("label", pa.int64()), pa.field("class", pa.string())]
        for name, column in self._columns.items():
            fields.append(pa.field(name, pa.array(column[:1]).type))
        if len(selection.row_shape(layers[0])) == 2:
            fields.append(pa.field("position", pa.int32()))
        for name in layers:
            kind = pa.from_numpy_dtype(selection.dtype(name))
            fields.append(
                pa.field(_field_name(name), pa.list_(kind, selection.row_shape(name)[-1]))
            )
        return pa.schema(fields, metadata={"featx": about_text(selection)})

    def opening(self, out: Path) -> str:
        """Return lines that open the first table."""
        first = self.files()[0].name
        return (
            "import lance\n"
            f"table = lance.dataset({literal(f'{out}/{first}')})\n"
            "table.take([0]).to_pylist()  # table.to_table(nearest={...}) searches"
        )


def _field_name(name: str) -> str:
    """Return the name that a layer or a column of the store has in a table of Lance."""
    return name.replace(".", "_")


def _check_distinct(names: list[str]) -> None:
    """Check that layers and columns have different names in a table.

    Raises:
        ConfigError: two have the same.
    """
    owners: dict[str, str] = {}
    for name in names:
        other = owners.setdefault(_field_name(name), name)
        if other != name:
            raise ConfigError(
                f"Lance has no dots in names, so {other} and {name} would both be the column "
                f"{_field_name(name)}. Name the layers you want with layers=[...]."
            )


FORMATS.register(
    FormatMember(
        "lance",
        "Lance tables of vectors, or of tokens with a row for each.",
        extra="lance",
        make=Lance,
        holds_failed_rows=False,
    )
)
