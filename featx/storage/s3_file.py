"""Read access to one object by ranges, as a file object for HDF5 and directly for rows.

HDF5 reads a few bytes at many places, so whole blocks are fetched and the last ones are cached.
Rows are read without HDF5, as on a disk: all ranges of a read are requested concurrently, and
ranges close to each other are merged.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.base import LruCache
from featx.errors import ObjectStoreError, StoreError
from featx.storage import s3_client
from featx.storage.durability import PositionedFile
from featx.storage.s3_path import S3Path

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 64 << 10
"""Size of the blocks that are fetched for reads of HDF5."""

_MAX_CACHED_BLOCKS = 32
"""Number of blocks that are cached per file."""

_GAP_BYTES = 64 << 10
"""Largest gap between two ranges that are merged: the latency of a request is worth about 2 MB."""

_RANGE_BYTES = 8 << 20
"""Ranges longer than this are split into concurrent requests."""

NUM_PREFETCHED_FILES = 2 * s3_client.CONNECTIONS
"""Number of files to prefetch beyond the current one; each takes at most 2 MiB."""


class S3File(PositionedFile):
    """Object as it was when it was opened; reads fail if it has been replaced since.

    Args:
        prefetched_blocks: numbers of blocks to fetch now, besides the first one, as far as the
            object has them.

    Attributes:
        mapped: always None, as for a RawFile that is not mapped.
        error: error of the last failed read, which HDF5 may replace by its own.
        used_blocks: numbers of the blocks that were read.

    Raises:
        FileNotFoundError: the object does not exist.
        OSError: the object cannot be read now.
    """

    mapped: Bytes | None = None

    def __init__(self, path: S3Path, prefetched_blocks: Iterable[int] = ()) -> None:
        super().__init__()
        self.error: OSError | None = None
        self._path = path
        self._lock = threading.Lock()
        self._blocks: LruCache[int, bytes] = LruCache(_MAX_CACHED_BLOCKS)
        try:
            head, self._metadata = s3_client.read(path.bucket, path.key, (0, BLOCK_BYTES))
            self._blocks.put(0, head)
        except s3_client.InvalidRangeError:
            self._metadata = path.metadata()
        self.size = self._metadata.size
        self.used_blocks: set[int] = set()
        for block in sorted(prefetched_blocks):
            if block and block * BLOCK_BYTES < self.size:
                self._fetch_blocks(block, block)

    @property
    def etag(self) -> str:
        """Entity tag of the object, which changes with its content."""
        return self._metadata.etag

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        try:
            data = self.pread(len(view), self._position)
        except OSError as error:
            self.error = error
            raise
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def pread(self, size: int, address: int) -> bytes:
        """Read bytes at an address, as far as the object goes."""
        stop = min(address + size, self.size)
        if address >= stop:
            return b""
        first, last = address // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        # A long read bypasses the cache, as it would push most other blocks out.
        if last - first >= _MAX_CACHED_BLOCKS // 2:
            whole = np.empty(stop - address, np.uint8)
            self.pread_into(whole, address, str(self._path))
            return whole.tobytes()
        numbers = range(first, last + 1)
        with self._lock:
            blocks = {i: block for i in numbers if (block := self._blocks.get(i)) is not None}
            if missing := [i for i in numbers if i not in blocks]:
                blocks |= self._fetch_blocks(missing[0], missing[-1])
            self.used_blocks.update(numbers)
        begin = address - first * BLOCK_BYTES
        return b"".join(blocks[i] for i in numbers)[begin : begin + stop - address]

    def _fetch_blocks(self, first: int, last: int) -> dict[int, bytes]:
        """Fetch blocks `first` to `last` by one request and put them into the cache."""
        start = first * BLOCK_BYTES
        data = self._fetch(start, min((last + 1) * BLOCK_BYTES, self.size))
        blocks = {i: data[i * BLOCK_BYTES - start :][:BLOCK_BYTES] for i in range(first, last + 1)}
        for i, block in blocks.items():
            self._blocks.put(i, block)
        return blocks

    def current_size(self) -> int:
        """Size of the object; it cannot change, as every request asks for the same entity tag."""
        return self.size

    def pread_into(self, buffer: Bytes, address: int, label: str) -> None:
        """Fill `buffer` with the bytes that start at `address`."""
        self.read_ranges_into([(buffer, address)], label)

    def read_ranges_into(self, ranges: Iterable[tuple[Bytes, int]], label: str) -> None:
        """Fill several buffers, (n,) uint8, each with the bytes that start at its address.

        The label is for messages. Raises StoreError if the object ends before the last byte, and
        OSError if it cannot be read now, or was replaced.
        """
        ranges = list(ranges)
        end = max((address + len(buffer) for buffer, address in ranges), default=0)
        if end > self.size:
            raise StoreError(f"{label}: the file ends before byte {end}")
        split = [
            (buffer[i : i + _RANGE_BYTES], address + i)
            for buffer, address in ranges
            for i in range(0, len(buffer), _RANGE_BYTES)
        ]
        split.sort(key=lambda piece: piece[1])
        groups: list[list[tuple[Bytes, int]]] = []
        stop = 0
        for buffer, address in split:
            is_near = groups and address - stop <= _GAP_BYTES
            if is_near and address + len(buffer) - groups[-1][0][1] <= _RANGE_BYTES:
                groups[-1].append((buffer, address))
            else:
                groups.append([(buffer, address)])
            stop = max(stop if is_near else 0, address + len(buffer))
        if len(groups) == 1:
            self._fill(groups[0])
        else:
            for _ in s3_client.threads(os.getpid()).map(self._fill, groups):
                pass

    def _fill(self, group: Sequence[tuple[Bytes, int]]) -> None:
        """Fill buffers that lie close together by one request."""
        start = group[0][1]
        stop = max(address + len(buffer) for buffer, address in group)
        data = np.frombuffer(self._fetch(start, stop), np.uint8)
        for buffer, address in group:
            buffer[:] = data[address - start : address - start + len(buffer)]

    def _fetch(self, start: int, stop: int) -> bytes:
        """Fetch the bytes [start, stop) of the object; its entity tag must be unchanged."""
        try:
            data, _ = s3_client.read(
                self._path.bucket, self._path.key, (start, stop), self._metadata.etag
            )
        except s3_client.PreconditionFailedError as error:
            text = "it was replaced while it was being read"
            raise ObjectStoreError(errno.ESTALE, text, str(self._path)) from error
        if len(data) != stop - start:
            text = f"{len(data)} of {stop - start} bytes came"
            raise ObjectStoreError(errno.EIO, text, str(self._path))
        return data


def prefetch_files(paths: Sequence[Path]) -> Iterator[Callable[[], S3File] | None]:
    """Prefetch files with the same layout, such as the parts of a run, in order.

    h5py lets only one thread at a time into HDF5, also while that thread waits for bytes. So
    upcoming objects are fetched concurrently here, each with the blocks that the previous one
    needed. Yields for each file a function that returns the open object or raises why it cannot be
    opened; None for files on a disk.
    """
    objects = [path for path in paths if isinstance(path, S3Path)]
    if len(objects) < len(paths):
        yield from itertools.repeat(None, len(paths))
        return
    opening: deque[Future[S3File]] = deque()
    used: set[int] = set()
    try:
        for number in range(len(objects)):
            # The first file shows which blocks to fetch.
            stop = number + (NUM_PREFETCHED_FILES if number else 1)
            for path in objects[number + len(opening) : stop]:
                opening.append(s3_client.threads(os.getpid()).submit(S3File, path, used))
            now = opening.popleft()
            yield now.result
            if now.exception() is None:
                used = now.result().used_blocks
    finally:
        for future in opening:
            future.cancel()
