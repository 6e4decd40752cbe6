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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.base import cache_folder, name_text, printable
from featx.errors import DataError
from featx.sources import tar_headers
from featx.sources.base import SYSTEM_FOLDERS
from featx.sources.gzip_window import DAMAGE, ExpansionError, GzipWindow
from featx.sources.labels import looks_like_labels
from featx.sources.tar_headers import CutOffError, TarMember
from featx.sources.tar_shards import Shard

NO_LABEL = -2
"""Value in `TarIndex.labels` for an image without a .cls member."""

CUT_SIZE = -1
"""Value in `TarIndex.sizes` for an image that the end of the tar cuts off."""
TWICE_SIZE = -2
"""Value in `TarIndex.sizes` for a name that two members have."""

_VERSION = 3
"""Version of the format of index files."""
_BLOCK = 1 << 20
"""A read of a plain local tar covers `_BLOCK // _SKIP_FROM` bytes."""
_REMOTE_BLOCK = 8 << 20
"""Bytes that a request for a part of a remote shard covers."""
_FACTS = ("skipped", "cut", "compressed", "refused", "endings")
"""Attributes of an index that are no columns."""
_MAX_LABEL_BYTES = 64
_OTHER_NAMES = "other names"
_OUTPUT_WORDS = frozenset({"output", "outputs"})
"""Words before .cls that WebDataset's own examples use for labels."""
_MAX_ENDINGS = 1000
"""Number of different extensions of other members that are counted."""
_SKIP_FROM = 4
"""Divisor of `_BLOCK`: with reads this small, the data of large members are skipped, not read."""


@dataclass(frozen=True)
class TarIndex:
    """The images of one shard, in the order of the tar.

    Attributes:
        names: (n,) fixed-length bytes, unique.
        offsets: (n,) int64 position of the data in the decompressed tar, in bytes.
        sizes: (n,) int64 length of the data in bytes, CUT_SIZE or TWICE_SIZE.
        labels: (n,) int64 number in the .cls member; NO_LABEL without such a member.
        skipped: reason -> number of members that were left out.
        cut: reason why the tar ends early, or ''.
        compressed: whether the shard is compressed with gzip.
        refused: reason why none of its images can be used, or ''. There are none then.
        endings: extension -> number of the members with other names, for the most frequent ones.
    """

    names: npt.NDArray[np.bytes_]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    skipped: Mapping[str, int]
    cut: str = ""
    compressed: bool = False
    refused: str = ""
    endings: Mapping[str, int] = field(default_factory=dict)


class RefusedShardError(Exception):
    """A shard is no tar, or is damaged in a way that makes all of its images doubtful."""


def index_of(shard: Shard, endings: frozenset[bytes]) -> TarIndex:
    """Return the index of a shard in its current state, from the cache if possible.

    Args:
        shard: the shard.
        endings: file name extensions to list, in lower case with a leading dot.

    Raises:
        DataError: a .cls member holds no number of a class, or two of one name different numbers.
        OSError: the shard cannot be read at the moment.
    """
    state = json.dumps(
        [_VERSION, shard.url, shard.size, shard.version, sorted(map(name_text, endings))]
    )
    path = cache_folder("shards") / f"{hashlib.sha256(state.encode()).hexdigest()}.index"
    # Without a version (no ETag, no mtime) a cached index could belong to an older shard.
    if shard.version and (cached := _load(path, state)) is not None:
        return cached
    try:
        index = build(shard, endings)
    except RefusedShardError as error:
        none = np.empty(0, dtype=np.int64)
        index = TarIndex(np.empty(0, dtype="S1"), none, none, none, {}, refused=str(error))
    if shard.version:
        _save(path, state, index)
    return index


