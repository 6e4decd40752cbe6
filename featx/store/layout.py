"""Layout of a store: names of files and datasets, attributes, versions, and chunk shapes."""

from __future__ import annotations

import errno
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.types import LayerSpec, Part, Status, StoreHeader

FORMAT = 2
"""Newest version of the format that this featx reads and writes."""

FORMAT_PLAIN = 1
"""Version of HDF5 files and of stores with a single run, which every featx can read."""

MANIFEST = "featx.json"
LISTING = "samples.h5"
IMAGES = "images.h5"
PACKED = "features.h5"
PARTS = "parts"
FAILURES_CSV = "failures.csv"
SUMMARY = "summary.json"
LOCK = ".lock"
OVERWRITE_MARKER = ".overwriting"
STATS_OVERWRITE_MARKER = ".stats-overwriting"
QUARANTINE = "quarantine"
WORKERS = "workers"
JOBS = "jobs"
TENSORBOARD = "tensorboard"
SHEETS = "sheets"
TRACE = "trace.json.gz"
PROBE = "probe.json"
PROBE_HEADS = "probe"
ZEROSHOT = "zeroshot.json"
ZEROSHOT_HEADS = "zeroshot"
PROBE_PREDICTIONS = "predictions.csv"
PROBE_FEW_SHOT = "few_shot.csv"

FEATURES = "features"
CHECKSUMS = "checksums"
_WORDS = 512
_FOLDED_BYTES = 65536
"""Words per row, and the unit in bytes, of `checksum`; for fewer bytes crc32 alone is faster."""

KEY = "key"
LABEL = "label"
STATUS = "status"
IMAGE_CHECKSUM = "image_checksum"
CLASSES = "classes"
COLUMNS = "columns"
FAILURES = "failures"
FAILURE_COLUMNS = ("row", "error", "message")
MANIFEST_COPY = "manifest"
TEXT_CHECKSUMS = "text_checksums"
CHUNK_TABLE = "chunk_table"

LIBVER = ("v110", "v110")
"""Version bounds of HDF5 files: readable by HDF5 1.10 and later."""

CHUNK_BYTES = 1 << 20
"""Target size of a chunk without filters."""

CHUNK_BYTES_COMPRESSED = 1 << 18
"""Target size of a compressed chunk before compression; one row decodes a whole chunk."""

PART_BYTES = 256 << 20
"""Largest size of a part with part_rows=auto and part_mib=auto."""

COLUMN_CHUNK_ROWS = 1 << 14
"""Largest number of rows per chunk of key, label, status and the columns."""


PART_GLOB = "part-*.h5"
PIECE_GLOB = "piece-*.h5"
PART_OR_PIECE_GLOB = "p*-*.h5"

_PIECE_NAME = re.compile(r"piece-(\d+)-(\d+)-(\d+)\.h5")

