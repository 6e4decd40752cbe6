"""Reader of tar headers that extracts nothing and reports where and why it stopped.

Python's tarfile stops silently at a damaged header, keeps every member in memory, and reads
extended headers of any size they claim, so a listing made with it could lose rows unnoticed.
Formats: POSIX ustar and pax, GNU, and v7.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

BLOCK = 512
"""Size of a tar block in bytes."""
_MAX_EXTENDED = 1 << 20
"""Maximum size of an extended header in bytes."""

_REGULAR = b"\0", b"0", b"7"
"""Type flags of regular files."""
_WITHOUT_DATA = b"1", b"2", b"3", b"4", b"5", b"6"
"""Type flags of members whose size field is not followed by data: links, devices, folders,
FIFOs."""
_ZEROS = bytes(BLOCK)
_MAX_SIZE = 1 << 60
"""Size limit of a member in bytes. No tar is larger, and offsets stay within 64 bits."""
_RECORD_LENGTH = re.compile(rb"(\d{1,7}) ")
"""Beginning of a pax record."""


class TarMember(NamedTuple):
    """One member of a tar file.

    Attributes:
        name: full name as stored.
        offset: position of its data in the decompressed tar, in bytes.
        size: length of its data in bytes.
        regular: whether it is a plain file, and not a link, device or sparse file.
    """

    name: bytes
    offset: int
    size: int
    regular: bool


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
    """Yield all members except folders in the order of the tar.

    Raises:
        CutOffError: after the last complete member, if the tar is damaged or truncated.
    """
    offset, name, size = 0, None, None
    while True:
        start = offset
        header = read(offset, BLOCK)
        if header == _ZEROS:
            _check_end(read, offset + BLOCK)
            return
        if len(header) < BLOCK:
            what = "without an end marker" if not header else "in the middle of a header"
            raise CutOffError(f"it ends at byte {offset + len(header)} {what}", offset)
        if not _sum_is_right(header):
            raise CutOffError(f"the header at byte {offset} is damaged", offset)
        kind = header[156:157]
        try:
            own_size = _number(header[124:136], offset)
        except CutOffError as error:
            if kind in _REGULAR:  # the member is named, so that it becomes the failed row
                error.cut = TarMember(name or _name(header), offset + BLOCK, 0, True)
            raise
        offset += BLOCK
        if kind in (b"L", b"K", b"x", b"X", b"g"):
            text = _read_extended(read, offset, own_size)
            offset += _round_to_blocks(own_size)
            if kind == b"L":
                name = text.split(b"\0", 1)[0]
            elif kind in (b"x", b"X"):
                records = _pax(text, start)
                name = records.get(b"path", name)
                size = int(records[b"size"]) if b"size" in records else size
                if any(key.startswith(b"GNU.sparse") for key in records):
                    kind = b"sparse"
            if kind != b"sparse":
                continue
            # In pax format a sparse file has an extended header, followed by its own header. It is
            # reported as not regular.
            header = read(offset, BLOCK)
            if len(header) < BLOCK or not _sum_is_right(header):
                raise CutOffError(f"the header at byte {offset} is damaged", offset)
            own_size = _number(header[124:136], offset)
            offset += BLOCK
        if kind == b"S":
            offset = _after_sparse_map(read, header, offset)
        length = own_size if size is None else size
        length = 0 if kind in _WITHOUT_DATA else length
        full = name if name is not None else _name(header)
        member = TarMember(full, offset, length, kind in _REGULAR)
        # The last byte of the data shows whether they are complete, without reading all of them.
        if length and len(read(offset + length - 1, 1)) < 1:
            raise CutOffError(f"it ends in the middle of {member.name!r}", start, member)
        if kind != b"5" and not full.endswith(b"/"):
            yield member
        offset += _round_to_blocks(length)
        name = size = None


def _check_end(read: Read, offset: int) -> None:
    """Check that only zeros follow the end marker.

    Raises:
        CutOffError: other data follow, such as a concatenated tar, whose members would be missed.
    """
    while block := read(offset, 1 << 16):
        if block.count(0) != len(block):
            raise CutOffError(f"it has bytes after its end marker at byte {offset}", offset)
        offset += len(block)


def _sum_is_right(header: bytes) -> bool:
    """Return whether the header checksum is correct; it counts its own field as spaces.

    Some old writers sum signed bytes, which is accepted as well.
    """
    try:
        stored = int(header[148:156].split(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return False
    unsigned = sum(header) - sum(header[148:156]) + 256
    if stored == unsigned:
        return True
    rest = header[:148] + header[156:]
    return stored == unsigned - 256 * sum(byte > 127 for byte in rest)


def _number(field: bytes, offset: int) -> int:
    """Parse a numeric field: octal digits, or a big-endian binary number if the first bit is set.

    Raises:
        CutOffError: the field is not a number.
    """
    try:
        if field[0] & 0x80:
            number = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:])
        else:
            number = int(field.split(b"\0")[0].strip() or b"0", 8)
    except ValueError as error:
        raise CutOffError(
            f"the header at byte {offset} has a size that is no number", offset
        ) from error
    if not 0 <= number <= _MAX_SIZE:
        raise CutOffError(f"the header at byte {offset} claims an impossible size", offset)
    return number


def _name(header: bytes) -> bytes:
    """Return the name of a member from the fields of its own header."""
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0]
    # Only POSIX headers have a prefix; the GNU format stores times in the same bytes.
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _read_extended(read: Read, offset: int, size: int) -> bytes:
    """Read the data of an extended header.

    Raises:
        CutOffError: it is too large or truncated.
    """
    if size > _MAX_EXTENDED:
        raise CutOffError(
            f"the header at byte {offset - BLOCK} claims a name of {size} bytes", offset
        )
    text = read(offset, size)
    if len(text) < size:
        raise CutOffError("it ends in the middle of a header", offset - BLOCK)
    return text


def _pax(text: bytes, offset: int) -> dict[bytes, bytes]:
    r"""Parse pax records 'length key=value\n', where the length includes the whole record.

    Raises:
        CutOffError: a record is malformed.
    """
    records = {}
    text = text.rstrip(b"\0")
    start = 0
    while start < len(text):
        match = _RECORD_LENGTH.match(text, start)
        stop = start + int(match[1]) if match else start
        if match is None or not match.end() < stop <= len(text):
            raise CutOffError(f"the extended header at byte {offset} is damaged", offset)
        key, equals, value = text[match.end() : stop].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise CutOffError(f"the extended header at byte {offset} is damaged", offset)
        records[key] = value[:-1]
        start = stop
    size = records.get(b"size", b"0")
    if not size.isdigit() or len(size) > len(str(_MAX_SIZE)) or int(size) > _MAX_SIZE:
        raise CutOffError(f"the extended header at byte {offset} claims an impossible size", offset)
    return records


def _after_sparse_map(read: Read, header: bytes, offset: int) -> int:
    """Return the offset of the data of an old GNU sparse file, behind its extension headers.

    Raises:
        CutOffError: the tar ends before.
    """
    more = header[482]
    while more:
        block = read(offset, BLOCK)
        if len(block) < BLOCK:
            raise CutOffError("it ends in the middle of a header", offset)
        more, offset = block[504], offset + BLOCK
    return offset


def _round_to_blocks(size: int) -> int:
    """Round a size in bytes up to whole tar blocks."""
    return -(-size // BLOCK) * BLOCK
