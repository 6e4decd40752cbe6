"""Layout of a store: names of files and datasets, attributes, versions, and chunk shapes."""

from __future__ import annotations

import errno
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import xxhash
except ImportError:  # a reader of stores may have numpy and h5py only
    xxhash = None  # type: ignore[assignment]

from featx.base import command_text
from featx.errors import StoreError
from featx.types import (
    UNKNOWN_SIZE,
    Array,
    Json,
    LayerSpec,
    Part,
    StoreHeader,
    TokenGeometry,
)

FORMAT = 4
"""Version of the format; no release has written another one."""

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
DAMAGED = "damaged.json"
WORKERS = "workers"
JOBS = "jobs"
JOB_GLOB = "[0-9a-f]" * 8  # names of the folders of runs in it
TENSORBOARD = "tensorboard"
SHEETS = "sheets"
TRACE = "trace.json.gz"
PROBE = "probe.json"
PROBE_HEADS = "probe"
ZEROSHOT = "zeroshot.json"
ZEROSHOT_HEADS = "zeroshot"
RESULTS = (SUMMARY, PROBE, ZEROSHOT)  # without them the rows are as sound as before
PROBE_PREDICTIONS = "predictions.csv"
PROBE_FEW_SHOT = "few_shot.csv"

FEATURES = "features"
CHECKSUMS = "checksums"
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

MAX_CHUNK_BYTES = (1 << 32) - 1
"""Largest size of a chunk in HDF5 1.10. A row is never divided."""

PART_BYTES = 256 << 20
"""Largest size of a part with part_rows=auto."""

COLUMN_CHUNK_ROWS = 1 << 14
"""Largest number of rows per chunk of key, label, status and the columns."""

PART_GLOB = f"part-{'[0-9]' * 6}.h5"
"""Names of parts. Files of other names in a folder of parts are not the store's."""

