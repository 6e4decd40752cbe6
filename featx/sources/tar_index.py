"""Positions of the images in a tar shard, found by reading its headers once and cached on disk.

Index files lie in $XDG_CACHE_HOME/featx/shards (~/.cache/featx/shards), one per shard, named by a
hash of the shard's URL, size and version. A damaged or outdated file is replaced; all of them may
be deleted at any time.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.base import cache_folder, name_text, printable
from featx.errors import DataError
from featx.sources import tar_headers
from featx.sources.base import SYSTEM_FOLDERS
from featx.sources.labels import looks_like_labels
from featx.sources.tar_headers import HEAD_BYTES, CutOffError, Read, TarMember
from featx.sources.tar_shards import CompressedFile, Shard

NO_LABEL = -2
"""Label of an image without a .cls member."""

FIRST_NAME = -3
"""Label of an image whose .cls member holds the first of `TarIndex.class_names`; the next is -4."""

CUT_SIZE, TWICE_SIZE, REFUSED_SIZE = -1, -2, -3
"""Sizes of rows that fail: an image that the end of the tar cuts off, or the rest of the shard; a
name that two members have; a refused shard."""

_REST, _WHOLE = b"(the rest of the shard)", b"(the shard)"
"""Names of rows that stand for what is missing, so that the run reports it as a failure."""

_VERSION = 7
"""Version of the format of index files."""
_BLOCK, _REMOTE_BLOCK = 1 << 18, 8 << 20
"""Bytes of a local and of a remote tar that are read at once. With small reads, the data of large
members are skipped, not read."""
_MAX_LABEL_BYTES = HEAD_BYTES - 1
_NUMBER = re.compile(r"[-+]?[\d.][\d._]*([eE][-+]?\d+)?", re.ASCII)
_OTHER_NAMES = "other names"
_OUTPUT_WORDS = frozenset({"output", "outputs"})
"""Words before .cls that WebDataset's own examples use for labels."""
_MAX_ENDINGS = 1000
"""Number of different extensions of other members that are counted."""

FREE_BYTES, _MAX_EXPANSION = 256 << 20, 200
"""Decompressed bytes that any shard may expand to, and limit of them as a multiple of the
compressed size, against decompression bombs."""
_DAMAGE = (zlib.error, gzip.BadGzipFile, EOFError)
"""Exceptions that a damaged or truncated gzip file raises."""


@dataclass(frozen=True)
class TarIndex:
    """The images of one shard, in the order of the tar.

    Attributes:
        names: (n,) fixed-length bytes, unique.
        numbers: (3, n) int64: position of the data in the decompressed tar, and length of the data,
            both in bytes, the latter or one of the sizes above; number in the .cls member,
            NO_LABEL, or FIRST_NAME and below for a name.
        skipped: reason -> number of members that were left out.
        cut: reason why the tar ends early, or ''.
        compressed: whether the shard is compressed with gzip.
        refused: reason why none of its images can be used, or ''.
        endings: extension -> number of the members with other names, for the most frequent ones.
        class_names: names in .cls members, in the order of the images.
    """

    names: npt.NDArray[np.bytes_]
    numbers: npt.NDArray[np.int64]
    skipped: Mapping[str, int] = field(default_factory=dict)
    cut: str = ""
    compressed: bool = False
    refused: str = ""
    endings: Mapping[str, int] = field(default_factory=dict)
    class_names: Sequence[str] = ()

    @property
    def has_images(self) -> bool:
        """Whether a row stands for an image, and not for what is missing."""
        return not {*self.names[:2].tolist()} <= {_REST, _WHOLE}


class RefusedShardError(Exception):
    """A shard is no tar, or is damaged in a way that makes all of its images doubtful."""


def index_of(shard: Shard, endings: frozenset[bytes]) -> TarIndex:
    """Return the index of a shard in its current state, from the cache if possible."""
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
        numbers = np.array([[0], [REFUSED_SIZE], [NO_LABEL]])
        index = TarIndex(np.array([_WHOLE]), numbers, refused=str(error))
    if shard.version:
        _save(path, state, index)
    return index


