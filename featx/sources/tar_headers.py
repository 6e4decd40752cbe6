"""Members of a tar, and where and why it ends early.

tarfile parses single headers here. Its TarFile stops silently at a damaged header, keeps every
member in memory, and reads extended headers of any size. Before Python 3.11.10 it parses them in
quadratic time (CVE-2024-6232: 80 s for one of 256 KiB), so the records are
parsed here. Formats: POSIX ustar and pax, GNU, and v7.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HEAD_BYTES = 257
"""Number of bytes of a member that are read with its header."""

_BLOCK = tarfile.BLOCKSIZE
_ZEROS = bytes(_BLOCK)
_MAX_EXTENDED = 1 << 20
"""Maximum size of an extended header in bytes."""
_MAX_SIZE = 1 << 60
"""Size limit of a member in bytes. No tar is larger, and offsets stay within 64 bits."""
_WITHOUT_DATA = b"123456"
"""Types of members whose size field is not followed by data: links, devices, folders, FIFOs."""
_REGULAR = b"\x0007"
"""Types of regular files."""
_EXTENDED = b"LKxXg"
"""Types of headers that extend the next one: a long name or link, and pax records."""
_RECORD_LENGTH = re.compile(rb"(\d{1,7}) ")
"""Beginning of a pax record."""


@dataclass(frozen=True)
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
    offset = 0
    while True:
        start, name, size, is_sparse = offset, None, None, False
        while (header := _read_header(read, offset)) is not None and header.type in _EXTENDED:
            text = _read_extended(read, offset, header.size)
            if header.type == b"L":
                name = text.split(b"\0", 1)[0]
            elif header.type in b"xX":
                records = _pax_records(text, offset)
                name = records.get(b"path", name)
                size = int(records[b"size"]) if b"size" in records else size
                is_sparse |= any(key.startswith(b"GNU.sparse") for key in records)
            offset += _BLOCK + _whole_blocks(header.size)
        if header is None:
            _check_end(read, offset + _BLOCK)
            return
        name = header.raw_name if name is None else name
        size = header.size if size is None else size
        regular = header.type in _REGULAR and not is_sparse
        if not 0 <= size <= _MAX_SIZE:
            # The member is named, so that it becomes the failed row.
            cut = TarMember(name, offset + _BLOCK, 0, True) if regular else None
            raise CutOffError(f"the header at byte {offset} claims an impossible size", start, cut)
        offset += _BLOCK
        if header.type == b"S":
            offset = _after_sparse_map(read, header.has_map, offset)
        size = 0 if header.type in _WITHOUT_DATA else size
        head = read(offset, min(size, HEAD_BYTES))
        member = TarMember(name, offset, size, regular, head)
        # The last byte of the data shows whether they are complete, without reading all of them.
        if size and len(read(offset + size - 1, 1)) < 1:
            raise CutOffError(f"it ends in the middle of {name!r}", start, member)
        if header.type != b"5" and not name.endswith(b"/"):
            yield member
        offset += _whole_blocks(size)


class _Header(tarfile.TarInfo):
    raw_name: bytes
    has_map: int


def _read_header(read: Read, offset: int) -> _Header | None:
    """Read a header, or None for the end marker."""
    block = read(offset, _BLOCK)
    if block == _ZEROS:
        return None
    if len(block) < _BLOCK:
        what = "without an end marker" if not block else "in the middle of a header"
        raise CutOffError(f"it ends at byte {offset + len(block)} {what}", offset)
    try:
        header = _Header.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise CutOffError(f"the header at byte {offset} is damaged", offset) from error
    # Only POSIX headers have a prefix; the GNU format stores times in the same bytes, which tarfile
    # takes for one.
    name, prefix = (field.split(b"\0", 1)[0] for field in (block[:100], block[345:500]))
    header.raw_name = prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name
    header.has_map = block[482]
    return header


def _check_end(read: Read, offset: int) -> None:
    """Raise CutOffError if data follow the end marker, as those of a concatenated tar."""
    while block := read(offset, 1 << 16):
        if block.count(0) != len(block):
            raise CutOffError(f"it has bytes after its end marker at byte {offset}", offset)
        offset += len(block)


def _read_extended(read: Read, offset: int, size: int) -> bytes:
    """Read the data of the extended header at `offset`."""
    if not 0 <= size <= _MAX_EXTENDED:
        raise CutOffError(f"the header at byte {offset} claims a name of {size} bytes", offset)
    text = read(offset + _BLOCK, size)
    if len(text) < size:
        raise CutOffError("it ends in the middle of a header", offset)
    return text


def _pax_records(text: bytes, offset: int) -> dict[bytes, bytes]:
    r"""Parse pax records 'length key=value\n', where the length includes the whole record."""
    records = {}
    text = text.rstrip(b"\0")
    start = 0
    while start < len(text):
        match = _RECORD_LENGTH.match(text, start)
        stop = start + int(match[1]) if match else start
        content = text[match.end() : stop] if match else b""
        key, equals, value = content.partition(b"=")
        if not equals or not value.endswith(b"\n") or stop > len(text):
            raise CutOffError(f"the extended header at byte {offset} is damaged", offset)
        records[key] = value[:-1]
        start = stop
    size = records.get(b"size", b"0")
    if not size.isdigit() or len(size) > len(str(_MAX_SIZE)):
        raise CutOffError(f"the extended header at byte {offset} claims an impossible size", offset)
    return records


def _after_sparse_map(read: Read, more: int, offset: int) -> int:
    """Return the offset of the data of a sparse file of GNU, behind the blocks of its map."""
    while more:
        block = read(offset, _BLOCK)
        if len(block) < _BLOCK:
            raise CutOffError("it ends in the middle of a header", offset)
        more, offset = block[504], offset + _BLOCK
    return offset


def _whole_blocks(size: int) -> int:
    """Round a size in bytes up to whole tar blocks."""
    return -(-size // _BLOCK) * _BLOCK
