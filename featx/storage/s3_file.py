"""One object of an object store, read by ranges: as a file for HDF5, and past it.

HDF5 wants a few bytes here and there, so whole blocks are fetched and the last ones kept. Rows are
read past HDF5, as on a disk: all ranges of a read are under way at once, and those that lie close
together are one.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.errors import ObjectStoreError, StoreError
from featx.storage import s3_client
from featx.storage.s3_path import S3Path

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 64 << 10
"""What HDF5 asks for is fetched in blocks of this size."""

_KEPT_BLOCKS = 32
_GAP_BYTES = 64 << 10
"""Ranges with no more than this between them are one: a request takes as long as 2 MB of it."""

_RANGE_BYTES = 8 << 20
"""Longer ranges are several requests, side by side."""

_FILES_AHEAD = 2 * s3_client.CONNECTIONS
"""So many files are fetched ahead of the one that is looked at, at most 2 MiB of each."""


class S3File(io.RawIOBase):
    """An object as it was when it was opened; one that was replaced since is refused.

    Args:
        path: of the object.
        ahead: blocks that are fetched now, beside the first one, where the object has them.

    Attributes:
        size: in bytes.
        mapped: nothing, as of a RawFile that is not mapped.
        error: why the last read failed, which HDF5 may forget.
        used: blocks that were asked for.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read now.
    """

    mapped: Bytes | None = None

    def __init__(self, path: S3Path, ahead: Iterable[int] = ()) -> None:
        super().__init__()
        self.error: OSError | None = None
        self._path = path
        self._position = 0
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        try:
            self._blocks[0], self._entry = s3_client.read(path.bucket, path.key, (0, BLOCK_BYTES))
        except s3_client.EmptyError:
            self._entry = path.entry()
        self.size = self._entry.size
        self.used: set[int] = set()
        for block in sorted(ahead):
            if block and block * BLOCK_BYTES < self.size:
                self._keep(block, block)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

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
        """The bytes from an address on, as far as the object goes."""
        stop = min(address + size, self.size)
        if address >= stop:
            return b""
        first, last = address // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if last - first >= _KEPT_BLOCKS // 2:
            whole = np.empty(stop - address, np.uint8)
            self.read_into(whole, address, str(self._path))
            return whole.tobytes()
        with self._lock:
            lacking = [i for i in range(first, last + 1) if i not in self._blocks]
            if lacking:
                self._keep(lacking[0], lacking[-1])
            self.used.update(range(first, last + 1))
            for i in range(first, last + 1):
                self._blocks.move_to_end(i)
            found = b"".join(self._blocks[i] for i in range(first, last + 1))
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        begin = address - first * BLOCK_BYTES
        return found[begin : begin + stop - address]

    def _keep(self, first: int, last: int) -> None:
        """Fetch these blocks, all between them too."""
        start = first * BLOCK_BYTES
        data = self._fetch(start, min((last + 1) * BLOCK_BYTES, self.size))
        for i in range(first, last + 1):
            at = i * BLOCK_BYTES - start
            self._blocks[i] = data[at : at + BLOCK_BYTES]

    def size_now(self) -> int:
        """Of the object that was opened: every request asks for that one."""
        return self.size

    def read_into(self, target: Bytes, at: int, label: str) -> None:
        """Fill `target` with the bytes from `at` on."""
        self.read_pieces([(target, at)], label)

    pread_into = read_into

    def read_pieces(self, pieces: Iterable[tuple[Bytes, int]], label: str) -> None:
        """Fill each target with the bytes from its place on.

        Args:
            pieces: (target, first byte), in any order.
            label: of what is read, for messages.

        Raises:
            StoreError: the object ends before that.
            OSError: it cannot be read now, or was replaced.
        """
        pieces = list(pieces)
        over = max((at + len(target) for target, at in pieces), default=0)
        if over > self.size:
            raise StoreError(f"{label}: the file ends before byte {over}")
        whole = [
            (target[i : i + _RANGE_BYTES], at + i)
            for target, at in pieces
            for i in range(0, len(target), _RANGE_BYTES)
        ]
        whole.sort(key=lambda piece: piece[1])
        groups: list[list[tuple[Bytes, int]]] = []
        stop = 0
        for target, at in whole:
            near = groups and at - stop <= _GAP_BYTES
            if near and at + len(target) - groups[-1][0][1] <= _RANGE_BYTES:
                groups[-1].append((target, at))
            else:
                groups.append([(target, at)])
            stop = max(stop if near else 0, at + len(target))
        if len(groups) == 1:
            self._fill(groups[0])
        else:
            for _ in s3_client.threads(os.getpid()).map(self._fill, groups):
                pass

    def _fill(self, group: Sequence[tuple[Bytes, int]]) -> None:
        """Targets that lie close together, by one request."""
        start = group[0][1]
        stop = max(at + len(target) for target, at in group)
        data = np.frombuffer(self._fetch(start, stop), np.uint8)
        for target, at in group:
            target[:] = data[at - start : at - start + len(target)]

    def _fetch(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of the object as it was when it was opened."""
        try:
            data, _ = s3_client.read(
                self._path.bucket, self._path.key, (start, stop), self._entry.etag
            )
        except s3_client.TakenError as error:
            text = "it was replaced while it was being read"
            raise ObjectStoreError(errno.ESTALE, text, str(self._path)) from error
        if len(data) != stop - start:
            text = f"{len(data)} of {stop - start} bytes came"
            raise ObjectStoreError(errno.EIO, text, str(self._path))
        return data


def fetched_ahead(paths: Sequence[Path]) -> Iterator[Callable[[], S3File] | None]:
    """What opens each of some files that are laid out alike, such as the parts of a run.

    h5py lets one thread into HDF5, also while that waits for bytes. So the objects that come next
    are fetched here, side by side, each with the blocks that the one before it was asked for.

    Yields:
        gives the object, or raises why it cannot be opened; None for a file on a disk.
    """
    objects = [path for path in paths if isinstance(path, S3Path)]
    if len(objects) < len(paths):
        yield from itertools.repeat(None, len(paths))
        return
    begun: deque[Future[S3File]] = deque()
    used: set[int] = set()
    try:
        for number in range(len(objects)):
            most = number + (_FILES_AHEAD if number else 1)  # the first one shows which blocks
            for path in objects[number + len(begun) : most]:
                begun.append(s3_client.threads(os.getpid()).submit(S3File, path, used))
            now = begun.popleft()
            yield now.result
            if now.exception() is None:
                used = now.result().used
    finally:
        for future in begun:
            future.cancel()
