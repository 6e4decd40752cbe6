"""Source data=webdataset: images in tar shards, which are read in place and never extracted.

A key is the path of the shard, '/', and the name of the member. Plain tars allow access to any row.
A tar.gz can only be decompressed from its beginning, which is fast as long as rows are read in the
order of the tar.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from featx.base import name_text, printable
from featx.errors import DataError, counted
from featx.sources.base import MAX_FILE_BYTES, endings, tag_of
from featx.sources.gzip_window import DAMAGE, GzipWindow
from featx.sources.labels import Labels, from_names, from_numbers
from featx.sources.options import FileOptions
from featx.sources.registry import SOURCES, source_member
from featx.sources.row_keys import find_row, find_rows
from featx.sources.tar_index import CUT_SIZE, NO_LABEL, TWICE_SIZE, TarIndex, index_of
from featx.sources.tar_shards import Shard, find_shards
from featx.types import UNTOLD, ImageFault, Listing, Source, Status

_OPEN_WINDOWS = 4
"""Maximum number of compressed shards that are open at a time."""

_INDEXING = 8
"""Number of shards whose headers are read in parallel."""

_REFUSED_SIZE = -3
"""Size that marks the row of a refused shard."""

_MISSING_NAME = b"(the rest of the shard)"
"""Member name of the row that stands for the missing rest of a shard."""
_REFUSED_NAME = b"(the shard)"
"""Member name of the row that stands for a refused shard."""

logger = logging.getLogger(__name__)


@dataclass
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

    Args:
        root: a folder, one tar, or a pattern with wildcards or brace ranges, on a disk or behind a
            URL.
        follow_links: whether links out of a folder are followed.
        extensions: file name extensions to list, in lower case with a leading dot.
    """

    def __init__(self, root: str, follow_links: bool, extensions: frozenset[bytes]) -> None:
        self._root = root
        self._follow_links = follow_links
        self._extensions = extensions
        self._shards: list[Shard] = []
        self._indexes: list[TarIndex] = []
        self._keys = np.empty(0, dtype="S1")
        self._positions = np.empty((3, 0), dtype=np.int64)
        self._windows: OrderedDict[int, GzipWindow] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def reads_in_decoders(self) -> bool:
        """Whether decoders read the members: of plain shards, but not through gzip windows."""
        return bool(self._indexes) and not any(index.compressed for index in self._indexes)

    def listing(self) -> Listing:
        """Find and index the shards and list all images; the content tag is the member's size.

        Raises:
            DataError: there are no shards or images, a shard cannot be read at the moment, or a
                label is no number of a class.
        """
        self._shards = find_shards(self._root, self._follow_links)
        try:
            with ThreadPoolExecutor(_INDEXING, thread_name_prefix="featx-index") as threads:
                self._indexes = list(
                    threads.map(lambda shard: index_of(shard, self._extensions), self._shards)
                )
        except OSError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"data.root={self._root} cannot be read: {error}.") from error
        skipped: Counter[str] = Counter()
        for shard, index in zip(self._shards, self._indexes, strict=True):
            skipped.update(index.skipped)
            if index.cut:
                skipped[f"shard that ends early ({printable(shard.name)}: {index.cut})"] += 1
            if index.refused:
                skipped[f"refused shard ({printable(shard.name)} {index.refused})"] += 1
        if not sum(len(index.names) for index in self._indexes):
            left_out = ", ".join(f"{n} {why}" for why, n in sorted(skipped.items()))
            raise DataError(
                f"no images in the {len(self._shards)} shards of {self._root}. "
                f"Left out: {left_out or 'nothing'}."
            )
        note = self._label_note()
        keys, (labels, classes, warnings) = self._index_rows()
        return Listing(
            keys,
            labels,
            classes,
            dict(skipped),
            self._positions[2],
            warnings=warnings,
            label_note="" if classes else note,
        )

    def read(self, key: bytes) -> bytes:
        """Read one member.

        Raises:
            ImageFault: the member is incomplete, empty or too large.
            OSError: the shard cannot be read, has changed since the listing, or returns too few
                bytes.
        """
        with self._lock:
            if not len(self._keys):
                self.listing()
        row = find_row(self._keys, key)
        number, offset, size = (int(column[row]) for column in self._positions)
        shard, index = self._shards[number], self._indexes[number]
        if size == CUT_SIZE:
            raise ImageFault(
                Status.TRUNCATED, f"the shard {shard.url} is not whole: {index.cut}", "CutOffError"
            )
        if size == TWICE_SIZE:
            raise ImageFault(
                Status.DECODE_ERROR, f"the shard {shard.url} has two members of this name"
            )
        if size == _REFUSED_SIZE:
            raise ImageFault(
                Status.DECODE_ERROR, f"the shard {shard.url} {index.refused}", "RefusedShardError"
            )
        if size == 0:
            raise ImageFault(Status.EMPTY, "the member has no bytes")
        if size > MAX_FILE_BYTES:
            raise ImageFault(Status.TOO_LARGE, f"{size} bytes, over {MAX_FILE_BYTES}")
        data = self._read_compressed(number, offset, size) if index.compressed else None
        data = shard.read(offset, size) if data is None else data
        if len(data) != size:
            raise OSError(errno.EIO, f"{len(data)} of {size} bytes came", shard.url)
        return data

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
        """Return the size of each member, its shard's mtime, and a tag of offset and shard version.

        Returns:
            (n,) IMAGE_STATE.
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

    def _read_compressed(self, number: int, offset: int, size: int) -> bytes:
        """Read a member of a compressed shard through its window.

        Raises:
            OSError: the shard cannot be read or decompressed.
        """
        shard = self._shards[number]
        with self._lock:
            # This lock protects the cache. Each window has its own lock, so threads read from
            # different shards at the same time.
            window = self._windows.pop(number, None)
            window = window or GzipWindow(shard.url, shard.read, shard.size)
            self._windows[number] = window
            if len(self._windows) > _OPEN_WINDOWS:
                self._windows.popitem(last=False)
        try:
            return window.read(offset, size)
        except DAMAGE as error:  # indexing has read past this point, so the shard has changed
            raise OSError(errno.EIO, f"the shard cannot be decompressed: {error}", shard.url) from (
                error
            )

    def _index_rows(self) -> tuple[npt.NDArray[np.bytes_], Labels]:
        """Combine the indexes of all shards, sorted bytewise by key.

        Positions stay in `_positions` (3, N): shard, offset and size of every row.

        Returns:
            keys (N,) and labels.
        """
        keys, positions, numbers = [], [], []
        for i, (shard, index) in enumerate(zip(self._shards, self._indexes, strict=True)):
            names, offsets, sizes, labels = index.names, index.offsets, index.sizes, index.labels
            if index.refused or (index.cut and not (len(sizes) and sizes[-1] == CUT_SIZE)):
                # The end cuts between two members: an extra row stands for what is missing, so that
                # the run reports it as a failure.
                extra = _REFUSED_NAME if index.refused else _MISSING_NAME
                names = np.append(names, np.array([extra]))
                offsets = np.append(offsets, 0)
                sizes = np.append(sizes, _REFUSED_SIZE if index.refused else CUT_SIZE)
                labels = np.append(labels, NO_LABEL)
            keys.append(np.char.add(np.bytes_(shard.name + b"/"), names))
            positions.append(np.stack([np.full(len(names), i), offsets, sizes]))
            numbers.append(labels)
            if index.compressed:
                _warn_of_order(shard, names)
        self._indexes = [_without_columns(index) for index in self._indexes]
        all_keys, all_positions, all_numbers = (
            np.concatenate(keys), np.concatenate(positions, axis=1), np.concatenate(numbers)
        )  # fmt: skip
        if not (all_keys[1:] > all_keys[:-1]).all():
            order = np.argsort(all_keys, kind="stable")
            all_keys, all_positions, all_numbers = (
                all_keys[order],
                all_positions[:, order],
                all_numbers[order],
            )
        self._keys, self._positions = all_keys, all_positions
        return all_keys, self._labels(all_numbers)

    def _labels(self, numbers: npt.NDArray[np.int64]) -> Labels:
        """Return labels from the .cls members, if any, else from the folders in member names."""
        if (numbers != NO_LABEL).any():
            origin = f"the .cls members of {self._root}"
            labels = from_numbers(numbers, origin, numbers == NO_LABEL)
            return labels._replace(warnings=(*labels.warnings, *self._unused_folders(numbers)))
        starts = [len(shard.name) + 1 for shard in self._shards]
        members = (
            bytes(key)[starts[i] :] for key, i in zip(self._keys, self._positions[0], strict=True)
        )
        return from_names(
            name_text(name.split(b"/", 1)[0]) if b"/" in name else "" for name in members
        )

    def _unused_folders(self, numbers: npt.NDArray[np.int64]) -> list[str]:
        """Return a warning if images without a .cls member lie in folders."""
        starts = [len(shard.name) + 1 for shard in self._shards]
        rows = np.flatnonzero(numbers == NO_LABEL).tolist()
        count = sum(b"/" in self._keys[row][starts[self._positions[0, row]] :] for row in rows)
        if not count:
            return []
        num_images = counted(count, "image lies", "images lie")
        return [
            f"{self._root}: {num_images} in a folder and has no .cls member, so no label: folders "
            "are labels only where no image has a .cls member"
        ]

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


def _without_columns(index: TarIndex) -> TarIndex:
    """Drop the columns of an index, which the listing contains now, to save memory."""
    none = np.empty(0, dtype=np.int64)
    return replace(index, names=index.names[:0], offsets=none, sizes=none, labels=none)


def _warn_of_order(shard: Shard, names: npt.NDArray[np.bytes_]) -> None:
    """Warn about a compressed shard whose members are not sorted by name, which is slow to read."""
    backwards = int((names[1:] < names[:-1]).sum())
    if backwards:
        logger.warning(
            "%s is compressed and its images are not in the order of their names: it will be "
            "decompressed again up to %d times. A plain tar, or sorted members, would be faster.",
            shard.url,
            backwards + 1,
        )


SOURCES.register(
    source_member(
        "webdataset",
        "Images in tar shards, on a disk or behind URLs.",
        WebDatasetOptions,
        open_source,
    )
)
