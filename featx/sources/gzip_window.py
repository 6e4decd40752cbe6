"""Offset-based reads from a gzip file in nearly rising order, with a window of recent output."""

from __future__ import annotations

import gzip
import io
import threading
import zlib
from collections import deque
from collections.abc import Callable

WINDOW_BYTES = 32 << 20
"""Decompressed bytes that are kept behind the read position. Reader threads are a few images apart,
so this holds more than a few images for each of them."""

_BLOCK = 1 << 20
"""Bytes that are decompressed at a time."""
_REMOTE_BLOCK = 4 << 20
"""Compressed bytes that are read at a time."""

MAX_EXPANSION = 200
"""Limit of decompressed bytes as a multiple of the compressed size, against decompression bombs."""
_FREE = 256 << 20
"""Decompressed bytes that any file may expand to, whatever its compressed size."""

DAMAGE = (zlib.error, gzip.BadGzipFile, EOFError)
"""Exceptions that a damaged or truncated gzip file raises."""


class ExpansionError(Exception):
    """A gzip file expands beyond the limit."""


class GzipWindow:
    """Decompressed bytes of a gzip file, addressed by offset.

    Reads at or behind the current position are cheap within the window; an offset before the window
    decompresses the file again from its beginning. Threads may share an instance: a lock serialises
    their reads.

    Args:
        name: name of the file for error messages.
        read: function (offset, length) -> compressed bytes.
        size: compressed size in bytes.

    Attributes:
        opened: how often decompression started at the beginning.
    """

    def __init__(self, name: str, read: Callable[[int, int], bytes], size: int) -> None:
        self._name = name
        self._raw_read = read
        self._raw_size = size
        self._most = max(_FREE, MAX_EXPANSION * size)
        self._lock = threading.Lock()
        self.opened = 0
        """Number of times that decompression started at the beginning."""
        self._damage: Exception | None = None
        self._begin()

    def read(self, offset: int, length: int) -> bytes:
        """Return decompressed bytes, fewer than `length` only at the end of the data.

        Raises:
            zlib.error, gzip.BadGzipFile, EOFError: the file is damaged or truncated before these
                bytes.
            ExpansionError: the file expands beyond the limit.
            OSError: the file cannot be read at the moment.
        """
        with self._lock:
            try:
                return self._advance(offset, length)
            except BaseException:
                self._begin()  # partly decompressed data are discarded
                raise

    def _advance(self, offset: int, length: int) -> bytes:
        """Decompress to the end of the requested bytes and return them; the caller has the lock."""
        if offset < self._start:
            self._begin()
        while self._end < offset + length:
            block = self._next_block()
            if not block:
                break
            self._end += len(block)
            if self._end > self._most:
                raise ExpansionError(
                    f"has {self._raw_size} compressed bytes, which expand to more than {self._most}"
                )
            self._blocks.append(block)
            # The requested bytes are kept even if they exceed the window.
            self._drop_before(min(offset, self._end - WINDOW_BYTES))
        return self._copy(offset, length)

    def _next_block(self) -> bytes:
        """Decompress about _BLOCK bytes.

        Returns:
            the bytes, empty at the end. Bytes before damaged data are returned; the next call
            raises.
        """
        chunks: list[bytes] = []
        size = 0
        while size < _BLOCK and self._damage is None:
            try:
                chunk = self._file.read1(_BLOCK)
            except DAMAGE as error:
                self._damage = error
                break
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
        if not chunks and self._damage is not None:
            raise self._damage
        return b"".join(chunks)

    def _begin(self) -> None:
        """Start decompression at the beginning of the file."""
        self.opened += 1
        raw = io.BufferedReader(_Raw(self._raw_read, self._raw_size), _REMOTE_BLOCK)
        self._file = gzip.GzipFile(fileobj=raw, mode="rb")
        self._blocks: deque[bytes] = deque()
        self._start = self._end = 0
        self._damage = None

    def _drop_before(self, offset: int) -> None:
        """Drop blocks that end at or before an offset."""
        while self._blocks and self._start + len(self._blocks[0]) <= offset:
            self._start += len(self._blocks.popleft())

    def _copy(self, offset: int, length: int) -> bytes:
        """Copy bytes out of the window."""
        slices, start = [], self._start
        for block in self._blocks:
            overlap = block[max(0, offset - start) : max(0, offset + length - start)]
            if overlap:
                slices.append(overlap)
            start += len(block)
            if start >= offset + length:
                break
        return b"".join(slices)


class _Raw(io.RawIOBase):
    """Sequential stream over a function that reads by offset, as `gzip` needs it."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size, self._offset = read, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._read(self._offset, min(len(buffer), self._size - self._offset))
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)
