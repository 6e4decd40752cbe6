"""data=table: a CSV or Parquet file with a column of paths, or of image bytes, and others.

Image bytes are read from Parquet a row group at a time, as Hugging Face's data sets have them: a
struct of `bytes` and `path`, or binary values alone.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.data.base import FolderSource
from featx.data.columns import column_values, text_bytes
from featx.data.labels import Labels, from_numbers, named, renumbered
from featx.data.numbered import numbered_keys
from featx.data.parquet_images import ImageColumn, footer_marks
from featx.data.places import doubles
from featx.data.table_files import Parquet, TableFile, open_table
from featx.errors import DataError, MissingExtraError, nearest
from featx.options import DataConfig
from featx.types import Listing, Source

_SUSPECT = r"(^/|^~|(^|/)\.\.(/|$)|://|\x00)"
"""Paths that may lead out of the folder, or to no file at all."""


def open_source(config: DataConfig) -> Source:
    """The table data.root.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingExtraError('data=table needs pyarrow: pip install "featx[table]".') from error
    assert config.root is not None
    return TableSource(Path(config.root).expanduser(), config)


class TableSource:
    """Rows of a table, in bytewise order of their keys.

    A key is the path as the table has it; of image bytes their path where each row has one of its
    own, else 'row-000123', the place in the table.

    Args:
        file: .csv, .tsv (also with .gz behind) or .parquet.
        config: for the columns, the folder of the paths, and the policy of links.
    """

    def __init__(self, file: Path, config: DataConfig) -> None:
        self._file = file
        self._path_column = config.path_column
        self._label_column = config.label_column
        self._column_names = sorted(config.columns or ())
        self._follow_links = config.follow_links
        self._root = Path(config.images).expanduser() if config.images else file.parent
        self._folder = FolderSource(self._root, config.follow_links)
        self._images: ImageColumn | None = None
        self._listed = False
        self._lock = threading.Lock()

    def listing(self) -> Listing:
        import pyarrow as pa

        try:
            listing = self._listing()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.root={self._file} cannot be read: {error}.") from error
        self._listed = True
        return listing

    def read(self, key: bytes) -> bytes:
        with self._lock:
            if not self._listed:
                self.listing()
        if self._images is not None:
            return self._images.read(key)
        return self._folder.read_inside(key)

    def _listing(self) -> Listing:
        import pyarrow as pa

        if not self._file.is_file():
            raise DataError(
                f"data.root={self._file} is no file (taken from {Path.cwd()}); expected .csv, .tsv "
                "or .parquet."
            )
        table = open_table(self._file)
        column = self._chosen(table.names)
        label_column = self._chosen_label(table.names)
        if column == label_column:
            raise DataError(f"{self._file}: {column} is the column of paths and of labels.")
        kind = table.kind(column)
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if is_text:
            keys = self._paths(table.column(column))
        elif isinstance(table, Parquet):
            keys = self._keys_of_images(table, column, kind)
        else:
            raise DataError(f"{self._file}: column {column} is {kind}; expected paths.")
        labels, classes = self._labels(table, label_column, len(keys))
        order = np.arange(len(keys))
        if not (keys[1:] > keys[:-1]).all():
            order = np.argsort(keys, kind="stable")
        keys = keys[order]
        if twice := doubles(keys):
            shown = ", ".join(os.fsdecode(key) for key in twice)
            raise DataError(
                f"{self._file}: {column} has some paths more than once: {shown}. A key stands for "
                "one row."
            )
        marks = None
        if not is_text:
            self._images = ImageColumn(self._file, column, keys, order)
            marks = footer_marks(self._file, column)[order]
        return Listing(keys, labels[order], classes, {}, marks, self._columns(table, order))

    def _chosen(self, names: list[str]) -> str:
        """The column of paths or images."""
        if self._path_column is not None:
            return _known(self._file, "data.path_column", self._path_column, names)
        for name in ("path", "image"):
            if name in names:
                return name
        raise DataError(
            f"{self._file} has no column path or image but {', '.join(names)}; say which with "
            "data.path_column=NAME."
        )

    def _chosen_label(self, names: list[str]) -> str | None:
        if self._label_column is None:
            return "label" if "label" in names else None
        if not self._label_column:
            return None
        return _known(self._file, "data.label_column", self._label_column, names)

    def _columns(
        self, table: TableFile, order: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[Any]]:
        """The columns that data.columns names, in the order of the listing."""
        found = {}
        for name in self._column_names:
            name = _known(self._file, "data.columns", name, table.names)
            values = column_values(table.values(name), f"{self._file}, column {name}")
            found[name] = values[order]
        return found

    def _paths(self, column: Any) -> npt.NDArray[np.bytes_]:
        import pyarrow.compute as pc

        if not len(column):
            raise DataError(f"{self._file} has no rows.")
        empty = pc.or_kleene(pc.is_null(column), pc.equal(column, "")).fill_null(True)
        if (row := pc.index(empty, True).as_py()) >= 0:
            raise DataError(f"{self._file}: row {row} has no path.")
        # Byte for byte: a path that is no UTF-8 never comes this far, Arrow refuses it.
        for path in column.filter(pc.match_substring_regex(column, _SUSPECT)).to_pylist():
            self._check_path(path)
        return text_bytes(column)

    def _check_path(self, path: str) -> None:
        if "\0" in path or re.search(r"^[a-z0-9]+://", path):
            raise DataError(f"{self._file}: {path!r} is no path of a file.")
        whole = os.path.normpath(os.path.join(os.path.abspath(self._root), path))  # noqa: PTH100
        inside = os.path.abspath(self._root)  # noqa: PTH100
        if not self._follow_links and os.path.commonpath((whole, inside)) != inside:
            raise DataError(
                f"{self._file}: {path!r} leads out of {self._root}. data.images=DIR says where "
                "paths start from; data.follow_links=true allows any place."
            )

    def _keys_of_images(self, table: Parquet, column: str, kind: Any) -> npt.NDArray[np.bytes_]:
        """Paths beside the bytes where each row has its own, else numbers."""
        import pyarrow as pa

        fields = {f.name: f.type for f in kind} if pa.types.is_struct(kind) else {"bytes": kind}
        binary = fields.get("bytes")
        if binary is None or not (pa.types.is_binary(binary) or pa.types.is_large_binary(binary)):
            raise DataError(
                f"{self._file}: column {column} is {kind}; expected paths, image bytes, or a "
                "struct of bytes and path."
            )
        if not table.num_rows:
            raise DataError(f"{self._file} has no rows.")
        path = fields.get("path")
        if path is not None and pa.types.is_string(path):
            paths = table.column(f"{column}.path")
            if not paths.null_count:
                keys = text_bytes(paths)
                if len(np.unique(keys)) == len(keys) and (keys != b"").all():
                    return keys
        return numbered_keys(table.num_rows, "row-")

    def _labels(self, table: TableFile, name: str | None, count: int) -> Labels:
        import pyarrow as pa

        if name is None:
            return np.full(count, -1, dtype=np.int64), ()
        column = table.labels(name)
        kind = column.type
        where = f"{self._file}, column {name}"
        if pa.types.is_integer(kind):
            numbers = column.fill_null(-1).cast(pa.int64()).to_numpy()
            if names := table.class_names(name):
                return named(numbers, names, where)
            return from_numbers(numbers, where)
        if pa.types.is_boolean(kind):
            column, kind = column.cast(pa.string()), pa.string()
        if pa.types.is_null(kind):
            return np.full(count, -1, dtype=np.int64), ()
        if pa.types.is_dictionary(kind):
            column, kind = column.cast(kind.value_type), kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(
                f"{where} is {kind}; expected text or whole numbers. Without labels: "
                "data.label_column= (empty)."
            )
        encoded = column.combine_chunks().dictionary_encode()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        codes = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
        return renumbered(np.array(encoded.dictionary.to_pylist(), dtype=object), codes)


def _known(file: Path, key: str, name: str, names: list[str]) -> str:
    if name not in names:
        raise DataError(f"{key}={name}: {file} has {', '.join(names)}.{nearest(name, names)}")
    return name