def build(shard: Shard, endings: frozenset[bytes]) -> TarIndex:
    """Build the index of a shard by reading all its headers; see `index_of`.

    Raises:
        RefusedShardError: the shard is not a tar, or all of its images are doubtful.
    """
    compressed = _is_gzip(shard)
    skipped: Counter[str] = Counter()
    other_endings: Counter[str] = Counter()
    images: list[TarMember] = []
    classes: dict[bytes, int] = {}
    cut = ""
    blocks = GzipWindow(shard.url, shard.read, shard.size) if compressed else _Blocks(shard)
    try:
        for member in tar_headers.members(blocks.read):
            name = _clean(member.name)
            reason = _reason_to_skip(name, member, endings)
            if reason == _OTHER_NAMES and name.lower().endswith(b".cls"):
                number = _class(shard, name, blocks.read(member.offset, member.size))
                if classes.setdefault(name[:-4], number) != number:
                    raise DataError(
                        f"{shard.url} has two members {printable(name)}, which hold "
                        f"{classes[name[:-4]]} and {number}; expected one label."
                    )
            elif reason:
                skipped[reason] += 1
                if reason == _OTHER_NAMES and len(other_endings) < _MAX_ENDINGS:
                    other_endings[os.path.splitext(printable(name))[1].lower()] += 1  # noqa: PTH122
            else:
                images.append(member._replace(name=name))
    except CutOffError as error:
        cut = str(error)
        if error.offset == 0 and not error.cut:
            raise RefusedShardError(f"is no tar: {error}") from error
        if error.cut and not _reason_to_skip(_clean(error.cut.name), error.cut, endings):
            images.append(error.cut._replace(name=_clean(error.cut.name), size=-1))
    except DAMAGE as error:
        cut = f"its compressed bytes are damaged or end early ({error})"
        # A wrong CRC or length at the end of the stream may concern any byte before it, while an
        # early end leaves the complete members intact.
        if not images or any(text in str(error) for text in ("CRC", "Incorrect length")):
            raise RefusedShardError(
                f"is damaged: {error}. None of its images can be trusted; get the shard again"
            ) from error
    except ExpansionError as error:
        raise RefusedShardError(str(error)) from error
    by_name: dict[bytes, TarMember] = {}
    for member in images:
        is_known = member.name in by_name
        by_name[member.name] = member._replace(size=TWICE_SIZE) if is_known else member
    images = list(by_name.values())
    names = [member.name for member in images]
    labels = _labels(names, classes, skipped)
    return TarIndex(
        names=np.array(names, dtype=np.bytes_ if names else "S1"),
        offsets=np.array([member.offset for member in images], dtype=np.int64),
        sizes=np.array([member.size for member in images], dtype=np.int64),
        labels=np.array(labels, dtype=np.int64),
        skipped=dict(skipped),
        cut=cut,
        compressed=compressed,
        endings=dict(other_endings.most_common(3)),
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
        RefusedShardError: it is empty, or compressed with something else.
    """
    head = shard.read(0, 6)
    if not head:
        raise RefusedShardError("is empty; expected a tar")
    for start, kind in ((b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")):
        if head.startswith(start):
            raise RefusedShardError(f"is compressed with {kind}; tars may be plain or gzip")
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
    if any(part.lower() in SYSTEM_FOLDERS for part in name.split(b"/")[:-1]):
        return "in folders of the system, such as @eaDir"
    base, dot, ending = name.rpartition(b".")
    if not dot or not base or base.endswith(b"/") or b"." + ending.lower() not in endings:
        return _OTHER_NAMES
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
        f"{shard.url}: {printable(name)} holds {data[:_MAX_LABEL_BYTES]!r}; expected the number "
        "of a class."
    )


def _labels(names: list[bytes], classes: Mapping[bytes, int], skipped: Counter[str]) -> list[int]:
    """Return the number of the .cls member of each image, or NO_LABEL.

    The .cls member of an image has the same name up to the last dot or, as in WebDataset, its key,
    which is the name up to the first dot of the file name. Without these, KEY.output.cls or
    another name between key and .cls that says label is taken, if the key has only one of them.

    Args:
        names: names of the images.
        classes: name of each .cls member without .cls -> its number.
        skipped: gets the counts of .cls members that no image uses.
    """
    named: dict[bytes, list[bytes]] = {}
    for base in classes:
        key = _sample_key(base)
        word = name_text(base[len(key) + 1 :])
        if word in _OUTPUT_WORDS or looks_like_labels(word):
            named.setdefault(key, []).append(base)
    used, ambiguous, labels = set(), set(), []
    for name in names:
        base, key = name.rpartition(b".")[0], _sample_key(name)
        others = named.get(key, [])
        found = next((b for b in (base, key) if b in classes), None)
        if found is None and len(others) == 1:
            found = others[0]
        elif found is None:
            ambiguous.update(others)
        labels.append(NO_LABEL if found is None else classes[found])
        used.add(found)
    unused = classes.keys() - used - ambiguous
    for bases, reason in (
        (unused, ".cls of no image"),
        (ambiguous, "several .cls of one image, none of them KEY.cls"),
    ):
        if bases:
            skipped[reason] += len(bases)
    return labels


def _sample_key(name: bytes) -> bytes:
    """Return the key of a sample in WebDataset: the name up to the first dot of the file name."""
    folder, slash, file = name.rpartition(b"/")
    return folder + slash + file.split(b".", 1)[0]


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
    return TarIndex(names, offsets, sizes, labels, **header["facts"])


def _save(path: Path, state: str, index: TarIndex) -> None:
    """Write an index file and ignore errors: without it, the next run reads the headers again."""
    header = {
        "state": state,
        "count": len(index.names),
        "width": index.names.dtype.itemsize,
        "facts": {name: getattr(index, name) for name in _FACTS},
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
