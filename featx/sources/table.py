"""Source data=table: CSV or Parquet files with a column of paths or encoded images.

Encoded images are read from Parquet by row group, either as a struct of `bytes` and `path`, which
Hugging Face's data sets use, or as plain binary values. Such a struct without bytes is a path.
"""

from __future__ import annotations

import codecs
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from featx.base import import_extra, name_text
from featx.config import column_name_problem, options
from featx.errors import ConfigError, DataError, counted
from featx.sources.base import FolderSource
from featx.sources.labels import (
    Labels,
    choose_label_column,
    existing_column,
    find_column,
    from_encoded_texts,
    from_numbers,
    note_on_columns,
    renumber,
)
from featx.sources.parquet_images import ImageColumn
from featx.sources.path_patterns import base_of, find_files, is_pattern
from featx.sources.registry import SOURCES, ColumnOptions, source_member
from featx.sources.row_keys import numbered_keys, sorting_order
from featx.sources.table_columns import column_values, text_bytes
from featx.sources.table_files import (
    ENDINGS,
    CsvForm,
    CsvTable,
    ParquetTable,
    Quoting,
    Table,
    read_errors,
)
from featx.sources.views import BOX_COLUMNS
from featx.types import Array, Listing, Source

if TYPE_CHECKING:
    import pyarrow as pa

_SUSPECT = r"(^/|^~|(^|/)\.\.(/|$)|://|\x00)"
"""Regular expression for paths that may lead out of the folder, or that are not paths of files."""

_NAMED_ROWS = 5
"""Number of rows with a problem that a message names."""

_DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "pipe": "|"}
"""Words for delimiters, which no shell takes for its own."""


@options("data")
class TableOptions(ColumnOptions):
    """Options of data=table."""

    root_help: ClassVar[str] = (
        "data.root=FILES: a .csv or .parquet file, a folder of them, or a pattern such as "
        "'data.root=\"train-*.parquet\"'"
    )

    name: str = "table"
    image_root: str | None = None
    """Folder that paths start from; null takes the folder of the table, of several tables the one
    that data.root names or that its pattern begins with."""
    columns: list[str] | None = None
    """Further columns, such as [patient,slide], that the store carries for each row; null takes
    none."""
    quoting: Quoting = "line"
    """Meaning of double quotes in CSV: line (they enclose a cell of one line), multiline (of any
    lines, as captions may have) or none (they are characters)."""
    delimiter: str | None = None
    """Character between the cells of CSV, or comma, semicolon, tab or pipe; null takes the one that
    is most frequent in the header."""
    encoding: str = "utf-8"
    """Encoding of the text of CSV, such as cp1252, in which Excel writes 'CSV'; a byte order mark
    of UTF-8 is left out."""

    @property
    def csv_form(self) -> CsvForm:
        """Form of CSV files."""
        delimiter = _DELIMITERS.get(self.delimiter or "", self.delimiter)
        # The byte order mark is left out in any case.
        has_mark = self.encoding.lower().replace("_", "-") == "utf-8-sig"
        return CsvForm(delimiter, "utf-8" if has_mark else self.encoding, self.quoting)

    def __post_init__(self) -> None:
        super().__post_init__()
        delimiter = self.csv_form.delimiter
        if delimiter is not None and (
            len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0'
        ):
            raise ConfigError(
                f"data.delimiter={self.delimiter}: expected one character, or one of "
                "comma, semicolon, tab and pipe."
            )
        _check_encoding(self.csv_form.encoding)
        if self.columns is not None and (problem := column_name_problem(self.columns)):
            raise ConfigError(f"data.columns: {problem}")


def _check_encoding(name: str) -> None:
    """Refuse an encoding that Python does not know, or that is no superset of ASCII."""
    try:
        is_ascii = ',;\t"\n'.encode(name) == b',;\t"\n' and codecs.lookup(name)._is_text_encoding
    except (LookupError, UnicodeError, ValueError):
        is_ascii = False
    if not is_ascii:
        raise ConfigError(
            f"data.encoding={name}: expected an encoding that contains ASCII, such as utf-8, "
            "cp1252 or latin-1. A table of UTF-16 is saved as UTF-8 first (in Excel: 'CSV UTF-8')."
        )


