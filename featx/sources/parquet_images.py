"""Encoded images in Parquet files, read by row group, with a cache of row groups."""

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
from featx.sources.row_keys import find_row, find_rows
from featx.types import ImageFault, Status

KEPT_BYTES = 512 << 20
"""Cache size for row groups in bytes; the row group in use is kept even if it is larger."""

MAX_GROUP_BYTES = 2 << 30
"""Largest size of the image column of a row group in bytes, since a row group is held in memory
whole."""

_OPEN_FILES = 16
"""Maximum number of Parquet files that are open at a time."""


class ImageColumn:
    """A column of encoded images over several Parquet files.

    Threads may share an instance: a lock serialises reads of row groups; rows are taken from a
    group in parallel.
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
            metadata = parquet.read_metadata(file)
            largest = max(_bytes_of(metadata, column), default=0)
            if largest > MAX_GROUP_BYTES:
                raise DataError(
                    f"{file}: a row group holds {largest} bytes of {column}, over "
                    f"{MAX_GROUP_BYTES}. Write it with smaller ones, as "
                    "pyarrow.parquet.write_table(row_group_size=1000)."
                )
            self._places += [(number, i) for i in range(metadata.num_row_groups)]
            counts += [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(counts)])

    def read(self, key: bytes) -> bytes:
        """Read one encoded image."""
        row = int(self._rows[find_row(self._keys, key)])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        value = self._group(number)[row - int(self._starts[number])]
        if value.type.num_fields and value.is_valid:
            value = value["bytes"]
        data: bytes | None = value.as_py()
        if not data:
            raise ImageFault(Status.EMPTY, "the row has no image bytes")
        return data

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
        """Return the state of the file that contains each row, (n,) IMAGE_STATE."""
        of_files = np.concatenate([state_of_files([file], 1) for file in self._files])
        rows = self._rows[find_rows(self._keys, keys)]
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        states: npt.NDArray[np.void] = of_files[np.array(self._places)[groups, 0]]
        return states

    def _group(self, number: int) -> Any:
        """Return the image column of a row group as a pyarrow Array, cached or read.

        The lock is held while reading, so that threads that need the same group read it once.
        """
        import pyarrow as pa

        with self._lock:
            group = self._groups.pop(number, None)
            if group is None:
                file, inside = self._places[number]
                try:
                    group = self._file(file).read_row_group(inside, columns=[self._column])
                except (pa.ArrowException, OSError) as error:
                    # pyarrow raises OSError for damaged data as well, but without an errno.
                    if getattr(error, "errno", None) is not None:
                        raise
                    raise ImageFault(
                        Status.DECODE_ERROR,
                        f"row group {inside} is damaged: {str(error)[:150]}",
                        type(error).__name__,
                    ) from error
                group = group[self._column].combine_chunks()
                # More than 2 GB of values, which 32-bit offsets of one array cannot address.
                if isinstance(group, pa.ChunkedArray):
                    raise ImageFault(Status.TOO_LARGE, f"row group {inside} is too large")
            self._groups[number] = group
            while (
                len(self._groups) > 1 and sum(g.nbytes for g in self._groups.values()) > KEPT_BYTES
            ):
                self._groups.popitem(last=False)
            return group

    def _file(self, number: int) -> Any:
        """Open a file, or return it from the cache of open files. The caller holds the lock."""
        from pyarrow import parquet

        opened = self._open.pop(number, None)
        if opened is None:
            path = self._files[number]
            if _state(path.stat()) != self._states[number]:
                raise OSError(errno.ESTALE, "the table was changed while it was in use", str(path))
            # Page checksums are verified if the writer stored them.
            opened = parquet.ParquetFile(path, page_checksum_verification=True)
        self._open[number] = opened
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return opened


def _state(info: os.stat_result) -> tuple[int, int]:
    """Return size and mtime, which change when a file does."""
    return info.st_size, info.st_mtime_ns


def footer_content_tags(file: Path, column: str) -> npt.NDArray[np.int64]:
    """Compute content tags of the rows of a Parquet file from its footer, without reading images.

    The tag is a checksum of the footer's entries for the image column of the row group.

    Returns (N,) int64; rows of a row group share a tag.
    """
    from pyarrow import parquet

    metadata = parquet.read_metadata(file)
    content_tags = []
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        facts = [
            (c.path_in_schema, c.num_values, c.total_compressed_size, c.total_uncompressed_size)
            for c in (group.column(k) for k in range(group.num_columns))
            if c.path_in_schema.split(".")[0] == column
        ]
        content_tags.append(
            np.full(group.num_rows, zlib.crc32(repr(facts).encode()), dtype=np.int64)
        )
    return np.concatenate([np.empty(0, dtype=np.int64), *content_tags])


def _bytes_of(metadata: Any, column: str) -> list[int]:
    """Return the uncompressed bytes of a column in each row group."""
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return [
        sum(
            group.column(k).total_uncompressed_size
            for k in range(group.num_columns)
            if group.column(k).path_in_schema.split(".")[0] == column
        )
        for group in groups
    ]