UNREADABLE = (OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
"""Exceptions that h5py may raise for a file; `is_damage` tells damage from failed access."""


def is_damage(error: Exception) -> bool:
    """Return whether an error shows damage of the file, not failed access (EIO, EACCES, ...).

    Errors of HDF5 about the content are OSErrors without errno.
    """
    return not isinstance(error, OSError) or error.errno in (None, errno.EISDIR)


def folder_of_packed(root: Path) -> Path:
    """Folder of a store that is given by its folder or by its features.h5."""
    return root.parent if root.name == PACKED else root


def part_name(index: int) -> str:
    return f"part-{index:06d}.h5"


def store_root(path: Path) -> Path:
    """Folder of the store that a part, features.h5 or a merged file belongs to."""
    return path.parent.parent if path.match(f"{PARTS}/{PART_GLOB}") else path.parent


def repair_command(root: Path) -> str:
    """Command that repairs the store in a folder, between backticks."""
    return f"`{command_text('job=verify', f'store={root}', 'verify.repair=true')}`"


def power_of_two_at_most(value: float) -> int:
    """Largest power of two that is not above `value`, at least 1."""
    return 1 << max(0, math.floor(math.log2(max(1.0, value))))


def power_of_two_at_least(value: int) -> int:
    return 1 << max(0, (value - 1).bit_length())


@dataclass(frozen=True)
class Grid:
    """Division of the rows of a run into parts; part k starts at first_row + k * part_rows.

    The rows of a part are a power of two. `first_row` is that of the run in the listing, and
    `first_part` the index of its first part in the store.
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

        Compressed chunks are smaller.
        """
        budget = CHUNK_BYTES_COMPRESSED if compressed else CHUNK_BYTES
        return min(self.slots, power_of_two_at_most(budget / max(1, row_bytes)))

    @property
    def column_chunk_rows(self) -> int:
        """Rows per chunk of key, label, status and the columns."""
        return min(self.slots, COLUMN_CHUNK_ROWS)


def check_version(path: Path, version: int, kind: str = "store", known: int = FORMAT) -> None:
    """Raise StoreError if a file of a kind has another format than the one this featx knows."""
    if version > known:
        raise StoreError(
            f"{path} has {kind} format {version}, but this featx reads format {known}. "
            "Upgrade featx: pip install -U featx."
        )
    if version < known:
        raise StoreError(
            f"{path} has {kind} format {version}, of a featx before its first release; this one "
            f"reads format {known}. Run its command again, with overwrite=true or another out=DIR."
        )


def root_attributes(header: StoreHeader, fingerprint_sha256: str, complete: bool) -> dict[str, Any]:
    return {
        "featx_format": FORMAT,
        "fingerprint": fingerprint_sha256,
        "config": header.config,
        "model": header.model,
        "weights": header.weights,
        "weights_sha256": header.weights_sha256,
        "transform": header.transform,
        "versions": json.dumps(dict(header.versions), sort_keys=True),
        "complete": complete,
    }


def layer_attributes(spec: LayerSpec) -> dict[str, object]:
    return {
        "layer": spec.layer,
        "capture": spec.capture,
        "reduce": spec.reduce,
        "compute_dtype": spec.compute_dtype,
        **{f"reduce_{name}": value for name, value in spec.reduce_args.items()},
    }


Block = Array | bytes | bytearray | memoryview


def running_checksum() -> xxhash.xxh3_64:
    """Return an xxh3_64 to which bytes are added; raises StoreError if xxhash is not installed."""
    if xxhash is None:
        raise StoreError(
            "writing and verifying a store need the package xxhash: pip install xxhash"
        )
    return xxhash.xxh3_64()


def checksum(*blocks: Block) -> int:
    """xxh3_64 of the bytes of C-contiguous blocks, one after the other."""
    running = running_checksum()
    for block in blocks:
        running.update(block.data if isinstance(block, np.ndarray) else block)
    return running.intdigest()


def agrees(expected: object, *blocks: Block) -> bool:
    """Return whether blocks that are read, one after the other, have their checksum.

    Without the package xxhash nothing is compared, which a warning says once.
    """
    if xxhash is None:
        warnings.warn(
            "the package xxhash is not installed, so nothing that is read from a store is compared "
            "with its checksum: pip install xxhash",
            RuntimeWarning,
            stacklevel=2,
        )
        return True
    stored: list[int] = np.atleast_1d(np.asarray(expected, np.uint64)).tolist()
    return stored == [checksum(*blocks)]


def text_array(values: Sequence[str]) -> npt.NDArray[np.bytes_]:
    """Strings as an array of fixed-length UTF-8 bytes; shape (0,) for no strings."""
    encoded = [value.encode("utf-8", "surrogateescape") for value in values]
    width = max([len(value) for value in encoded], default=0)
    return np.array(encoded, dtype=f"S{max(1, width)}")


_NAMES = ("prefix_tokens", "class_token", "token_grid", "input_size")


def geometry_values(geometry: TokenGeometry | None) -> dict[str, object]:
    """Entries of a token geometry by name, as JSON types; empty without a geometry."""
    if geometry is None:
        return {}
    return {
        "prefix_tokens": geometry.prefix_tokens,
        "class_token": int(geometry.has_class_token),
        "token_grid": list(geometry.grid),
        "input_size": list(geometry.input_size),
    }


def geometry_of(values: Json) -> TokenGeometry | None:
    """Token geometry from attributes of a dataset or an entry of featx.json; None if it has none.

    Raises ValueError or TypeError if an entry is missing or impossible.
    """
    if not any(name in values for name in _NAMES):
        return None
    if missing := [name for name in _NAMES if name not in values]:
        raise ValueError(f"its tokens lack {', '.join(missing)}")
    rows, columns = (int(number) for number in values["token_grid"])
    height, width = size = tuple(int(number) for number in values["input_size"])
    prefix = int(values["prefix_tokens"])
    is_size = size == UNKNOWN_SIZE or min(size) > 0
    if prefix < 0 or min(rows, columns) < 1 or not is_size:
        raise ValueError(f"its tokens are {prefix} and {rows} x {columns} of {height} x {width}")
    return TokenGeometry(prefix, bool(values["class_token"]), (rows, columns), (height, width))
