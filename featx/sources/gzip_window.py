"""Reading a gzip file in nearly rising order: forwards, with a little of what was passed kept."""

from __future__ import annotations

import gzip
import io
import threading
import zlib
from collections import deque
from collections.abc import Callable

from featx.errors import DataError

WINDOW_BYTES = 32 << 20
"""Kept behind the position, for readers that run side by side: more than a few images each."""

_BLOCK = 1 << 20
_REMOTE_BLOCK = 4 << 20

MAX_EXPANSION = 200
_FREE = 256 << 20
"""A shard may expand so many times, and to so many bytes whatever its size."""

DAMAGE = (zlib.error, gzip.BadGzipFile, EOFError)
"""What a compressed file raises that is damaged or cut off."""


class GzipWindow:
    """The decompressed bytes of a gzip file by offset; threads take turns.

    An offset before the window opens the file anew, which costs all the bytes before it.

    Args:
        name: for messages.
        read: (offset, length) -> bytes of the compressed file.
        size: of the compressed file.
    """

    def __init__(self, name: str, read: Callable[[int, int], bytes], size: int) -> None:
        self._name = name
        self._raw_read = read
        self._raw_size = size
        self._most = max(_FREE, MAX_EXPANSION * size)
        self._lock = threading.Lock()
        self.opened = 0
        """How often the file was begun."""
        self._damage: Exception | None = None
        self._begin()

    def read(self, offset: int, length: int) -> bytes:
        """The bytes there, fewer only at the end.

        Raises:
            zlib.error, gzip.BadGzipFile, EOFError: the file is damaged or cut off before them.
            DataError: it expands to far more than images do.
            OSError: the shard cannot be read now.
        """
        with self._lock:
            try:
                return self._advance(offset, length)
            except BaseException:
                self._begin()  # what was decompressed halfway is of no use
                raise

    def _advance(self, offset: int, length: int) -> bytes:
        if offset < self._start:
            self._begin()
        while self._end < offset + length:
            block = self._next_block()
            if not block:
                break
            self._end += len(block)
            if self._end > self._most:
                raise DataError(
                    f"{self._name}: {self._raw_size} compressed bytes expand to more than "
                    f"{self._most}; refused."
                )
            self._blocks.append(block)
            self._drop_before(min(offset, self._end - WINDOW_BYTES))
        return self._kept(offset, length)

    def _next_block(self) -> bytes:
        """About _BLOCK bytes; all that can be had before damage, which is raised by the next."""
        pieces: list[bytes] = []
        size = 0
        while size < _BLOCK and self._damage is None:
            try:
                piece = self._file.read1(_BLOCK)
            except DAMAGE as error:
                self._damage = error
                break
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
        if not pieces and self._damage is not None:
            raise self._damage
        return b"".join(pieces)

    def _begin(self) -> None:
        self.opened += 1
        raw = io.BufferedReader(_Raw(self._raw_read, self._raw_size), _REMOTE_BLOCK)
        self._file = gzip.GzipFile(fileobj=raw, mode="rb")
        self._blocks: deque[bytes] = deque()
        self._start = self._end = 0
        self._damage = None

    def _drop_before(self, offset: int) -> None:
        while self._blocks and self._start + len(self._blocks[0]) <= offset:
            self._start += len(self._blocks.popleft())

    def _kept(self, offset: int, length: int) -> bytes:
        pieces, at = [], self._start
        for block in self._blocks:
            piece = block[max(0, offset - at) : max(0, offset + length - at)]
            if piece:
                pieces.append(piece)
            at += len(block)
            if at >= offset + length:
                break
        return b"".join(pieces)


class _Raw(io.RawIOBase):
    """A file that is read by offset, as a stream."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size, self._at = read, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._read(self._at, min(len(buffer), self._size - self._at))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
