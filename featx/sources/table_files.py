"""CSV and Parquet files as the columns of one table; a column is read when it is requested.

A CSV file is checked before it is parsed, as every parser swallows rows behind a stray quote.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, cast

from featx.errors import DataError
from featx.sources.table_columns import (
    AS_VALUE,
    is_missing_mark,
    marks_in_text,
    warning_of_commas,
    warning_of_marks,
)

if TYPE_CHECKING:
    import pyarrow as pa

_EXACT_WHOLE = r"^(0|-?[1-9]\d{0,17})$"
"""Whole numbers whose text int64 preserves: no leading zeros, such as 007, and at most 18
digits."""
_EXACT_NUMBER = r"^-?(((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE][-+]?\d+)?|(?i:inf|infinity))$"
"""Decimal numbers that are not identifiers: no leading zeros and at most 15 digits before the
point; and infinity."""

_BOOLEAN = r"^([Tt]rue|TRUE|[Ff]alse|FALSE)$"

ENDINGS = (b".csv", b".tsv", b".csv.gz", b".tsv.gz", b".parquet")
"""Ends of the names of tables."""

Quoting = Literal["line", "multiline", "none"]
"""Meanings of double quotes: they enclose a cell of one line, a cell of any lines, or nothing."""

_UTF16 = "UTF-16 text; save it as UTF-8 (in Excel: 'CSV UTF-8')"
_OTHER_KINDS = {
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"PK": "a zip archive or an Excel workbook; unpack it, or save the sheet as 'CSV UTF-8'",
    b"\x1f\x8b": "compressed with gzip; such a name ends in .csv.gz or .tsv.gz",
    b"BZh": "compressed with bzip2; unpack it",
    b"\xfd7zXZ": "compressed with xz; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it",
}

UNREADABLE = (OSError, UnicodeDecodeError, EOFError, zlib.error)
"""Exceptions of a file that cannot be read, is no text, or is a damaged gzip file."""

DELIMITERS = ",;\t|"
"""Characters that may separate cells; the first of those that are equally frequent is taken."""


@dataclass(frozen=True)
class CsvForm:
    """Form of CSV files: see the options of data=table; `delimiter` None takes the header's."""

    delimiter: str | None = None
    encoding: str = "utf-8"
    quoting: str = "line"


class CsvTable:
    """Columns of a CSV file with a header."""

    def __init__(self, file: Path, form: CsvForm) -> None:
        from pyarrow import csv

        self.file = file
        self._form = form
        name = file.name.lower().removesuffix(".gz")
        if name.endswith((".xlsx", ".xls", ".ods")):
            raise DataError(
                f"data.root={file} is a workbook, which featx does not read. Save the sheet with "
                "the images as 'CSV UTF-8', and give that file."
            )
        if not name.endswith((".csv", ".tsv", ".txt")):
            raise DataError(
                f"data.root={file}: expected a name ending in .csv, .tsv (also .gz), .txt or "
                ".parquet."
            )
        self._delimiter = check_csv(file, form.delimiter, form.quoting, form.encoding)
        self._parse = csv.ParseOptions(
            delimiter=self._delimiter,
            quote_char=False if form.quoting == "none" else '"',
            newlines_in_values=form.quoting == "multiline",
        )
        # Without threads, errors name the line.
        self._read = csv.ReadOptions(use_threads=False, encoding=form.encoding)
        with csv.open_csv(file, self._read, self._parse) as reader:
            self.names: list[str] = reader.schema.names

    def column(self, name: str) -> pa.ChunkedArray:
        """Read a column as text. Returns pyarrow.ChunkedArray of strings."""
        import pyarrow as pa
        from pyarrow import csv

        convert = csv.ConvertOptions(include_columns=[name], column_types={name: pa.string()})
        return csv.read_csv(self.file, self._read, self._parse, convert)[name]

    paths = column

    def places(self, rows: Sequence[int]) -> list[str]:
        """Return where some rows begin, in the order of the file, as 'line 7'."""
        found: list[str] = []
        left, row = list(rows), -1  # the header has no number
        for line in self._first_lines():
            if left and row == left[0]:
                found.append(f"line {line}")
                left.pop(0)
            row += 1
        return found

    def _first_lines(self) -> Iterator[int]:
        """Yield the line in which each row begins, the header first; blank lines are no rows."""
        with open_csv(self.file, "latin-1") as lines:  # any bytes
            if self._form.quoting != "multiline":
                yield from (n for n, line in enumerate(lines, 1) if line.strip("\r\n"))
                return
            reader, first = csv.reader(lines, delimiter=self._delimiter), 1
            for cells in reader:
                if cells:
                    yield first
                first = reader.line_num + 1


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the Arrow type as which the values of a dictionary or a view are read."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return views.get(kind, kind)