def open_source(config: TableOptions) -> Source:
    """Open the table or tables that data.root names; raises MissingExtraError without pyarrow."""
    import_extra("pyarrow", "data=table", "pyarrow", "table")
    return TableSource(config.location, config)


class TableSource:
    """Rows of a table, in bytewise order of their keys.

    The key of a row is its path as written in the table. For encoded images it is the path next to
    the bytes if every row of the file has a different one, else 'row-000123', the row number in the
    file. If data.root is a folder or a pattern, keys of encoded images begin with the name of the
    file and '/'.
    """

    def __init__(self, root: str, config: TableOptions) -> None:
        self._origin = str(Path(root).expanduser())
        self._config = config
        self._root = (
            Path(config.image_root).expanduser() if config.image_root else _folder_of(self._origin)
        )
        self._folder = FolderSource(self._root, config.follow_links)
        self._images: ImageColumn | None = None
        self._listed = False
        self._lock = threading.Lock()

    @property
    def reads_in_decoders(self) -> bool:
        """Whether decoders read the images: files, but not columns of Parquet files."""
        return self._listed and self._images is None

    def listing(self) -> Listing:
        """Read the columns of paths and labels and list all rows."""
        import pyarrow as pa

        with read_errors(self._origin):
            listing = self._listing()
        # Arrow keeps what its columns have taken: 1.1 GB of 20 million rows.
        pa.default_memory_pool().release_unused()
        self._listed = True
        return listing

    def read(self, key: bytes) -> bytes:
        """Read one encoded image, from its file or from the table."""
        with self._lock:
            if not self._listed:
                self.listing()
        if self._images is not None:
            return self._images.read(key)
        return self._folder.read_inside(key)

    def place(self, key: bytes) -> str:
        """Return where the file of a row is looked for, and how to look elsewhere."""
        path = os.path.join(os.path.abspath(self._root), name_text(key))  # noqa: PTH100
        return (
            f"{path}. Paths of {self._origin} start from {self._root.absolute()}; "
            "data.image_root=DIR says where else"
        )

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
        """Return the states of the image files, or of the Parquet files that contain the images."""
        return self._folder.states(keys) if self._images is None else self._images.states(keys)

    def _listing(self) -> Listing:
        """List all rows; exceptions of pyarrow pass through."""
        config = self._config
        tables, skipped = find_files(self._origin, config.follow_links, ENDINGS, what="tables")
        if not tables:
            what = "no table in it" if Path(self._origin).is_dir() else "no such file"
            raise DataError(
                f"data.root={self._origin}: there is {what} (taken from {Path.cwd()}). Names of "
                "tables end in .csv, .tsv (both also .gz) or .parquet."
            )
        files = [Path(path) for _, path in tables]
        is_single = files == [Path(self._origin)]
        table = Table(files, self._origin, config.csv_form)
        column = self._find_image_column(table.names)
        table.check_has(column)
        label_column = choose_label_column(table.names, config.label_column, self._origin)
        if column == label_column:
            raise DataError(f"{self._origin}: {column} is the column of paths and of labels.")
        holds_images = table.is_parquet and not _holds_paths(table.parts, column)
        if holds_images:
            keys_of_files = [
                _behind(b"" if is_single else name, self._keys_of_images(part, column))
                for (name, _), part in zip(tables, table.parts, strict=True)
                if isinstance(part, ParquetTable)
            ]
        else:
            columns = zip(table.parts, table.columns(column, paths=True), strict=True)
            keys_of_files = [self._paths(part, paths) for part, paths in columns]
        keys = np.concatenate(keys_of_files) if len(keys_of_files) > 1 else keys_of_files[0]
        if not len(keys):
            raise DataError(f"{self._origin} has no rows.")
        labels, classes, warnings = self._labels(table, label_column, len(keys))
        origin = self._origin
        if set(BOX_COLUMNS[1:]) <= set(table.names):
            origin += f" has boxes of images, which data.boxes={origin} adds to another data set"
        order = sorting_order(keys, f"{origin}: {column} has some paths")
        keys = keys[order]
        content_tags = None
        if holds_images:
            self._images = ImageColumn(files, column, keys, order)
            content_tags = self._images.content_tags
        values = self._columns(table, order)
        return Listing(
            keys,
            labels[order],
            classes,
            skipped,
            content_tags,
            values,
            tuple(dict.fromkeys((*warnings, *table.warnings.values(), *self._same_paths(keys)))),
            self._label_note(table.names, column, label_column),
        )

    def _find_image_column(self, names: list[str]) -> str:
        """Return the column of paths or images: data.path_column, else 'path', else 'image'."""
        if (chosen := self._config.path_column) is not None:
            return existing_column(self._origin, "data.path_column", chosen, names)
        for wanted in ("path", "image"):
            if (name := find_column(names, wanted)) is not None:
                return name
        raise DataError(
            f"{self._origin} has no column path or image; it has {', '.join(names)}. Choose one "
            "with data.path_column=NAME; a list of paths needs the first line path."
        )

    def _label_note(self, names: list[str], column: str, label_column: str | None) -> str:
        """Return which columns look like labels, unless the options say which one holds them."""
        if self._config.label_column is not None:
            return "" if self._config.label_column else "data.label_column is empty"
        others = [name for name in names if name not in (column, *(self._config.columns or ()))]
        return note_on_columns(others, label_column)

    def _same_paths(self, keys: npt.NDArray[np.bytes_]) -> list[str]:
        """Return a warning if several paths name one file, such as ./a.jpg and a.jpg."""
        if self._images is not None:
            return []
        if not any((np.char.find(keys, part) >= 0).any() for part in (b"//", b"./")):
            return []
        paths: dict[bytes, bytes] = {}
        for key in keys.tolist():
            other = paths.setdefault(os.path.normpath(key), key)
            if other != key:
                return [
                    f"{self._origin}: {name_text(other)!r} and {name_text(key)!r} are two rows "
                    "of one image"
                ]
        return []

    def _columns(self, table: Table, order: npt.NDArray[np.int64]) -> dict[str, Array]:
        """Read the columns of the option data.columns in the order of the listing."""
        columns = {}
        for name in sorted(self._config.columns or ()):
            existing_column(self._origin, "data.columns", name, table.names)
            values = column_values(table.values(name), f"{self._origin}, column {name}")
            columns[name] = values[order]
        return columns

    def _paths(
        self, part: CsvTable | ParquetTable, column: pa.ChunkedArray
    ) -> npt.NDArray[np.bytes_]:
        """Check a column of paths and convert it to (n,) fixed-length bytes."""
        import pyarrow.compute as pc

        empty = pc.or_kleene(pc.is_null(column), pc.equal(column, "")).fill_null(True)
        problems: dict[str, list[int]] = {}
        if rows := _true_rows(empty):
            problems["without a path"] = rows
        # Arrow rejects text that is not UTF-8, so every path here encodes to the bytes of the file.
        # Only suspicious paths are checked one by one in Python.
        for row in _true_rows(pc.match_substring_regex(column, rf"{_SUSPECT}|\\")):
            if problem := self._problem(column[row].as_py()):
                problems.setdefault(problem, []).append(row)
        if problems:
            sentences = [
                f"{counted(len(rows), 'row')} {problem}: {_rows_text(part, column, rows)}."
                for problem, rows in problems.items()
            ]
            raise DataError(
                f"{part.file}: " + "\n".join(sentences) + " Correct these rows or delete them."
            )
        return text_bytes(column)

    def _problem(self, path: str) -> str | None:
        """Return what is wrong with rows of such a path: a URL, NUL, or a way out of the folder."""
        if "\0" in path or re.search(r"^[a-z0-9]+://", path):
            return "whose path is no path of a file"
        if "\\" in path and not (self._root / path).exists():
            return (
                "whose path has backslashes, as paths of Windows have (write /), "
                f"and is no file in {self._root}"
            )
        path_in_root = os.path.normpath(os.path.join(os.path.abspath(self._root), path))  # noqa: PTH100
        inside = os.path.abspath(self._root)  # noqa: PTH100
        is_outside = os.path.commonpath((path_in_root, inside)) != inside
        if is_outside and not self._config.follow_links:
            return (
                f"whose path leads out of {self._root} (data.image_root=DIR is the folder that "
                "paths start from; data.follow_links=true allows any path)"
            )
        return None

    def _keys_of_images(self, part: ParquetTable, column: str) -> npt.NDArray[np.bytes_]:
        """Return the keys of one file of images: paths if all are different, else row numbers."""
        import pyarrow as pa

        if not part.num_rows:
            return numbered_keys(0, "row-")
        kind = part.kind(column)
        fields = {f.name: f.type for f in kind} if pa.types.is_struct(kind) else {"bytes": kind}
        binary = fields.get("bytes")
        if binary is None or not (pa.types.is_binary(binary) or pa.types.is_large_binary(binary)):
            raise DataError(
                f"{part.file}: column {column} is {kind}; expected paths, image bytes, or a struct "
                "of bytes and path."
            )
        path = fields.get("path")
        if path is not None and (pa.types.is_string(path) or pa.types.is_large_string(path)):
            paths = part.column(column, "path")
            if not paths.null_count:
                keys = text_bytes(paths)
                if len(np.unique(keys)) == len(keys) and (keys != b"").all():
                    return keys
        return numbered_keys(part.num_rows, "row-")

    def _labels(self, table: Table, name: str | None, count: int) -> Labels:
        """Convert the label column to labels and class names."""
        import pyarrow as pa

        if name is None:
            return Labels.none(count)
        column = table.labels(name)
        kind = column.type
        origin = f"{self._origin}, column {name}"
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            missing = column.is_null().to_numpy()
            numbers = column.fill_null(0).to_numpy()
            return from_numbers(numbers, origin, missing, table.class_names(name))
        if pa.types.is_boolean(kind):
            column, kind = column.cast(pa.string()), pa.string()
        if pa.types.is_null(kind):
            return Labels.none(count)
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(
                f"{origin} is {kind}; expected text or whole numbers. Without labels: "
                "data.label_column= (empty)."
            )
        encoded = column.dictionary_encode().combine_chunks()
        codes = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
        names = encoded.dictionary.to_pylist()
        if not table.is_parquet:
            return from_encoded_texts(names, codes, origin)
        return renumber(np.array(names, dtype=object), codes)


