"""Discovery and reading of tar shards on a disk or behind a URL.

Shards are named by a folder, a path, or a pattern of wildcards and brace ranges. fsspec lists and
reads URLs (extra `remote`). Those of S3 are listed and read as a store is, with the same settings,
so that a run waits for a server that does not answer. Credentials come from where each service
looks for them (AWS_* in the environment, ~/.aws, .netrc), never from data.root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from featx.base import LruCache, name_bytes
from featx.errors import DataError, MissingExtraError
from featx.sources.base import mtime_ns
from featx.sources.path_patterns import base_of, expand_braces, find_files, has_stars, is_pattern
from featx.storage import PositionedFile, s3_client

if TYPE_CHECKING:
    import fsspec

PROTOCOLS = (
    "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "hf",
    "sftp", "hdfs", "webhdfs", "memory",
)  # fmt: skip
"""URL protocols that data.root may have. Protocols that run a command or wrap another URL are left
out."""

_VERSIONS = (
    "ETag", "etag", "md5Hash", "LastModified", "Last-Modified", "last_modified", "mtime", "updated",
)  # fmt: skip
"""Keys of fsspec's file information that identify the state of a file, the most reliable first."""

_ENDINGS = (b".tar", b".tar.gz", b".tgz")
_REQUESTS = 16
"""Maximum number of parallel requests while shards are discovered."""

_SPACING, _MAX_POINTS = 1 << 20, 1024
"""Decompressed bytes between seek points, and the number of them; each takes 32 KiB."""
_KEPT_BYTES = 32 << 20
"""Decompressed bytes that a `GzipReader` keeps. Threads that read rows in order are a few images
apart."""
_COMPRESSED_BLOCK = 1 << 20
"""Compressed bytes that are read at once."""


@dataclass(frozen=True)
class Shard:
    """One tar file.

    Attributes:
        name: path that its keys begin with, with '/' as separator.
        url: path or URL of the file.
        size: size in bytes.
        version: text that changes with the content: mtime and ctime, or a server's ETag; '' if
            unknown.
        read: function (offset, length) -> bytes, safe to call from several threads.
        mtime_ns: mtime in nanoseconds since 1970, or None for a remote file.
    """

    name: bytes
    url: str
    size: int
    version: str
    read: Callable[[int, int], bytes]
    mtime_ns: int | None = None


