"""Source data=webdataset: images in tar shards, which are read in place and never extracted.

A key is the path of the shard, '/', and the name of the member. Rows of a tar.gz are read from seek
points, which the first pass over it finds.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from featx.base import LruCache, name_text, printable, require_extra
from featx.config import options
from featx.errors import DataError, counted
from featx.sources.base import MAX_FILE_BYTES, endings, tag_of
from featx.sources.labels import Labels, from_names, from_numbers, renumber
from featx.sources.registry import SOURCES, FileOptions, source_member
from featx.sources.row_keys import find_row, find_rows, sorting_order
from featx.sources.table_columns import MISSING_MARKS, warning_of_marks
from featx.sources.tar_index import (
    CUT_SIZE,
    FIRST_NAME,
    NO_LABEL,
    REFUSED_SIZE,
    TWICE_SIZE,
    TarIndex,
    index_of,
)
from featx.sources.tar_shards import GzipReader, Shard, find_shards
from featx.types import UNTOLD, ImageFault, Listing, Source, Status

_OPEN_READERS = 4
"""Maximum number of compressed shards that are open at a time."""

_INDEXING = 8
"""Number of shards whose headers are read in parallel."""


@options("data")
class WebDatasetOptions(FileOptions):
    """Options of data=webdataset."""

    root_help: ClassVar[str] = (
        "data.root=SHARDS: a folder of tars, one tar, or a pattern such as "
        "'data.root=\"train-{000..012}.tar\"'"
    )

    name: str = "webdataset"


def open_source(config: WebDatasetOptions) -> Source:
    """Open the tar shards that data.root names."""
    return ShardSource(config.location, config.follow_links, endings(config.extensions))


class ShardSource:
    """Images in tar shards.

    A shard that ends early, or continues with something that is not a tar, provides its complete
    images and one more row, which fails with the status 'truncated'. A shard that is refused as a
    whole is one row that fails, unless there is no other shard.
    """

    def __init__(self, root: str, follow_links: bool, extensions: frozenset[bytes]) -> None:
        self._root = root
        self._follow_links = follow_links
        self._extensions = extensions
        self._shards: list[Shard] = []
        self._indexes: list[TarIndex] = []
        self._keys = np.empty(0, dtype="S1")
        self._positions = np.empty((3, 0), dtype=np.int64)
        self._readers: LruCache[int, GzipReader] = LruCache(_OPEN_READERS)
        self._lock = threading.RLock()

    @property
    def reads_in_decoders(self) -> bool:
        """Whether decoders read the members: of plain shards, but not compressed ones."""
        return bool(self._indexes) and not any(index.compressed for index in self._indexes)

    def listing(self) -> Listing:
        """Find and index the shards and list all images; the content tag is the member's size."""
        self._shards = find_shards(self._root, self._follow_links)
        self._readers.drop(lambda number: True)
        try:
            with ThreadPoolExecutor(_INDEXING, thread_name_prefix="featx-index") as threads:
                self._indexes = list(
                    threads.map(lambda shard: index_of(shard, self._extensions), self._shards)
                )
        except OSError as error:
            if isinstance(error, DataError):
                raise
            problem = str(error).rstrip(".")
            raise DataError(f"data.root={self._root} cannot be read: {problem}.") from error
        if any(index.compressed for index in self._indexes):
            require_extra("indexed_gzip", "a tar.gz", "indexed_gzip", "shards")
        skipped: Counter[str] = Counter()
        for shard, index in zip(self._shards, self._indexes, strict=True):
            skipped.update(index.skipped)
            if index.cut:
                skipped[f"shard that ends early ({printable(shard.name)}: {index.cut})"] += 1
            if index.refused:
                skipped[f"refused shard ({printable(shard.name)} {index.refused})"] += 1
        if not any(index.has_images for index in self._indexes):
            left_out = ", ".join(f"{n} {why}" for why, n in sorted(skipped.items()))
            raise DataError(
                f"no images in {counted(len(self._shards), 'shard')} of {self._root}. "
                f"Left out: {left_out or 'nothing'}."
            )
        note = self._label_note()
        labels, classes, warnings = self._combine_indexes()
        return Listing(
            self._keys,
            labels,
            classes,
            dict(skipped),
            self._positions[2],
            warnings=warnings,
            label_note="" if classes else note,
        )

    def read(self, key: bytes) -> bytes:
        """Read one member."""
        with self._lock:
            if not len(self._keys):
                self.listing()
        row = find_row(self._keys, key)
        number, offset, size = (int(column[row]) for column in self._positions)
        shard, index = self._shards[number], self._indexes[number]
        problems = {
            CUT_SIZE: (Status.TRUNCATED, f"is not whole: {index.cut}", "CutOffError"),
            TWICE_SIZE: (Status.DECODE_ERROR, "has two members of this name", "ImageFault"),
            REFUSED_SIZE: (Status.DECODE_ERROR, index.refused, "RefusedShardError"),
        }
        if size in problems:
            status, problem, error = problems[size]
            raise ImageFault(status, f"the shard {shard.url} {problem}", error)
        if size == 0:
            raise ImageFault(Status.EMPTY, "the member has no bytes")
        if size > MAX_FILE_BYTES:
            raise ImageFault(Status.TOO_LARGE, f"{size} bytes, over {MAX_FILE_BYTES}")
        if index.compressed:
            reader = self._readers.get_or_make(number, lambda: self._open_reader(number))
            data = reader.read(offset, size)
        else:
            data = shard.read(offset, size)
        if len(data) != size:
            raise OSError(errno.EIO, f"{len(data)} of {size} bytes came", shard.url)
        return data

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
        """Return the size of each member, its shard's mtime, and a tag of offset and shard version.

        Returns (n,) IMAGE_STATE.
        """
        shards, offsets, sizes = self._positions[:, find_rows(self._keys, keys)]
        versions = np.array([tag_of((shard.version, shard.size)) for shard in self._shards])
        states = np.full(len(keys), UNTOLD)
        states["size"], states["tag"] = sizes, versions[shards] ^ offsets
        changed = np.array(
            [-1 if shard.mtime_ns is None else shard.mtime_ns for shard in self._shards]
        )
        states["mtime_ns"] = changed[shards]
        return states

    def _open_reader(self, number: int) -> GzipReader:
        """Return the reader of a compressed shard, which has a lock of its own."""
        of_shard = self._positions[0] == number
        size = int(self._positions[1:, of_shard].sum(axis=0).max())
        return GzipReader(self._shards[number], size)

    def _combine_indexes(self) -> Labels:
        """Sort the rows of all shards by key, keep their positions, and return their labels."""
        numbers = np.concatenate(
            [np.insert(index.numbers, 0, i, axis=0) for i, index in enumerate(self._indexes)],
            axis=1,
        )
        keys = np.concatenate(
            [
                np.char.add(np.bytes_(shard.name + b"/"), index.names)
                for shard, index in zip(self._shards, self._indexes, strict=True)
            ]
        )
        # The listing holds the columns from now on.
        self._indexes = [
            replace(index, names=index.names[:0], numbers=index.numbers[:, :0])
            for index in self._indexes
        ]
        order = sorting_order(keys, f"the shards of {self._root} have some names")
        self._keys, self._positions = keys[order], numbers[:3, order]
        return self._labels(numbers[3, order])

    def _labels(self, numbers: npt.NDArray[np.int64]) -> Labels:
        """Return labels from the .cls members, if any, else from the folders in member names."""
        starts = [len(shard.name) + 1 for shard in self._shards]
        without = np.flatnonzero(numbers == NO_LABEL)
        members = (self._keys[row][starts[self._positions[0, row]] :] for row in without.tolist())
        folders = (name_text(name.rpartition(b"/")[0].partition(b"/")[0]) for name in members)
        if len(without) == len(numbers):
            return from_names(folders)
        origin = f"the .cls members of {self._root}"
        if (numbers <= FIRST_NAME).any():
            labels = self._named_labels(numbers, origin)
        else:
            labels = from_numbers(numbers, origin, numbers == NO_LABEL)
        if not (num_unused := sum(folder != "" for folder in folders)):
            return labels
        warning = (
            f"{self._root}: {counted(num_unused, 'image lies', 'images lie')} in a folder and has "
            "no .cls member, so no label: folders are labels only where no image has a .cls member"
        )
        return labels._replace(warnings=(*labels.warnings, warning))

    def _named_labels(self, numbers: npt.NDArray[np.int64], origin: str) -> Labels:
        """Return labels from .cls members that hold names; refuse numbers among them."""
        named, numbered = np.flatnonzero(numbers <= FIRST_NAME), numbers > NO_LABEL
        counts = [len(index.class_names) for index in self._indexes]
        starts = np.cumsum([0, *counts])[self._positions[0]]
        codes = np.where(numbers <= FIRST_NAME, starts + FIRST_NAME - numbers, -1)
        names = [name for index in self._indexes for name in index.class_names]
        if numbered.any():
            first, other = int(named[0]), int(np.flatnonzero(numbered)[0])
            raise DataError(
                f"{origin} hold names and numbers: {names[codes[first]]!r} for "
                f"{name_text(self._keys[first])} and {numbers[other]} for "
                f"{name_text(self._keys[other])}; expected one of the two throughout."
            )
        labels = renumber(np.array(names, dtype=object), codes)
        num_rows = np.bincount(labels.labels[labels.labels >= 0]).tolist()
        pairs = zip(labels.classes, num_rows, strict=True)
        if marks := {name: rows for name, rows in pairs if name.lower() in MISSING_MARKS}:
            meaning = "which counts as a class; an image without a label has no .cls member"
            return labels._replace(warnings=(warning_of_marks(marks, origin, meaning),))
        return labels

    def _label_note(self) -> str:
        """Return what was looked for as labels, and which other members there are."""
        endings: Counter[str] = Counter()
        for index in self._indexes:
            endings.update(index.endings)
        looked_for = "there are no .cls members and no folders in the names of members"
        if not endings:
            return looked_for
        shown = ", ".join(ending or "no extension" for ending, _ in endings.most_common(3))
        return f"{looked_for}; members that are not used end in {shown}"


SOURCES.register(
    source_member(
        "webdataset",
        "Images in tar shards, on a disk or behind URLs.",
        WebDatasetOptions,
        open_source,
    )
)
