"""Encoded images in Parquet files, read by row group, with a cache of row groups."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from featx.base import LruCache
from featx.errors import DataError
from featx.sources.base import state_of, state_of_files
from featx.sources.row_keys import find_row, find_rows
from featx.types import ImageFault, Status

if TYPE_CHECKING:
    import pyarrow as pa

KEPT_BYTES = 512 << 20
"""Cache size for row groups in bytes; the row group in use is kept even if it is larger."""

MAX_GROUP_BYTES = 2 << 30
"""Largest size of the image column of a row group in bytes, since a row group is held in memory
whole."""

_FACTS = attrgetter(
    "path_in_schema", "num_values", "total_compressed_size", "total_uncompressed_size"
)
"""What a footer says about a chunk, of which content tags are made."""


class ImageColumn:
    """A column of encoded images over several Parquet files.

    Threads may share an instance: a lock serialises reads of row groups; rows are taken from a
    group in parallel.

    Args:
        files: Parquet files, in order.
        column: name of a binary column, or of a struct column with a binary field `bytes`.
        keys: (N,) keys in bytewise order.
        rows: (N,) int64 row of each key, counted through all files.

    Attributes:
        content_tags: (N,) int64 checksums of what the footers say about the images. The rows of a
            row group share one.
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
        self._states = [state_of(file.stat())[:2] for file in files]
        self._metadata = [parquet.read_metadata(file) for file in files]
        self._column = column
        self._keys, self._rows = keys, rows
        self._groups: LruCache[int, pa.Array] = LruCache(KEPT_BYTES, lambda group: group.nbytes)
        self._places: list[tuple[int, int]] = []
        counts, tags = [], []
        for number, metadata in enumerate(self._metadata):
            for inside in range(metadata.num_row_groups):
                group = metadata.row_group(inside)
                chunks = [group.column(k) for k in range(group.num_columns)]
                chunks = [c for c in chunks if f"{c.path_in_schema}.".startswith(f"{column}.")]
                size = sum(chunk.total_uncompressed_size for chunk in chunks)
                if size > MAX_GROUP_BYTES:
                    raise DataError(
                        f"{files[number]}: a row group holds {size} bytes of {column}, over "
                        f"{MAX_GROUP_BYTES}. Write it with smaller ones, as "
                        "pyarrow.parquet.write_table(row_group_size=1000)."
                    )
                tags.append(zlib.crc32(repr([*map(_FACTS, chunks)]).encode()))
                counts.append(group.num_rows)
                self._places.append((number, inside))
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self.content_tags = np.repeat(np.array(tags, dtype=np.int64), counts)[rows]

    def read(self, key: bytes) -> bytes:
        """Read one encoded image."""
        row = int(self._rows[find_row(self._keys, key)])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        group = self._groups.get_or_make(number, lambda: self._read_group(number))
        value = group[row - int(self._starts[number])]
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

    def _read_group(self, number: int) -> pa.Array:
        """Read the image column of a row group."""
        import pyarrow as pa
        from pyarrow import parquet

        of_file, inside = self._places[number]
        path = self._files[of_file]
        if state_of(path.stat())[:2] != self._states[of_file]:
            raise OSError(errno.ESTALE, "the table was changed while it was in use", str(path))
        try:
            # Page checksums are verified if the writer stored them.
            with parquet.ParquetFile(
                path, metadata=self._metadata[of_file], page_checksum_verification=True
            ) as file:
                table = file.read_row_group(inside, columns=[self._column])
        except (pa.ArrowException, OSError) as error:
            # pyarrow raises OSError for damaged data as well, but without an errno.
            if getattr(error, "errno", None) is not None:
                raise
            raise ImageFault.of(error, what=f"row group {inside} is damaged: ") from error
        group = table[self._column].combine_chunks()
        # More than 2 GB of values, which 32-bit offsets of one array cannot address.
        if isinstance(group, pa.ChunkedArray):
            raise ImageFault(Status.TOO_LARGE, f"row group {inside} is too large")
        return group
