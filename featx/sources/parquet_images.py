"""Image bytes in Parquet files: read a row group at a time, the last ones kept."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.errors import DataError
from featx.sources.base import state_of_files
from featx.sources.row_keys import row_of_key, rows_of
from featx.types import ImageFault, Status

KEPT_BYTES = 512 << 20
"""Of row groups, while there is more than one."""

MAX_GROUP_BYTES = 2 << 30
"""A row group is held whole; a larger one is refused."""

_OPEN_FILES = 16
"""Kept open, of many."""


class ImageColumn:
    """A column of image bytes; threads take turns at reading a group, not at taking rows from it.

    Args:
        files: Parquet, one after the other.
        column: binary, or a struct with a binary field `bytes`.
        keys: (N,) in bytewise order.
        rows: (N,) the row that each key stands for, counted through all files.

    Raises:
        DataError: a row group is too large to be held.
    """

    def __init__(
        self,
        files: Sequence[Path],
        column: str,
        keys: npt.NDArray[np.bytes_],
        rows: npt.NDArray[np.int64],
    ) -> None:
        from pyarrow import parquet

        self._files = files
        self._states = [_state(file.stat()) for file in files]
        self._column = column
        self._keys, self._rows = keys, rows
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._places: list[tuple[int, int]] = []
        counts = []
        for number, file in enumerate(files):
            about = parquet.read_metadata(file)
            largest = max(_bytes_of(about, column), default=0)
            if largest > MAX_GROUP_BYTES:
                raise DataError(
                    f"{file}: a row group holds {largest} bytes of {column}, over "
                    f"{MAX_GROUP_BYTES}. Write it with smaller ones, as "
                    "pyarrow.parquet.write_table(row_group_size=1000)."
                )
            self._places += [(number, i) for i in range(about.num_row_groups)]
            counts += [about.row_group(i).num_rows for i in range(about.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(counts)])

    def read(self, key: bytes) -> bytes:
        """The encoded bytes of one image.

        Raises:
            ImageFault: there are none, or the file is damaged here.
            OSError: the file cannot be read now.
        """
        row = int(self._rows[row_of_key(self._keys, key)])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        value = self._group(number)[row - int(self._starts[number])]
        if value.type.num_fields and value.is_valid:
            value = value["bytes"]
        data: bytes | None = value.as_py()
        if not data:
            raise ImageFault(Status.EMPTY, "the row has no image bytes")
        return data

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
        """(n,) IMAGE_STATE of the files that some rows lie in."""
        of_files = np.concatenate([state_of_files([file], 1) for file in self._files])
        rows = self._rows[rows_of(self._keys, keys)]
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        states: npt.NDArray[np.void] = of_files[np.array(self._places)[groups, 0]]
        return states

    def _group(self, number: int) -> Any:
        import pyarrow as pa

        with self._lock:
            group = self._groups.pop(number, None)
            if group is None:
                file, inside = self._places[number]
                try:
                    group = self._file(file).read_row_group(inside, columns=[self._column])
                except (pa.ArrowException, OSError) as error:
                    # Damage is an OSError as well, but without the number of a system's error.
                    if getattr(error, "errno", None) is not None:
                        raise
                    raise ImageFault(
                        Status.DECODE_ERROR,
                        f"row group {inside} is damaged: {str(error)[:150]}",
                        type(error).__name__,
                    ) from error
                group = group[self._column].combine_chunks()
                if isinstance(group, pa.ChunkedArray):  # more than 2 GB in 32-bit offsets
                    raise ImageFault(Status.TOO_LARGE, f"row group {inside} is too large")
            self._groups[number] = group
            while (
                len(self._groups) > 1 and sum(g.nbytes for g in self._groups.values()) > KEPT_BYTES
            ):
                self._groups.popitem(last=False)
            return group

    def _file(self, number: int) -> Any:
        """One of the files, open; the last ones used are kept so.

        Raises:
            OSError: it cannot be opened now, or is another one than was listed.
        """
        from pyarrow import parquet

        opened = self._open.pop(number, None)
        if opened is None:
            path = self._files[number]
            if _state(path.stat()) != self._states[number]:
                raise OSError(errno.ESTALE, "the table was changed while it was in use", str(path))
            # Checksums of pages are compared where the writer kept any.
            opened = parquet.ParquetFile(path, page_checksum_verification=True)
        self._open[number] = opened
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return opened


def _state(info: os.stat_result) -> tuple[int, int]:
    """What changes when a file does."""
    return info.st_size, info.st_mtime_ns


def footer_marks(file: Path, column: str) -> npt.NDArray[np.int64]:
    """(N,) marks of the rows of a Parquet file: what its footer says of their row group's bytes."""
    from pyarrow import parquet

    about = parquet.read_metadata(file)
    marks = []
    for i in range(about.num_row_groups):
        group = about.row_group(i)
        said = [
            (c.path_in_schema, c.num_values, c.total_compressed_size, c.total_uncompressed_size)
            for c in (group.column(k) for k in range(group.num_columns))
            if c.path_in_schema.split(".")[0] == column
        ]
        marks.append(np.full(group.num_rows, zlib.crc32(repr(said).encode()), dtype=np.int64))
    return np.concatenate([np.empty(0, dtype=np.int64), *marks])


def _bytes_of(about: Any, column: str) -> list[int]:
    """Bytes of a column in each row group, not compressed."""
    groups = (about.row_group(i) for i in range(about.num_row_groups))
    return [
        sum(
            group.column(k).total_uncompressed_size
            for k in range(group.num_columns)
            if group.column(k).path_in_schema.split(".")[0] == column
        )
        for group in groups
    ]