class ParquetTable:
    """Columns of a Parquet file, which is open only while a column is read."""

    def __init__(self, file: Path) -> None:
        from pyarrow import parquet

        self.file = file
        with parquet.ParquetFile(file) as opened:
            self._schema = opened.schema_arrow
            self.num_rows: int = opened.metadata.num_rows
        self.names: list[str] = self._schema.names

    def kind(self, name: str) -> pa.DataType:
        """Return the Arrow type of a column's values, or of those of a struct."""
        import pyarrow as pa

        kind = self._schema.field(name).type
        if pa.types.is_struct(kind):
            return pa.struct([field.with_type(_plain(field.type)) for field in kind])
        return _plain(kind)

    def column(self, name: str, field: str | None = None) -> pa.ChunkedArray:
        """Read only one column, or one field of a struct column.

        Returns pyarrow.ChunkedArray; dictionaries and views are decoded.
        """
        import pyarrow.compute as pc
        from pyarrow import parquet

        with parquet.ParquetFile(self.file) as opened:
            # Names may contain dots, so that `name.field` may be a column as well: both are read.
            column = opened.read(columns=[f"{name}.{field}" if field else name])[name]
        column = pc.struct_field(column, field) if field else column
        kind = _plain(column.type)
        return column if kind == column.type else column.cast(kind)

    def is_without_bytes(self, name: str) -> bool:
        """Return whether a column is a struct with a text `path` and, by the statistics of the
        file, no `bytes`: Hugging Face's images that were not embedded."""
        import pyarrow as pa
        from pyarrow import parquet

        kind = self.kind(name)
        path = kind.get_field_index("path") if pa.types.is_struct(kind) else -1
        if path < 0 or kind[path].type not in (pa.string(), pa.large_string()):
            return False
        if pa.types.is_null({field.name: field.type for field in kind}.get("bytes", pa.null())):
            return True
        metadata = parquet.read_metadata(self.file)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        are_null = [
            chunk.statistics is not None
            and chunk.statistics.has_null_count
            and chunk.statistics.null_count == chunk.num_values
            for chunk in chunks
            if chunk.path_in_schema == f"{name}.bytes"
        ]
        return bool(are_null) and all(are_null)  # a list has a longer path in the schema

    def paths(self, name: str) -> pa.ChunkedArray:
        """Read a column of text, or one that `is_without_bytes`."""
        import pyarrow as pa

        return self.column(name, "path" if pa.types.is_struct(self.kind(name)) else None)

    def places(self, rows: Sequence[int]) -> list[str]:
        """Return where some rows are."""
        return [f"row {row}" for row in rows]

    def class_names(self, name: str) -> list[str] | None:
        """Return the class names in Hugging Face's metadata for a column, or None."""
        metadata = (self._schema.metadata or {}).get(b"huggingface")
        try:
            names = json.loads(metadata)["info"]["features"][name]["names"] if metadata else None
        except (ValueError, LookupError, TypeError):
            return None
        return names if isinstance(names, list) else None