class CompressedFile(PositionedFile):
    """The bytes of a shard as a file.

    It keeps the exception of the last read, which a decompressor may hide.
    """

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard.size)
        self._shard = shard
        self.error: Exception | None = None

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._shard.read(self._position, len(buffer))
        except Exception as error:
            self.error = error
            raise
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class GzipReader:
    """Decompressed bytes of a shard in any order, from seek points that the first pass finds.

    Threads may share an instance: a lock serialises their reads.
    """

    def __init__(self, shard: Shard, size: int) -> None:
        from indexed_gzip import IndexedGzipFile

        self._lock = threading.Lock()
        self._url = shard.url
        self._raw = CompressedFile(shard)
        spacing = max(_SPACING, size // _MAX_POINTS)
        # A block is decompressed from the seek point before it: longer ones cost less.
        self._block_bytes = 2 * spacing
        self._file = IndexedGzipFile(
            fileobj=self._raw,
            spacing=spacing,
            readbuf_size=_COMPRESSED_BLOCK,
            buffer_size=self._block_bytes,
        )
        # Two at least, as an image may lie in both.
        num_kept = 1 + max(1, _KEPT_BYTES // self._block_bytes)
        self._blocks: LruCache[int, bytes] = LruCache(num_kept)

    def read(self, offset: int, length: int) -> bytes:
        """Return decompressed bytes, fewer than `length` if they are damaged or end before."""
        first, last = offset // self._block_bytes, (offset + length - 1) // self._block_bytes
        with self._lock:
            data = b"".join(
                self._blocks.get_or_make(number, partial(self._decompress, number))
                for number in range(first, last + 1)
            )
        start = offset - first * self._block_bytes
        return data[start : start + length]

    def _decompress(self, number: int) -> bytes:
        """Decompress a block; the lock is held."""
        self._raw.error = None
        try:
            self._file.seek(number * self._block_bytes)
            block: bytes = self._file.read(self._block_bytes)
        except OSError as error:
            # Indexing has read past this point, so that the shard has changed otherwise.
            problem = f"the shard cannot be decompressed: {error}"
            raise self._raw.error or OSError(errno.EIO, problem, self._url) from error
        return block


def find_shards(root: str, follow_links: bool) -> list[Shard]:
    """Find the shards that data.root names, in bytewise order of their names."""
    protocol = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", root)
    command = root.startswith("pipe:") or "::" in root
    if command or (protocol and protocol[1] not in PROTOCOLS):
        raise DataError(
            f"data.root={root}: expected files, on a disk or behind {', '.join(PROTOCOLS)}. "
            "Commands (pipe:) and chained URLs (::) are refused."
        )
    if protocol and re.match(r"[a-z0-9]+://[^/]*@", root):
        raise DataError(
            "data.root holds a user name or a password, which the store would keep. Give them "
            "where the service looks for them: AWS_* in the environment, ~/.aws, ~/.netrc."
        )
    if protocol:
        shards = _remote(root)
    else:
        files, _ = find_files(root, follow_links, _ENDINGS, what="images")
        shards = [_local_shard(name, path) for name, path in files]
    if not shards:
        raise DataError(f"data.root={root}: no name there ends in .tar, .tar.gz or .tgz.")
    return sorted(shards, key=lambda shard: shard.name)


def _local_shard(name: bytes, path: str) -> Shard:
    """Describe a local shard."""
    path = os.path.abspath(path)  # noqa: PTH100 - names as they are typed
    try:
        info = os.stat(path)  # noqa: PTH116
    except OSError as error:
        raise DataError(
            f"data.root: {path} {(error.strerror or 'cannot be read').lower()} (taken from "
            f"{Path.cwd()})."
        ) from error
    if not os.path.isfile(path):  # noqa: PTH113
        raise DataError(f"data.root: {path} is no file; expected a tar.")
    state = info.st_size, info.st_mtime_ns

    def read(offset: int, length: int) -> bytes:
        """Read a range of the file with pread, which may return fewer bytes than requested."""
        # Opened for each read: the file behind the path is compared with the listed one, so a shard
        # that was replaced is noticed.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            now = os.fstat(descriptor)
            if (now.st_size, now.st_mtime_ns) != state:
                raise OSError(errno.ESTALE, "the shard was changed while it was in use", path)
            chunks = []
            while length > 0 and (chunk := os.pread(descriptor, length, offset)):
                chunks.append(chunk)
                offset, length = offset + len(chunk), length - len(chunk)
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        finally:
            os.close(descriptor)

    # Tools that restore mtime cannot set ctime back, and tars of equal size are common.
    version = f"mtime {info.st_mtime_ns} ctime {info.st_ctime_ns}"
    return Shard(name, path, info.st_size, version, read, mtime_ns(info))


def _remote(root: str) -> list[Shard]:
    """Find shards behind a URL."""
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtraError(
            f'data.root={root} is a URL: pip install "featx[remote]", which reads http, https and '
            "s3; other services need their package of fsspec (gcsfs, adlfs, ...)."
        ) from error
    protocol, _, bucket_and_key = root.partition("://")
    if protocol in ("s3", "s3a"):
        with _listing_errors(root):
            return _s3_shards(*bucket_and_key.partition("/")[::2])
    try:
        system, path = fsspec.core.url_to_fs(root)
    except (ImportError, ValueError) as error:
        raise MissingExtraError(f"data.root={root}: {error}") from error
    # fsspec keeps its objects, and what they have listed, as long as the process lives.
    system.invalidate_cache()
    with _listing_errors(root):
        # fsspec keeps http://host in the path, but strips s3:// and similar protocols.
        found = _remote_paths(system, path)
        with ThreadPoolExecutor(_REQUESTS) as threads:
            shards = list(threads.map(lambda pair: _remote_shard(system, *pair), found))
        if shards and "http" in system.protocol:
            shards[0].read(1, 1)  # fails here, not in the run, if the server ignores Range
        return shards


@contextlib.contextmanager
def _listing_errors(root: str) -> Iterator[None]:
    """Turn exceptions of a service into a DataError."""
    try:
        yield
    except (DataError, MissingExtraError):
        raise
    except FileNotFoundError as error:
        # fsspec raises FileNotFoundError for every error response of a web server; the cause has
        # the status.
        why = f" ({error.__cause__})" if error.__cause__ else ""
        raise DataError(f"data.root={root}: {error} is not there{why}.") from error
    except Exception as error:
        raise DataError(
            f"data.root={root} cannot be listed: {type(error).__name__}: {error}."
        ) from error


def _s3_shards(bucket: str, path: str) -> list[Shard]:
    """Find shards in a bucket. What a listing has not told of a shard is asked of the server."""
    from fsspec.utils import glob_translate

    found: dict[str, s3_client.ObjectMetadata] = {}
    if is_pattern(path):
        base, paths = base_of(path), []
        for name in expand_braces(path):
            if has_stars(name):
                matches = re.compile(glob_translate(name)).match
                objects = s3_client.list_objects(bucket, base_of(name))
                matching = {key: metadata for key, metadata in objects if matches(key)}
                found |= matching
                paths += sorted(matching)
            else:
                paths.append(name)
    elif _is_shard(path):
        base, paths = path[: path.rfind("/") + 1], [path]
    else:
        base = f"{path.rstrip('/')}/" if path else ""
        objects = s3_client.list_objects(bucket, base)
        found = {key: metadata for key, metadata in objects if _is_shard(key)}
        paths = sorted(found)

    def shard(key: str) -> Shard:
        metadata = found.get(key) or s3_client.head(bucket, key)
        url, version = f"s3://{bucket}/{key}", f"ETag {metadata.etag}"

        def read(start: int, stop: int) -> bytes:
            data, now = s3_client.read(bucket, key, (start, stop))
            _check_version(url, version, {"ETag": now.etag})
            return data

        name = name_bytes(key[len(base) :])
        return Shard(name, url, metadata.size, version, _whole_reads(url, metadata.size, read))

    with ThreadPoolExecutor(_REQUESTS) as threads:
        return list(threads.map(shard, dict.fromkeys(paths)))


def _is_shard(path: str) -> bool:
    """Return whether a path ends as the name of a shard."""
    return path.lower().encode().endswith(_ENDINGS)


def _whole_reads(
    url: str, size: int, read: Callable[[int, int], bytes]
) -> Callable[[int, int], bytes]:
    """Return a function (offset, length) -> bytes, all of them as far as the file has them, from
    one (start, stop) -> bytes. Raises OSError if there are fewer.
    """

    def read_whole(offset: int, length: int) -> bytes:
        length = min(length, size - offset)
        if length <= 0:
            return b""
        try:
            data = read(offset, offset + length)
        except (OSError, DataError):
            raise
        except Exception as error:  # exception of a service's own package
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error
        if len(data) != length:
            raise OSError(errno.EIO, f"{len(data)} of {length} bytes came", url)
        return data

    return read_whole


def _remote_paths(system: fsspec.AbstractFileSystem, path: str) -> list[tuple[str, str]]:
    """Return (path for fsspec, name for keys) of every shard."""
    if is_pattern(path):
        base, paths = base_of(path), []
        for name in expand_braces(path):
            paths += sorted(system.glob(name)) if has_stars(name) else [name]
        return [(file, file[len(base) :]) for file in dict.fromkeys(paths)]
    if _is_shard(path):
        return [(path, path.rsplit("/", 1)[-1])]
    if "http" in system.protocol:
        raise DataError(
            f"{path}: a web server does not list the files of a folder. Name one tar, or all of "
            "them as in 'http://host/train-{000..012}.tar'."
        )
    base = path.rstrip("/") + "/"
    return [(file, file[len(base) :]) for file in system.find(path) if _is_shard(file)]


def _remote_shard(system: fsspec.AbstractFileSystem, path: str, name: str) -> Shard:
    """Describe a remote shard."""
    import fsspec

    info = system.info(path)
    url = system.unstrip_protocol(path)
    size = info.get("size")
    if size is None:
        raise DataError(f"{url}: the server does not say how large it is, so it cannot be read.")
    version = next((f"{key} {info[key]}" for key in _VERSIONS if info.get(key)), "")
    is_http = "http" in system.protocol
    system_of_process = {os.getpid(): system}

    def read(start: int, stop: int) -> bytes:
        system = system_of_process.get(os.getpid())
        if system is None:  # a fork has neither the connections nor the threads of its parent
            system = system_of_process[os.getpid()] = fsspec.core.url_to_fs(url)[0]
        if is_http:
            arguments = system, path, size, version, start, stop
            data: bytes = fsspec.asyn.sync(system.loop, _fetch_range, *arguments)
        else:
            data = system.cat_file(path, start=start, end=stop)
        return data

    return Shard(name_bytes(name), url, size, version, _whole_reads(url, size, read))


async def _fetch_range(
    system: fsspec.AbstractFileSystem, url: str, size: int, version: str, start: int, stop: int
) -> bytes:
    """Request a range of a file from a web server.

    fsspec's own functions compare neither the range nor the version of the answer.
    """
    session = await system.set_session()
    asked = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    options = {**system.kwargs, "headers": {**system.kwargs.get("headers", {}), **asked}}
    async with session.get(system.encode_url(url), **options) as response:
        response.raise_for_status()
        found, _, size_now = response.headers.get("Content-Range", "").partition("/")
        if response.status != 206 or not found.startswith(f"bytes {start}-"):
            raise DataError(
                f"{url}: the web server does not answer requests for a part of a file (Range), "
                "without which single rows cannot be read. Use another server, or copy the "
                "shards to a disk."
            )
        _check_version(url, version, response.headers)
        _check_version(url, f"size {size}", {"size": size_now.replace("*", str(size))})
        return bytes(await response.read())


def _check_version(url: str, version: str, answer: Mapping[str, object]) -> None:
    """Raise OSError if an answer is known to come from another version of a shard."""
    name, _, listed = version.partition(" ")
    # The same ETag may be weak in one answer only.
    if str(answer.get(name, listed)).removeprefix("W/") != listed.removeprefix("W/"):
        raise OSError(errno.ESTALE, "the shard was changed while it was in use", url)