def build(shard: Shard, endings: frozenset[bytes]) -> TarIndex:
    """Build the index of a shard by reading all its headers; see `index_of`."""
    compressed = _is_gzip(shard)
    skipped: Counter[str] = Counter()
    other_endings: Counter[str] = Counter()
    images: dict[bytes, TarMember] = {}
    classes: dict[bytes, int | str] = {}
    cut = ""

    def add_image(name: bytes, member: TarMember) -> None:
        images[name] = replace(member, size=TWICE_SIZE) if name in images else member

    try:
        for member in tar_headers.members(_read_gzip(shard) if compressed else _read_plain(shard)):
            name = _clean(member.name)
            reason = _reason_to_skip(name, member, endings)
            if reason == _OTHER_NAMES and name.lower().endswith(b".cls"):
                label = _class(shard, name, member.head)
                if classes.setdefault(name[:-4], label) != label:
                    raise DataError(
                        f"{shard.url} has two members {printable(name)}, which hold "
                        f"{classes[name[:-4]]} and {label}; expected one label."
                    )
            elif reason:
                skipped[reason] += 1
                if reason == _OTHER_NAMES and len(other_endings) < _MAX_ENDINGS:
                    other_endings[os.path.splitext(printable(name))[1].lower()] += 1  # noqa: PTH122
            else:
                add_image(name, member)
    except CutOffError as error:
        cut = str(error)
        if error.offset == 0 and not error.cut:
            raise RefusedShardError(f"is no tar: {error}") from error
        if error.cut and not _reason_to_skip(_clean(error.cut.name), error.cut, endings):
            add_image(_clean(error.cut.name), replace(error.cut, size=CUT_SIZE))
    except _DAMAGE as error:
        cut = f"its compressed bytes are damaged or end early ({error})"
        # A wrong CRC or length at the end of the stream may concern any byte before it, while an
        # early end leaves the complete members intact.
        if not images or any(text in str(error) for text in ("CRC", "Incorrect length")):
            raise RefusedShardError(
                f"is damaged: {error}. None of its images can be trusted; get the shard again"
            ) from error
    if cut and not any(member.size == CUT_SIZE for member in images.values()):
        images[_REST] = TarMember(_REST, 0, CUT_SIZE, True)  # it ends between two members
    labels = _labels(list(images), classes, skipped)
    class_names = tuple(dict.fromkeys(label for label in labels if isinstance(label, str)))
    codes = {name: FIRST_NAME - i for i, name in enumerate(class_names)}
    numbers = [codes[label] if isinstance(label, str) else label for label in labels]
    columns = [(member.offset, member.size) for member in images.values()]
    return TarIndex(
        np.array(list(images), dtype=np.bytes_ if images else "S1"),
        np.insert(np.array(columns, dtype=np.int64).reshape(-1, 2), 2, numbers, axis=1).T,
        dict(skipped),
        cut,
        compressed,
        endings=dict(other_endings.most_common(3)),
        class_names=class_names,
    )


def _read_plain(shard: Shard) -> Read:
    """Return a function that reads at rising offsets and skips what is not requested."""
    block_bytes = _REMOTE_BLOCK if "://" in shard.url else _BLOCK
    start, data = 0, b""

    def read(offset: int, length: int) -> bytes:
        nonlocal start, data
        if not start <= offset <= offset + length <= start + len(data):
            start, data = offset, shard.read(offset, max(length, block_bytes))
        return data[offset - start : offset - start + length]

    return read


def _read_gzip(shard: Shard) -> Read:
    """Return a function that reads decompressed bytes at rising offsets."""
    file = gzip.GzipFile(fileobj=io.BufferedReader(CompressedFile(shard), _REMOTE_BLOCK))
    limit = max(FREE_BYTES, _MAX_EXPANSION * shard.size)

    def read(offset: int, length: int) -> bytes:
        # The end may come before a large offset, which a damaged header claims.
        file.seek(min(offset, limit))
        if offset + length > limit and file.read(1):
            raise RefusedShardError(
                f"has {shard.size} compressed bytes, which expand to more than {limit}"
            )
        return file.read(length)

    return read


def _is_gzip(shard: Shard) -> bool:
    """Return whether a shard is compressed with gzip."""
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


def _class(shard: Shard, name: bytes, data: bytes) -> int | str:
    """Return the class that a .cls member holds: a number, or a name, which is no number."""
    with contextlib.suppress(ValueError):  # which is that of text that is not UTF-8 as well
        text = data.decode().strip()
        is_number = _NUMBER.fullmatch(text)
        label: int | str = int(text) if is_number else text
        # Lists such as 3,7 and one-hot vectors are no names.
        is_name = text.isprintable() and any(map(str.isalpha, text))
        is_class = -1 <= label < 1 << 63 if isinstance(label, int) else is_name
        if is_class and len(data) <= _MAX_LABEL_BYTES:
            return label
    raise DataError(
        f"{shard.url}: {printable(name)} holds {data[:_MAX_LABEL_BYTES]!r}; expected the number "
        "or the name of a class."
    )


def _labels(
    names: list[bytes], classes: Mapping[bytes, int | str], skipped: Counter[str]
) -> list[int | str]:
    """Return the number or name in the .cls member of each image, or NO_LABEL.

    The .cls member of an image has the same name up to the last dot or, as in WebDataset, its key,
    which is the name up to the first dot of the file name. Without these, KEY.output.cls or another
    name between key and .cls that says label is taken, if the key has only one of them.
    """
    named: dict[bytes, list[bytes]] = {}
    for base in classes:
        key = _sample_key(base)
        word = name_text(base[len(key) + 1 :])
        if word in _OUTPUT_WORDS or looks_like_labels(word):
            named.setdefault(key, []).append(base)
    used, ambiguous, labels = set(), set(), list[int | str]()
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
    """Read an index file; None if it is missing, damaged, or of another state of the shard."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:  # zip files hold checksums
            facts = json.loads(str(arrays["facts"]))
            index = TarIndex(arrays["names"], arrays["numbers"], **facts)
            return index if str(arrays["state"]) == state else None
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile):
        return None


def _save(path: Path, state: str, index: TarIndex) -> None:
    """Write an index file and ignore errors: without it, the next run reads the headers again."""
    facts = dict(vars(index))
    columns = {name: facts.pop(name) for name in ("names", "numbers")}
    new = path.with_name(f".new-{os.getpid()}-{threading.get_ident()}.npz")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # No fsync: after a power failure the checksums identify an incomplete file.
            np.savez(new, state=state, facts=json.dumps(facts), **columns)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