class Table:
    """One or more files with the same columns, one after the other.

    Attributes:
        parts: one `CsvTable` or `ParquetTable` per file.
        is_parquet: whether the files are Parquet.
        warnings: column that was read -> warning of its text, which may be meant as numbers.
    """

    def __init__(self, files: Sequence[Path], origin: str, form: CsvForm) -> None:
        self._origin = origin
        self.parts: list[CsvTable | ParquetTable] = []
        self.warnings: dict[str, str] = {}
        for file in files:
            with read_errors(file):
                self.parts.append(_open_file(file, form))
        kinds = {type(part): part.file for part in self.parts}
        if len(kinds) > 1:
            first, second = kinds.values()
            raise DataError(
                f"{origin} holds tables of two kinds, such as {first} and {second}. Choose one "
                "kind with data.root='DIR/*.parquet'."
            )
        self.is_parquet = ParquetTable in kinds

    @property
    def names(self) -> list[str]:
        """Column names of the first file."""
        return self.parts[0].names

    def check_has(self, name: str) -> None:
        """Check that every file has one column of this name."""
        for part in self.parts:
            if name not in part.names:
                raise DataError(
                    f"{part.file} has no column {name}, which {self.parts[0].file} has; it has "
                    f"{', '.join(part.names)}."
                )
            if part.names.count(name) > 1:
                raise DataError(
                    f"{part.file} has two columns of the same name: {', '.join(part.names)}."
                )

    def columns(self, name: str, paths: bool = False) -> list[pa.ChunkedArray]:
        """Read a column of every file, or the paths in it; columns of CSV files are text.

        Returns one pyarrow.ChunkedArray per file.
        """
        self.check_has(name)
        columns = []
        for part in self.parts:
            with read_errors(part.file):
                columns.append(part.paths(name) if paths else part.column(name))
        return columns

    def labels(self, name: str) -> pa.ChunkedArray:
        """Read the column of labels; one of CSV files is text."""
        column = self._join_files(name)
        if self.is_parquet:
            self._warn_of_marks(name, column)
        return column

    def values(self, name: str) -> pa.ChunkedArray:
        """Read any column; one of CSV becomes booleans or numbers if nothing is lost.

        Marks of missing numbers are null in a column of booleans or numbers.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self._join_files(name)
        if self.is_parquet:
            self._warn_of_marks(name, column)
            return column
        kinds = (_BOOLEAN, pa.bool_()), (_EXACT_WHOLE, pa.int64()), (_EXACT_NUMBER, pa.float64())
        converted = _convert_column(column, kinds)
        if pa.types.is_floating(converted.type) and not pc.any(pc.is_finite(converted)).as_py():
            # Without one finite number, 'INF' is a code or a name.
            converted = _convert_column(column, ())
        if warning := warning_of_commas(converted, f"{self._origin}, column {name}"):
            self.warnings[name] = warning
        else:
            self._warn_of_marks(name, converted)
        return converted

    def class_names(self, name: str) -> list[str] | None:
        """Return the class names that Parquet files store for a column of numbers, or None."""
        names_of_files = [
            part.class_names(name) for part in self.parts if isinstance(part, ParquetTable)
        ]
        if any(names != names_of_files[0] for names in names_of_files):
            raise DataError(f"{self._origin}: the files have different names for {name}'s classes.")
        return names_of_files[0] if names_of_files else None

    def _warn_of_marks(self, name: str, column: pa.ChunkedArray) -> None:
        """Record a warning if a column of text has marks of missing numbers."""
        if counts := marks_in_text(column):
            origin = f"{self._origin}, column {name}"
            self.warnings[name] = warning_of_marks(counts, origin, AS_VALUE)

    def _join_files(self, name: str) -> pa.ChunkedArray:
        """Concatenate a column of all files; of integer types the widest is taken."""
        import pyarrow as pa

        columns = self.columns(name)
        try:
            tables = [pa.table({name: column}) for column in columns]
            return pa.concat_tables(tables, promote_options="permissive")[name]
        except pa.ArrowException as error:
            kinds = sorted({str(column.type) for column in columns})
            raise DataError(
                f"{self._origin}: column {name} is {' and '.join(kinds)}, not the same in all "
                "files."
            ) from error


def _open_file(file: Path, form: CsvForm) -> CsvTable | ParquetTable:
    """Open a file as Parquet or CSV, which is decided by its first bytes."""
    if not file.is_file():
        raise DataError(
            f"data.root={file} is no file (taken from {Path.cwd()}); expected .csv, .tsv or "
            ".parquet."
        )
    with file.open("rb") as opened:
        is_parquet = opened.read(4) == b"PAR1"
    return ParquetTable(file) if is_parquet else CsvTable(file, form)


@contextlib.contextmanager
def read_errors(file: Path | str) -> Iterator[None]:
    """Convert exceptions while reading a file to a DataError that names it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, *UNREADABLE) as error:
        raise DataError(f"data.root={file} cannot be read: {error}.") from error