UNREADABLE = (OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
"""Exceptions that h5py may raise for a file; `is_damage` tells damage from failed access."""


def is_damage(error: Exception) -> bool:
    """Return whether an error shows damage of the file, not failed access (EIO, EACCES, ...).

    Errors of HDF5 about the content are OSErrors without errno.
    """
    return not isinstance(error, OSError) or error.errno in (None, errno.EISDIR)


def part_name(index: int) -> str:
    """File name of a part in the folder parts/."""
    return f"part-{index:06d}.h5"


def piece_name(piece: Part) -> str:
    """File name of a piece in the folder parts/: index of its part, first row, and stop row."""
    return f"piece-{piece.index:06d}-{piece.start}-{piece.stop}.h5"


def parse_piece_name(name: str) -> Part | None:
    """Rows of a piece from its file name, or None for names of other files."""
    match = _PIECE_NAME.fullmatch(name)
    return None if match is None else Part(*map(int, match.groups()))


def power_of_two_at_most(value: float) -> int:
    """Largest power of two that is not above `value`, at least 1."""
    return 1 << max(0, math.floor(math.log2(max(1.0, value))))


def power_of_two_at_least(value: int) -> int:
    """Smallest power of two that is not below `value`."""
    return 1 << max(0, (value - 1).bit_length())


@dataclass(frozen=True)
class Grid:
    """Division of the rows of a run into parts; part k starts at first_row + k * part_rows.

    Attributes:
        num_rows: number of rows of the run.
        part_rows: rows per part, a power of two.
        first_row: first row of the run in the listing.
        first_part: index of the first part of the run in the store.
    """

    num_rows: int
    part_rows: int
    first_row: int = 0
    first_part: int = 0

    @property
    def stop_row(self) -> int:
        """Row after the last row of the run."""
        return self.first_row + self.num_rows

    @property
    def slots(self) -> int:
        """Number of rows that the datasets of a part can hold: part_rows, or less in small runs."""
        return min(self.part_rows, power_of_two_at_least(self.num_rows))

    def __len__(self) -> int:
        return -(-self.num_rows // self.part_rows)

    def part(self, index: int) -> Part:
        """Part number `index` of the run, counted from 0; the last one may be shorter."""
        start = self.first_row + index * self.part_rows
        stop = min(start + self.part_rows, self.stop_row)
        return Part(self.first_part + index, start, stop)

    def holds(self, row: int) -> bool:
        """Return whether a row of the listing belongs to the run."""
        return self.first_row <= row < self.stop_row

    def part_of(self, row: int) -> Part:
        """Part that holds a row of the listing."""
        return self.part((row - self.first_row) // self.part_rows)

    def chunk_rows(self, row_bytes: int, compressed: bool) -> int:
        """Rows per chunk: a power of two, so that no chunk extends over two parts.

        Args:
            row_bytes: bytes of a row.
            compressed: whether the chunks are compressed; they are smaller then.
        """
        budget = CHUNK_BYTES_COMPRESSED if compressed else CHUNK_BYTES
        return min(self.slots, power_of_two_at_most(budget / max(1, row_bytes)))

    @property
    def column_chunk_rows(self) -> int:
        """Rows per chunk of key, label, status and the columns."""
        return min(self.slots, COLUMN_CHUNK_ROWS)


def check_version(path: Path, version: int) -> None:
    """Raise StoreError if a file has a newer format than this featx reads."""
    if version > FORMAT:
        raise StoreError(
            f"{path} has store format {version}, but this featx reads formats up to {FORMAT}. "
            "Upgrade featx: pip install -U featx."
        )


def status_names() -> str:
    """JSON text with the name of each status number, an attribute of /status."""
    return json.dumps({int(s): s.label for s in Status})


def root_attributes(header: StoreHeader, fingerprint_sha256: str, complete: bool) -> dict[str, Any]:
    """Root attributes of a part or of features.h5."""
    return {
        "featx_format": FORMAT_PLAIN,
        "fingerprint": fingerprint_sha256,
        "config": header.config,
        "model": header.model,
        "weights": header.weights,
        "weights_sha256": header.weights_sha256,
        "transform": header.transform,
        "versions": json.dumps(dict(header.versions), sort_keys=True),
        "complete": complete,
    }


def layer_attributes(spec: LayerSpec) -> dict[str, Any]:
    """Attributes of a dataset in /features."""
    return {
        "layer": spec.layer,
        "capture": spec.capture,
        "reduce": spec.reduce,
        "compute_dtype": spec.compute_dtype,
        **{f"reduce_{name}": value for name, value in spec.reduce_args.items()},
    }


def chunk_checksums(rows: npt.NDArray[Any], rows_per_chunk: int) -> npt.NDArray[np.uint32]:
    """`checksum` of each chunk of some rows.

    Returns:
        (ceil(N / rows_per_chunk),) uint32.
    """
    rows = np.ascontiguousarray(rows)
    starts = range(0, len(rows), rows_per_chunk)
    sums = [checksum(rows[i : i + rows_per_chunk]) for i in starts]
    return np.array(sums, dtype=np.uint32)


def checksum(values: npt.NDArray[Any] | bytes | bytearray) -> int:
    """32-bit checksum of bytes, two and a half times as fast as crc32 for long inputs.

    Of n bytes, the first floor(n / 65536) * 65536 form a matrix W of little-endian 64-bit words,
    with 512 words (4 KiB) per row. The checksum is the crc32 of, one after the other, the sums of
    the rows of W (modulo 2^64), the XOR of its rows (512 words), and the bytes that follow W. For
    fewer than 65536 bytes it equals zlib.crc32.

    Flipped bits in one or two words always change an input of crc32: two changes that cancel in a
    sum lie in one row, and two that cancel in the XOR lie in one column. Exchanged or lost blocks
    of 4 KiB change the order of the sums. Other changes are missed once in 2^32 times, as by crc32.

    Returns:
        checksum in [0, 2^32).
    """
    running = RunningChecksum()
    running.add(values if isinstance(values, np.ndarray) else np.frombuffer(values, np.uint8))
    return running.value()


class RunningChecksum:
    """`checksum` of bytes that come in pieces of any length, one after the other."""

    def __init__(self) -> None:
        self._sums: list[npt.NDArray[np.uint64]] = []
        self._xor = np.zeros(_WORDS, "<u8")
        self._rest = np.empty(0, np.uint8)  # bytes that do not fill _FOLDED_BYTES yet

    def add(self, values: npt.NDArray[Any]) -> None:
        """Take the bytes of a C-contiguous array, which may be changed afterwards."""
        data = values.reshape(-1).view(np.uint8)
        if len(self._rest):
            data = np.concatenate([self._rest, data])
        size = len(data) // _FOLDED_BYTES * _FOLDED_BYTES
        if size:
            words = data[:size].view("<u8").reshape(-1, _WORDS)
            self._sums.append(np.add.reduce(words, axis=1))
            self._xor ^= np.bitwise_xor.reduce(words, axis=0)
        self._rest = data[size:].copy()

    def value(self) -> int:
        """`checksum` of all bytes so far."""
        crc = 0
        if self._sums:
            for folded in (*self._sums, self._xor):
                crc = zlib.crc32(folded.astype("<u8", copy=False).data, crc)
        return zlib.crc32(self._rest.data, crc)


def failures_checksum(columns: Sequence[npt.NDArray[Any]]) -> int:
    """crc32 of the rows, exception names and messages of /failures, one after the other."""
    crc = 0
    for values in columns:
        crc = zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data, crc)
    return crc


def text_array(values: Sequence[str]) -> npt.NDArray[np.bytes_]:
    """Strings as an array of fixed-length UTF-8 bytes; shape (0,) for no strings."""
    encoded = [value.encode("utf-8", "surrogateescape") for value in values]
    width = max([len(value) for value in encoded], default=0)
    return np.array(encoded, dtype=f"S{max(1, width)}")
