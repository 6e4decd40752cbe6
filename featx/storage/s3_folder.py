"""Every request by which a store in an object store changes.

A part is one object, created once: `If-None-Match: *` lets only the first of several writers have
the name, and what the server acknowledged is durable and whole. So there is no lock, nothing to
sync, and nothing half written: whoever is second finds the part that is there. featx.json is
created in the same way, and changed by `If-Match`, only from what its writer has seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from featx.errors import ObjectStoreError, StoreError
from featx.storage import s3_client
from featx.storage.durability import failed, patiently
from featx.storage.local_folder import AtomicFolder
from featx.storage.s3_client import TakenError
from featx.storage.s3_path import S3Path

_ENDLESS = 1 << 60

_NO_ETAG = '"00000000000000000000000000000000"'
"""What no object has: it is the MD5 of nothing that anybody knows."""


def open_folder(root: Path) -> AtomicFolder:
    """What writes to a store, by where it is."""
    return S3Folder(root) if isinstance(root, S3Path) else AtomicFolder(root)


class S3Folder(AtomicFolder):
    """The objects of one store and all that is ever written to them."""

    has_locks = False

    def make_folder(self, path: Path) -> None:
        """A folder is what names have in common: there is nothing to make."""

    def publish(self, path: Path, data: bytes | memoryview) -> bool:
        """Create an object, whole or not at all.

        Returns:
            False when the name was taken already; the object that is there is kept. It may be our
            own, where the answer to the first request was lost.

        Raises:
            RunError: the server refuses it, or does not answer.
        """
        return patiently(path, lambda: _created(path, data, IfNoneMatch="*"))

    def replace(self, path: Path, data: bytes | memoryview) -> None:
        """Put `data` in place of what `path` holds, whole or not at all."""
        patiently(path, lambda: _created(path, data))

    def replace_unlocked(self, path: Path, data: bytes) -> None:
        """As `replace`: a request leaves no temporary files."""
        self.replace(path, data)

    def compare_and_swap(self, path: Path, before: bytes, data: bytes) -> bool:
        """Put `data` in place of `before`; False where the object holds something else by now."""

        def compare_and_swap() -> bool:
            found, entry = s3_client.read(*_of(path))
            if found == data:  # by a request whose answer was lost
                return True
            return found == before and _created(path, data, IfMatch=entry.etag)

        return patiently(path, compare_and_swap)

    def append(self, path: Path, text: str) -> None:
        """Nothing: objects do not grow, and failures.csv is written anew when the run ends."""

    def write_best_effort(self, path: Path, text: str) -> None:
        """Put text in place of what `path` holds; no harm where it cannot be done."""
        with s3_client.without_patience(), contextlib.suppress(OSError):
            _created(path, text.encode())

    def forget(self, path: Path) -> None:
        """Delete what `write_best_effort` wrote."""
        with s3_client.without_patience(), contextlib.suppress(OSError):
            s3_client.delete(*_of(path))

    def set_aside(self, path: Path, folder: Path) -> Path:
        """Copy an object that cannot be trusted, and delete it if it is still that one.

        Its new name ends with what its content is known by, so that two writers who find it make
        one copy, and none deletes what the other has put in its place.
        """

        def set_aside() -> Path:
            bucket, key = _of(path)
            try:
                etag = s3_client.look(bucket, key).etag
                target = folder / f"{path.name}.{etag.strip(chr(34))[:16]}"
                s3_client.copy(bucket, key, _of(target)[1], etag)
                s3_client.delete(bucket, key, IfMatch=etag)
            except (FileNotFoundError, TakenError):
                return folder  # another writer was quicker
            return target

        return patiently(path, set_aside)

    def remove(self, path: Path) -> None:
        """Delete an object, or all below a folder, if there are any."""
        bucket, key = _of(path)
        try:
            for name, _ in list(s3_client.names(bucket, key)):
                if name == key or name.startswith(f"{key}/"):
                    s3_client.delete(bucket, name)
        except OSError as error:
            raise failed(path, error, "deleting") from error

    def sync_folder(self, folder: Path) -> None:
        """What the server acknowledged is durable."""

    def free_bytes(self) -> int:
        """More than anybody writes."""
        return _ENDLESS

    @contextlib.contextmanager
    def locked(self, path: Path) -> Iterator[int]:
        """Nobody is kept out: what this finds out is whether the server keeps its conditions.

        From then on the run has begun: requests wait for a server that does not answer.

        Yields:
            a descriptor for child processes to inherit, as of a lock; it holds nothing.

        Raises:
            StoreError: the server writes though a condition does not hold, refuses to write, or is
                not to be reached, at the start.
            RunError: it refuses a request later, or does not answer for `s3.PATIENCE_S`.
        """
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.ctime()}
        _created(path, json.dumps(holder).encode(), IfNoneMatch="*")
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": _NO_ETAG}):
            if _created(path, b"", **condition):
                raise StoreError(
                    f"{self.root}: the server does not keep to {next(iter(condition))} of a PUT, "
                    "without which two writers could spoil the store. Use another object store, "
                    "or out=DIR on a disk and copy the store when it is done."
                )
        descriptor = os.open(os.devnull, os.O_RDWR)
        try:
            with s3_client.patience():
                yield descriptor
        except ObjectStoreError as error:
            # What was there at the start is no mistake of the user's any more.
            raise failed(error.filename, error, "a request for") from error
        finally:
            os.close(descriptor)


def _created(path: Path, data: bytes | memoryview, **condition: str) -> bool:
    """Write an object; False where a condition does not hold."""
    try:
        s3_client.write(*_of(path), data, **condition)
    except TakenError:
        return False
    return True


def _of(path: Path) -> tuple[str, str]:
    """Bucket and key."""
    assert isinstance(path, S3Path), f"{path} is no object"
    return path.bucket, path.key
