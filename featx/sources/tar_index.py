"""Positions of the images in a tar shard, found by reading its headers once and cached on disk.

Index files lie in $XDG_CACHE_HOME/featx/shards (~/.cache/featx/shards), one per shard, named by a
hash of the shard's URL, size and version. A damaged or outdated file is replaced; all of them may
be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.base import cache_folder
from featx.errors import DataError
from featx.sources import tar_headers
from featx.sources.gzip_window import DAMAGE, GzipWindow
from featx.sources.tar_headers import CutOffError, TarMember
from featx.sources.tar_shards import Shard

NO_LABEL = -2
"""Value in `TarIndex.labels` for an image without a .cls member."""

_VERSION = 1
"""Version of the format of index files."""
_BLOCK = 1 << 20
"""A read of a plain local tar covers `_BLOCK // _SKIP_FROM` bytes."""
_REMOTE_BLOCK = 8 << 20
"""Bytes that a request for a part of a remote shard covers."""
_MAX_LABEL_BYTES = 64
_SKIP_FROM = 4
"""Divisor of `_BLOCK`: with reads this small, the data of large members are skipped, not read."""


@dataclass(frozen=True)
class TarIndex:
    """The images of one shard, in the order of the tar.

    Attributes:
        names: (n,) fixed-length bytes, unique.
        offsets: (n,) int64 position of the data in the decompressed tar, in bytes.
        sizes: (n,) int64 length of the data in bytes; -1 for an image that the end of the tar cuts
            off.
        labels: (n,) int64 number in the member <base>.cls; NO_LABEL without such a member.
        skipped: reason -> number of members that were left out.
        cut: reason why the tar ends early, or ''.
        compressed: whether the shard is compressed with gzip.
    """

    names: npt.NDArray[np.bytes_]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    skipped: Mapping[str, int]
    cut: str
    compressed: bool


def index_of(shard: Shard, endings: frozenset[bytes]) -> TarIndex:
    """Return the index of a shard in its current state, from the cache if possible.

    Args:
        shard: the shard.
        endings: file name extensions to list, in lower case with a leading dot.

    Raises:
        DataError: the shard is not a tar, or is damaged in a way that makes all images doubtful.
        OSError: the shard cannot be read at the moment.
    """
    state = json.dumps(
        [_VERSION, shard.url, shard.size, shard.version, sorted(map(os.fsdecode, endings))]
    )
    path = cache_folder("shards") / f"{hashlib.sha256(state.encode()).hexdigest()}.index"
    # Without a version (no ETag, no mtime) a cached index could belong to an older shard.
    if shard.version and (cached := _load(path, state)) is not None:
        return cached
    index = build(shard, endings)
    if shard.version:
        _save(path, state, index)
    return index


def build(shard: Shard, endings: frozenset[bytes]) -> TarIndex:
    """Build the index of a shard by reading all its headers; see `index_of`."""
    compressed = _is_gzip(shard)
    skipped: Counter[str] = Counter()
    images: list[TarMember] = []
    classes: dict[bytes, int] = {}
    cut = ""
    blocks = GzipWindow(shard.url, shard.read, shard.size) if compressed else _Blocks(shard)
    try:
        for member in tar_headers.members(blocks.read):
            name = _clean(member.name)
            if name.lower().endswith(b".cls") and member.regular:
                classes[name[:-4]] = _class(shard, name, blocks.read(member.offset, member.size))
            elif reason := _reason_to_skip(name, member, endings):
                skipped[reason] += 1
            else:
                images.append(member._replace(name=name))
    except CutOffError as error:
        cut = str(error)
        if error.offset == 0 and not error.cut:
            raise DataError(f"{shard.url} is no tar: {error}.") from error
        if error.cut and not _reason_to_skip(_clean(error.cut.name), error.cut, endings):
            images.append(error.cut._replace(name=_clean(error.cut.name), size=-1))
    except DAMAGE as error:
        cut = f"its compressed bytes are damaged or end early ({error})"
        # A wrong CRC or length at the end of the stream may concern any byte before it, while an
        # early end leaves the complete members intact.
        if not images or any(text in str(error) for text in ("CRC", "Incorrect length")):
            raise DataError(
                f"{shard.url} is damaged: {error}. None of its images can be trusted; get the "
                "shard again."
            ) from error
    names = [member.name for member in images]
    if len(set(names)) < len(names):
        duplicate = Counter(names).most_common(1)[0][0]
        raise DataError(f"{shard.url} has two members named {os.fsdecode(duplicate)}.")
    return TarIndex(
        names=np.array(names, dtype=np.bytes_ if names else "S1"),
        offsets=np.array([member.offset for member in images], dtype=np.int64),
        sizes=np.array([member.size for member in images], dtype=np.int64),
        labels=np.array([_label(name, classes) for name in names], dtype=np.int64),
        skipped=dict(skipped),
        cut=cut,
        compressed=compressed,
    )


class _Blocks:
    """Buffered reads of a plain tar at rising offsets, which skip what is not requested."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._size = _REMOTE_BLOCK if "://" in shard.url else _BLOCK // _SKIP_FROM
        self._start, self._data = 0, b""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`, fewer only at the end of the shard."""
        end = self._start + len(self._data)
        if not self._start <= offset <= offset + length <= end:
            wanted = max(length, self._size)
            self._start, self._data = offset, self._shard.read(offset, wanted)
        start = offset - self._start
        return self._data[start : start + length]


def _is_gzip(shard: Shard) -> bool:
    """Return whether a shard is compressed with gzip.

    Raises:
        DataError: it is empty, or compressed with something else.
    """
    head = shard.read(0, 6)
    if not head:
        raise DataError(f"{shard.url} is empty; expected a tar.")
    for start, kind in ((b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")):
        if head.startswith(start):
            raise DataError(f"{shard.url} is compressed with {kind}; tars may be plain or gzip.")
    return head.startswith(b"\x1f\x8b")


def _clean(name: bytes) -> bytes:
    """Normalise a member name: './a//b.jpg', as `tar -cf x.tar .` writes it, becomes 'a/b.jpg'."""
    return b"/".join(part for part in name.split(b"/") if part not in (b"", b"."))


def _reason_to_skip(name: bytes, member: TarMember, endings: frozenset[bytes]) -> str | None:
    """Return the reason why a member is not an image, or None if it is one."""
    if not member.regular:
        return "no regular files"
    if any(part.startswith(b".") for part in name.split(b"/")):
        return "hidden"
    base, dot, ending = name.rpartition(b".")
    if not dot or not base or base.endswith(b"/") or b"." + ending.lower() not in endings:
        return "other names"
    return None


def _class(shard: Shard, name: bytes, data: bytes) -> int:
    """Parse the class number in a .cls member.

    Raises:
        DataError: the member holds something else.
    """
    try:
        number = int(data[:_MAX_LABEL_BYTES])
        if number >= -1 and len(data) <= _MAX_LABEL_BYTES:
            return number
    except ValueError:
        pass
    raise DataError(
        f"{shard.url}: {os.fsdecode(name)} holds {data[:_MAX_LABEL_BYTES]!r}; expected the number "
        "of a class."
    )


def _label(name: bytes, classes: Mapping[bytes, int]) -> int:
    """Return the number of the .cls member with the same base name, or NO_LABEL.

    The base is the name up to its last dot or, as in WebDataset, up to the first dot of the file
    name.
    """
    folder, slash, file = name.rpartition(b"/")
    short = folder + slash + file.split(b".", 1)[0]
    return classes.get(name.rpartition(b".")[0], classes.get(short, NO_LABEL))


def _load(path: Path, state: str) -> TarIndex | None:
    """Read a cached index file.

    Returns:
        the index, or None if the file is missing, damaged, or describes another state of the shard.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return None
    # The file begins with the SHA-256 of the rest, so a damaged or partly written file is detected.
    digest, body = data[:32], memoryview(data)[32:]
    if hashlib.sha256(body).digest() != digest:
        return None
    head = bytes(body[: 1 << 20]).partition(b"\n")[0]
    header = json.loads(head)
    if header["state"] != state:
        return None
    count, width = header["count"], header["width"]
    offset = len(head) + 1
    names = np.frombuffer(body, f"S{width}", count, offset)
    numbers = np.frombuffer(body, "<i8", 3 * count, offset + names.nbytes).reshape(3, count)
    offsets, sizes, labels = numbers
    return TarIndex(
        names, offsets, sizes, labels, header["skipped"], header["cut"], header["compressed"]
    )


def _save(path: Path, state: str, index: TarIndex) -> None:
    """Write an index file and ignore errors: without it, the next run reads the headers again."""
    header = {
        "state": state,
        "count": len(index.names),
        "width": index.names.dtype.itemsize,
        "skipped": dict(index.skipped),
        "cut": index.cut,
        "compressed": index.compressed,
    }
    columns = (index.names, *(c.astype("<i8") for c in (index.offsets, index.sizes, index.labels)))
    body = json.dumps(header).encode() + b"\n" + b"".join(column.tobytes() for column in columns)
    # No fsync: after a power failure the checksum identifies an incomplete file.
    with contextlib.suppress(OSError), _replacement(path) as file:
        os.write(file, hashlib.sha256(body).digest())
        with open(file, "wb", closefd=False) as stream:
            stream.write(body)


@contextlib.contextmanager
def _replacement(path: Path) -> Iterator[int]:
    """Open a temporary file that replaces `path` atomically if the block succeeds."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        yield descriptor
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
