"""Atomic writes to a store in an object store that speaks S3.

Every request that changes a store is in this module. A part is one object that is created once:
with `If-None-Match: *` only the first of several writers gets the name, and an acknowledged object
is complete and durable. So there is no lock, nothing to sync and nothing half written; later
writers find the part that exists. featx.json is created in the same way, and changed with
`If-Match`, so a writer replaces only the content that it has read; so are parts, whose rows two
drivers may compute again.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from featx.errors import ObjectStoreError, RunError, StoreError
from featx.storage import s3_client, s3_outage
from featx.storage.durability import storage_error, with_retries
from featx.storage.local_folder import AtomicFolder, names_aside
from featx.storage.s3_client import PreconditionFailedError
from featx.storage.s3_path import S3Path

_UNLIMITED_BYTES = 1 << 60

_NO_ETAG = '"00000000000000000000000000000000"'
"""Entity tag that no object has, as no known content has this MD5."""


def open_folder(root: Path) -> AtomicFolder:
    """Create the writer for a store: S3Folder for an S3Path, otherwise AtomicFolder."""
    return S3Folder(root) if isinstance(root, S3Path) else AtomicFolder(root)


class S3Folder(AtomicFolder):
    """Prefix of one store in a bucket; performs every write to it."""

    has_locks = False

    def make_folder(self, path: Path) -> None:
        """Do nothing: a folder is only a common prefix of keys."""

    def publish(self, path: Path, data: bytes | memoryview) -> bool:
        """Create an object, completely or not at all; return whether it was created.

        If not, the name was taken and the existing object is kept; it may be our own if the answer
        to the first request was lost.
        """
        return with_retries(path, lambda: _write_object(path, data, IfNoneMatch="*"))

    def create(self, path: Path, text: str) -> bool:
        return self.publish(path, text.encode())

    def replace(self, path: Path, data: bytes | memoryview, etag: str | None = None) -> None:
        condition = {} if etag is None else {"IfMatch": etag}

        def replace() -> bool:
            # The object has the new content if the answer to an earlier attempt was lost, or if
            # another process has computed the same.
            return _write_object(path, data, **condition) or path.read_bytes() == data

        if not with_retries(path, replace):
            raise RunError(
                f"{path} was changed by another process since this one began, so it was not "
                "replaced. Nothing committed is lost. Give the same command again when that "
                "process has ended."
            )

    def etag(self, path: Path) -> str | None:
        assert isinstance(path, S3Path), f"{path} is no object"
        with contextlib.suppress(FileNotFoundError):
            return path.metadata().etag
        return None

    def replace_unlocked(self, path: Path, data: bytes) -> None:
        """Same as `replace`, as requests leave no temporary files behind."""
        self.replace(path, data)

    def compare_and_swap(self, path: Path, before: bytes, data: bytes) -> bool:
        """Replace the content of an object if it still holds `before`; return whether it did."""

        def compare_and_swap() -> bool:
            found, metadata = s3_client.read(*_bucket_and_key(path))
            if found == data:  # written by an earlier attempt whose answer was lost
                return True
            if found != before:
                return False
            # botocore repeats a request whose answer was lost. The object has the new content then,
            # and the server refuses the second request as it would after a write of someone else.
            return (
                _write_object(path, data, IfMatch=metadata.etag)
                or s3_client.read(*_bucket_and_key(path))[0] == data
            )

        return with_retries(path, compare_and_swap)

    def append(self, path: Path, text: str) -> None:
        """Do nothing: objects cannot grow, and the end of a run writes failures.csv completely."""

    def write_best_effort(self, path: Path, text: str) -> None:
        with s3_outage.without_waiting(), contextlib.suppress(OSError):
            _write_object(path, text.encode())

    def remove_best_effort(self, path: Path) -> None:
        with s3_outage.without_waiting(), contextlib.suppress(OSError):
            s3_client.delete(*_bucket_and_key(path))

    def set_aside(self, path: Path, folder: Path) -> Path:
        """Copy an object to NAME.damaged in a folder, or NAME.2.damaged, ..., and delete it."""
        target = next(name for name in names_aside(path, folder) if not name.exists())
        self.replace(target, path.read_bytes())
        self.remove(path)
        return target

    def remove(self, path: Path) -> None:
        """Delete an object, or all objects below a folder."""
        bucket, key = _bucket_and_key(path)
        try:
            for name, _ in list(s3_client.list_objects(bucket, key)):
                if name == key or name.startswith(f"{key}/"):
                    s3_client.delete(bucket, name)
        except OSError as error:
            raise storage_error(path, error, "deleting") from error

    def remove_leftover(self, path: Path) -> None:
        """Same as `remove`: temporary files in a bucket were copied there."""
        self.remove(path)

    def free_bytes(self) -> int:
        """Size that no store reaches, as a bucket has no limit."""
        return _UNLIMITED_BYTES

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[int]:
        """Check that the server honours conditional writes; other writers are not kept out.

        Within the block, requests wait for a server that does not answer. The file descriptor can
        be inherited by child processes like that of a lock; it locks nothing.
        """
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.ctime()}
        _write_object(path, json.dumps(holder).encode(), IfNoneMatch="*")
        # The lock object exists now, so both conditions are false and a correct server refuses.
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": _NO_ETAG}):
            if _write_object(path, b"", **condition):
                with contextlib.suppress(OSError):
                    s3_client.delete(*_bucket_and_key(path))
                raise StoreError(
                    f"{self.root}: the server ignores {next(iter(condition))} of a PUT request, "
                    "without which two writers could damage the store. Nothing was written. Use "
                    "another object store, or write to out=DIR on a disk and copy the store when "
                    "it is complete."
                )
        descriptor = os.open(os.devnull, os.O_RDWR)
        try:
            with s3_outage.waiting_limit():
                yield descriptor
        except ObjectStoreError as error:
            # The location was valid at the start, so this is a failure of the run (exit code 1).
            raise storage_error(error.filename, error, "a request for") from error
        finally:
            os.close(descriptor)


def _write_object(path: Path, data: bytes | memoryview, **condition: str) -> bool:
    """Write an object; return False if the condition does not hold."""
    try:
        s3_client.write(*_bucket_and_key(path), data, **condition)
    except PreconditionFailedError:
        return False
    return True


def _bucket_and_key(path: Path) -> tuple[str, str]:
    assert isinstance(path, S3Path), f"{path} is no object"
    return path.bucket, path.key
