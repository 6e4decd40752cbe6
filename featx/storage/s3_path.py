"""Paths in object stores: s3://bucket/run with the read interface of pathlib.Path."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

from featx.errors import ConfigError, ObjectStoreError
from featx.storage import s3_client
from featx.storage.s3_client import ObjectMetadata

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(.*)")


def is_url(text: str | os.PathLike[str]) -> bool:
    """Return whether an option such as `out` or `store` is a URL."""
    return _URL.match(str(text)) is not None


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """Paths in a folder that match a glob, in order; none if the folder vanishes, as that of parts
    does. Those in a bucket know their size and time from its listing.
    """
    # `Path.glob` raises this if the folder vanishes, before Python 3.13.
    with contextlib.suppress(FileNotFoundError):
        return sorted(folder.glob(pattern))
    return []


def path_text(path: object, name: str = "path") -> str:
    """Return the path that a call from Python gave as the argument `name`, as text. Raises
    ConfigError if it is none.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise ConfigError(
            f"{name} is a {type(path).__name__}; expected a path as text or pathlib.Path, such as "
            "'runs/photos'."
        )
    return text


def parse_path(text: str | os.PathLike[str], name: str = "path") -> Path:
    """Parse the location of a store as users type it: a path, or s3://bucket/run.

    Raises ConfigError if the URL has another scheme, or names no folder of a bucket, or if the
    argument `name` is no path.
    """
    if isinstance(text, S3Path):
        return text
    found = _URL.match(path_text(text, name))
    if found is None:
        return Path(text).expanduser()
    # pathlib reduces two slashes to one, so a Path made from a URL has only one.
    scheme, rest = found[1].lower(), found[2].lstrip("/")
    if scheme != "s3":
        raise ConfigError(
            f"{text}: expected a path on a disk, or s3://bucket/run for an object store that "
            "speaks S3. AWS_ENDPOINT_URL names the server if it is not AWS."
        )
    bucket, _, key = rest.partition("/")
    if not key.strip("/") or "@" in bucket or {".", ".."} & set(key.split("/")):
        raise ConfigError(
            f"{'s3://...' if '@' in bucket else text}: expected s3://bucket/folder, without user "
            "name, password, '.' or '..'. Give credentials where the tools of AWS look for them: "
            "AWS_* in the environment, ~/.aws, the machine's role."
        )
    return S3Path("s3:", bucket, key)


def folder_of(root: Path) -> Path:
    """Folder of a store that is given by its folder or by its file, where its other files are."""
    return root if root.is_dir() else root.parent


class S3Path(PosixPath):
    """Key of an object, or prefix of keys that acts as a folder.

    It implements what readers of a store use of pathlib. Changes go through `S3Folder`, and system
    calls refuse the path (`__fspath__` raises).
    """

    def __str__(self) -> str:
        scheme, rest = self.parts[:1], "/".join(self.parts[1:])
        return f"s3://{rest}" if scheme == ("s3:",) else "/".join(self.parts)  # a relative path

    def __fspath__(self) -> str:
        raise ObjectStoreError(
            errno.ENOTSUP, "it is in an object store, but this operation needs a disk", str(self)
        )

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """Key of the object in its bucket."""
        return "/".join(self.parts[2:])

    def absolute(self) -> S3Path:
        return self

    def is_absolute(self) -> bool:
        return True

    def metadata(self) -> ObjectMetadata:
        """Metadata of the object; raises FileNotFoundError if it does not exist."""
        return s3_client.head(self.bucket, self.key)

    def objects(self) -> Iterator[tuple[S3Path, ObjectMetadata]]:
        """List all objects below this folder with their metadata."""
        for key, metadata in s3_client.list_objects(self.bucket, f"{self.key}/"):
            yield S3Path("s3:", self.bucket, key), metadata

    def is_file(self) -> bool:
        try:
            self.metadata()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        return any(s3_client.list_objects(self.bucket, f"{self.key}/", max_keys=1))

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size and time of the object; the inode number is derived from the entity tag."""
        metadata = self.__dict__.pop("_listed", None) or self.metadata()
        inode = zlib.crc32(metadata.etag.encode())
        times = (int(metadata.modified),) * 3
        values = (stat.S_IFREG | 0o444, inode, 0, 1, 0, 0, metadata.size, *times)
        exact = {"st_mtime": metadata.modified, "st_mtime_ns": int(metadata.modified * 1e9)}
        return os.stat_result(values, exact)

    def glob(self, pattern: str) -> Iterator[S3Path]:  # type: ignore[override]
        """List objects directly in this folder; one request returns names and metadata."""
        start = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        folder = f"{self.key}/"
        for key, metadata in s3_client.list_objects(self.bucket, folder + start):
            name = key[len(folder) :]
            if "/" not in name and fnmatch.fnmatchcase(name, pattern):
                found = self / name
                # `stat` uses this once instead of a request; a later call asks the server again.
                found.__dict__["_listed"] = metadata
                yield found

    def open(
        self, mode: str = "r", buffering: int = -1, encoding: str | None = None,
        errors: str | None = None, newline: str | None = None,
    ) -> Any:  # fmt: skip
        """Read the whole object into memory and return it as a file object."""
        if mode not in ("r", "rb"):
            raise ObjectStoreError(errno.EROFS, "it is opened for reading only", str(self))
        data = io.BytesIO(s3_client.read(self.bucket, self.key)[0])
        if mode == "rb":
            return data
        return io.TextIOWrapper(data, encoding or "utf-8", errors, newline)
