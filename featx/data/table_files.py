"""A CSV or a Parquet file as columns, each read when it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

from featx.errors import DataError

_WHOLE = r"^-?\d{1,18}$"
_NUMBER = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"

_EXACT_WHOLE = r"^(0|-?[1-9]\d{0,17})$"
_EXACT_NUMBER = r"^-?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE][-+]?\d+)?$"
"""Numbers that are nothing but numbers: not 007, and no name of twenty digits."""

_BOOLEAN = r"^([Tt]rue|TRUE|[Ff]alse|FALSE)$"

_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class Csv:
    """Columns of a CSV file.

    Args:
        file: .csv or .tsv, also with .gz behind.

    Raises:
        DataError: its name ends in something else, or it has two columns of the same name.
    """

    def __init__(self, file: Path) -> None:
        from pyarrow import csv

        self.file = file
        plain = file.with_suffix("") if file.suffix.lower() == ".gz" else file
        separator = _SEPARATORS.get(plain.suffix.lower())
        if separator is None:
            raise DataError(
                f"data.root={file}: expected a name ending in .csv, .tsv (also .gz) or .parquet."
            )
        self._parse = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        with csv.open_csv(file, parse_options=self._parse) as reader:
            self.names: list[str] = reader.schema.names
        if len(set(self.names)) < len(self.names):
            raise DataError(f"{file} has two columns of the same name: {', '.join(self.names)}.")

    def kind(self, name: str) -> Any:
        """Everything is text until it is read as labels."""
        import pyarrow as pa

        return pa.string()

    def column(self, name: str) -> Any:
        """A column as text."""
        import pyarrow as pa
        from pyarrow import csv

        options = csv.ConvertOptions(include_columns=[name], column_types={name: pa.string()})
        return csv.read_csv(self.file, parse_options=self._parse, convert_options=options)[name]

    def labels(self, name: str) -> Any:
        """A column as numbers where all of it is, else as text; empty is null."""
        import pyarrow as pa

        return self._as_far_as_it_fits(name, ((_WHOLE, pa.int64()), (_NUMBER, pa.float64())))

    def values(self, name: str) -> Any:
        """A column as booleans or numbers where all of it is and stays so, else as text."""
        import pyarrow as pa

        kinds = (_BOOLEAN, pa.bool_()), (_EXACT_WHOLE, pa.int64()), (_EXACT_NUMBER, pa.float64())
        return self._as_far_as_it_fits(name, kinds)

    def class_names(self, name: str) -> list[str] | None:
        return None

    def _as_far_as_it_fits(self, name: str, kinds: tuple[tuple[str, Any], ...]) -> Any:
        """The first of some types whose form all texts of a column have; empty is null."""
        import pyarrow as pa
        import pyarrow.compute as pc

        text = self.column(name)
        text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
        if text.null_count == len(text):
            return pa.chunked_array([pa.nulls(len(text))])
        for form, kind in kinds:
            if pc.all(pc.match_substring_regex(text, form)).as_py():
                return text.cast(kind)
        return text


class Parquet:
    """Columns of a Parquet file."""

    def __init__(self, file: Path) -> None:
        from pyarrow import parquet

        self.file = file
        self._parquet = parquet.ParquetFile(file)
        self.names: list[str] = self._parquet.schema_arrow.names
        self.num_rows: int = self._parquet.metadata.num_rows

    def kind(self, name: str) -> Any:
        return self._parquet.schema_arrow.field(name).type

    def column(self, name: str) -> Any:
        """A column, or with a dot a field of a struct; nothing else is read."""
        import pyarrow.compute as pc

        outer, _, inner = name.partition(".") if name not in self.names else (name, "", "")
        column = self._parquet.read(columns=[name])[outer]
        return pc.struct_field(column, inner) if inner else column

    def labels(self, name: str) -> Any:
        """A column in the type that it has."""
        return self.column(name)

    def values(self, name: str) -> Any:
        """A column in the type that it has."""
        return self.column(name)

    def class_names(self, name: str) -> list[str] | None:
        """The names that Hugging Face's data sets keep for whole numbers."""
        about = (self._parquet.schema_arrow.metadata or {}).get(b"huggingface")
        try:
            names = json.loads(about)["info"]["features"][name]["names"] if about else None
        except (ValueError, LookupError, TypeError):
            return None
        return names if isinstance(names, list) else None


TableFile: TypeAlias = Csv | Parquet


def open_table(file: Path) -> TableFile:
    """A file as what its content says it is.

    Raises:
        DataError: its name is that of no table.
    """
    with file.open("rb") as opened:
        is_parquet = opened.read(4) == b"PAR1"
    return Parquet(file) if is_parquet else Csv(file)
