"""Members of a tar, and where and why it ends early.

tarfile parses the headers. Its TarFile is not used: it stops silently at a damaged header, keeps
every member in memory, and reads extended headers of any size.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

HEAD_BYTES = 65
"""Number of bytes of a member that are read with its header."""

_MAX_EXTENDED = 1 << 18
"""Maximum size of an extended header in bytes. Python before 3.11.10 parses them in quadratic time
(CVE-2024-6232)."""
_MAX_SIZE = 1 << 60
"""Size limit of a member in bytes. No tar is larger, and offsets stay within 64 bits."""
_DAMAGE = (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError)
"""Exceptions of tarfile for headers that are damaged."""


@dataclass
class TarMember:
    """One member of a tar file.

    Attributes:
        name: full name as stored.
        offset: position of its data in the decompressed tar, in bytes.
        size: length of its data in bytes.
        regular: whether it is a plain file, and not a link, device or sparse file.
        head: the first HEAD_BYTES of its data.
    """

    name: bytes
    offset: int
    size: int
    regular: bool
    head: bytes = b""


class CutOffError(Exception):
    """The tar ends before its end marker, or continues with something that is not a header.

    Attributes:
        offset: number of the first byte that belongs to no complete member.
        cut: the incomplete member, or None.
    """

    def __init__(self, message: str, offset: int, cut: TarMember | None = None) -> None:
        super().__init__(message)
        self.offset = offset
        self.cut = cut


Read = Callable[[int, int], bytes]
"""Function (offset, length) -> bytes, fewer than `length` only at the end. Offsets rise from call
to call."""


def members(read: Read) -> Iterator[TarMember]:
    """Yield all members except folders in the order of the tar."""
    file = _HeaderFile(read)
    # What TarInfo.fromtarfile uses of a TarFile.
    tar: Any = SimpleNamespace(
        fileobj=file, offset=0, pax_headers={}, tarinfo=_Header, encoding="utf-8",
        errors="surrogateescape",
    )  # fmt: skip
    while True:
        start = file.offset = tar.offset
        try:
            header = _Header.fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros
            _check_end(read, start + tarfile.BLOCKSIZE)
            return
        except _DAMAGE as error:
            text = f"the header at byte {start} is damaged"
            if file.has_ended:
                is_whole = file.offset == start
                where = "without an end marker" if is_whole else "in the middle of a header"
                text = f"it ends at byte {file.offset} {where}"
            raise CutOffError(text, start) from error
        name = header.name.encode("utf-8", "surrogateescape")
        regular = header.isreg() and not header.issparse()
        member = TarMember(name, header.offset_data, header.size, regular)
        # tarfile takes a size that it cannot parse as 0.
        claimed = header.pax_headers.get("size", "0") if regular else "0"
        if not (0 <= header.size <= _MAX_SIZE and claimed in ("0", str(header.size))):
            # The member is named, so that it becomes the failed row.
            text = f"the header at byte {start} claims an impossible size"
            raise CutOffError(text, start, member if regular else None)
        if regular and member.size:
            member.head = read(member.offset, min(member.size, HEAD_BYTES))
            # The last byte of the data shows whether they are complete, without reading all.
            if not read(member.offset + member.size - 1, 1):
                raise CutOffError(f"it ends in the middle of {name!r}", start, member)
        if not header.isdir() and not name.endswith(b"/"):
            yield member


class _HeaderFile:
    """The tar as a file from which tarfile reads headers.

    Attributes:
        offset: position of the next read.
        has_ended: whether a read came back short.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self.offset = 0
        self.has_ended = False

    def tell(self) -> int:
        return self.offset

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_EXTENDED:
            raise tarfile.ReadError(f"a header of {size} bytes")
        data = self._read(self.offset, size)
        self.offset += len(data)
        self.has_ended = len(data) < size
        return data


class _Header(tarfile.TarInfo):
    """One header."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        # Only POSIX headers have a prefix; the GNU format stores times in the same bytes, which
        # tarfile takes for one.
        if buf[257:263] != b"ustar\0":
            header.name = buf[:100].split(b"\0", 1)[0].decode("utf-8", errors)
        return header


def _check_end(read: Read, offset: int) -> None:
    """Raise CutOffError if data follow the end marker, as those of a concatenated tar."""
    while block := read(offset, 1 << 16):
        if block.count(0) != len(block):
            raise CutOffError(f"it has bytes after its end marker at byte {offset}", offset)
        offset += len(block)