def _true_rows(column: pa.ChunkedArray) -> list[int]:
    """Return the rows of a pyarrow.ChunkedArray of booleans that are true."""
    # pyarrow's indices_nonzero crashes where there are no rows (20 to 25).
    rows: list[int] = np.flatnonzero(column.fill_null(False).to_numpy()).tolist()
    return rows


def _rows_text(part: CsvTable | ParquetTable, column: pa.ChunkedArray, rows: Sequence[int]) -> str:
    """Return where the first rows with a problem are, and the paths that they have."""
    named = rows[:_NAMED_ROWS]
    shown = [
        f"{place} ({path!r})" if (path := column[row].as_py()) else place
        for row, place in zip(named, part.places(named), strict=True)
    ]
    more = f" and {len(rows) - len(named)} more" if len(rows) > len(named) else ""
    return ", ".join(shown) + more


def _holds_paths(parts: Sequence[CsvTable | ParquetTable], column: str) -> bool:
    """Return whether a column holds paths: text, or structs none of which has bytes."""
    import pyarrow as pa

    text, are_without_bytes = {}, []
    for part in parts:
        if isinstance(part, ParquetTable) and part.num_rows:
            kind = part.kind(column)
            text[pa.types.is_string(kind) or pa.types.is_large_string(kind)] = part.file
            are_without_bytes.append(part.is_without_bytes(column))
    if len(text) > 1:
        raise DataError(f"column {column} holds paths in {text[True]} and none in {text[False]}.")
    return True in text or (bool(text) and all(are_without_bytes))


def _behind(name: bytes, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.bytes_]:
    """Prefix keys with the name of their file, if it has one."""
    return np.char.add(np.bytes_(name + b"/"), keys) if name else keys


def _folder_of(root: str) -> Path:
    """Return the folder that paths are relative to: that of data.root, or of its files."""
    path = Path(root)
    if path.is_dir():
        return path
    return Path(base_of(root) or ".") if is_pattern(root) and not path.exists() else path.parent


SOURCES.register(
    source_member(
        "table",
        "CSV or Parquet files with a column of paths or encoded images.",
        TableOptions,
        open_source,
        extra="table",
    )
)