def _convert_column(
    text: pa.ChunkedArray, kinds: tuple[tuple[str, pa.DataType], ...]
) -> pa.ChunkedArray:
    """Convert a text column to the first type whose pattern all values match; '' becomes null.

    Marks of missing numbers match every pattern and become null, unless there are no other values.

    Returns the converted column, a null column if all values are empty, or the text column.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
    if text.null_count == len(text):
        return pa.chunked_array([pa.nulls(len(text))])
    values = pc.if_else(is_missing_mark(text), pa.scalar(None, pa.string()), text)
    if values.null_count == len(values):
        return text
    for form, kind in kinds:
        if pc.all(pc.match_substring_regex(values, form)).as_py():
            return values.cast(kind)
    return text


def open_csv(file: Path, encoding: str) -> TextIO:
    """Open a CSV file, which may be compressed with gzip, with its ends of lines as they are."""
    opened = gzip.open if file.suffix.lower() == ".gz" else open
    file_object = opened(file, "rt", encoding=encoding, errors="surrogateescape", newline="")
    return cast("TextIO", file_object)


def check_csv(
    file: Path, delimiter: str | None = None, quoting: str = "line", encoding: str | None = None
) -> str:
    """Check that a file is CSV whose quotes are balanced, in an encoding if one is given.

    Returns `delimiter`, or if that is None the one of the header: the most frequent of
    `DELIMITERS`, or that of the name (.tsv) if none is more frequent.
    """
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as lines:
        header = lines.readline(1 << 20)
        for start, kind in _OTHER_KINDS.items():
            if header.startswith(start):
                raise DataError(f"{file} is no CSV, but {kind}.")
        is_utf8 = codecs.lookup(encoding or "utf-8").name == "utf-8"
        if header.startswith(codecs.BOM_UTF8) and not is_utf8:
            raise DataError(
                f"{file} begins with a byte order mark of UTF-8, so its text is UTF-8 and not "
                f"{encoding}. Leave out data.encoding."
            )
        if header.removeprefix(codecs.BOM_UTF8).lower().startswith(b"sep="):
            raise DataError(
                f"{file} begins with sep=, a line for Excel. Delete it: the first line names the "
                "columns."
            )
        if b"\0" in header:
            raise DataError(f"{file} has NUL in its first line: it is no text, or {_UTF16}.")
        delimiter = delimiter or _delimiter_of(header, file)
        cell = rf'(?:"(?:[^"]|"")*+"|[^"{re.escape(delimiter)}\r]*+)'
        whole_line = re.compile(rf"{cell}(?:[{re.escape(delimiter)}\r]{cell})*+".encode())
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            if encoding is not None and not line.isascii():
                _check_encoding(file, number, line, encoding)
            text = line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
            if quoting == "line" and b'"' in line and not whole_line.fullmatch(text):
                raise _stray_quote(file, number)
        if quoting == "multiline":
            lines.seek(0)
            number = 0
            text_lines = (line.decode("utf-8", "surrogateescape") for line in lines)
            reader = csv.reader(text_lines, delimiter=delimiter, strict=True)
            try:
                for _ in reader:
                    number = reader.line_num
            except csv.Error as error:
                raise _stray_quote(file, number + 1) from error
    return delimiter


def _delimiter_of(header: bytes, file: Path) -> str:
    """Return the delimiter of a header, whose cells in quotes do not count."""
    cells = re.sub(rb'"[^"]*"', b"", header)
    usual = "\t" if ".tsv" in file.suffixes[-2:] else ","
    return max(usual + DELIMITERS, key=lambda delimiter: cells.count(delimiter.encode()))


def _check_encoding(file: Path, number: int, line: bytes, encoding: str) -> None:
    """Raise a DataError if a line is not text of this encoding."""
    try:
        line.decode(encoding)
    except UnicodeDecodeError as error:
        start = line.rfind(b"\n", 0, error.start) + 1
        found = re.search(rb"[^,;\t|\r\n]*$", line[start : error.start])
        word = (found[0] if found else b"") + re.split(rb"[,;\t|\r\n]", line[error.start :])[0]
        shown = word.decode("cp1252", "replace")
        raise DataError(
            f"{file}, line {number}: {word!r} is not {encoding.upper()}. Excel writes 'CSV' in "
            f"Windows-1252: data.encoding=cp1252 (of data=table) reads it as {shown!r}; or save "
            "the table as 'CSV UTF-8'."
        ) from error


def _stray_quote(file: Path, number: int) -> DataError:
    """Return the error of a quote that would swallow the rows behind it."""
    return DataError(
        f'{file}, line {number}: a quote (") begins or ends inside of a cell, or a cell in quotes '
        "does not end in this line, so that rows behind it could be lost. A cell with quotes is "
        'written as "5"" long". data.quoting=multiline (of data=table) takes cells of several '
        "lines, data.quoting=none takes quotes as characters."
    )
