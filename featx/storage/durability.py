"""Writes and syncs of a disk, their retries, and the error of a write that keeps failing."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from featx.errors import FeatxError, ObjectStoreError, StorageError

T = TypeVar("T")

RETRY_WAITS_S = (0.2, 1.0, 3.0)
"""Seconds to wait before each retry of a write on a full or failing disk, until the run stops."""

TRANSIENT_ERRORS = {
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ESTALE,
    errno.EAGAIN,
    errno.ETIMEDOUT,
}
"""Errors that may pass: a full disk or quota, I/O errors, and lost connections of network disks."""


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all data at an offset, by as many pwrite calls as needed."""
    view = memoryview(data)
    written = 0
    while written < len(view):
        count = os.pwrite(descriptor, view[written:], offset + written)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += count


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder, so that new names in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders; nothing more can be done there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def with_retries(path: Path, write: Callable[[], T]) -> T:
    """Call `write`; retry it after each of RETRY_WAITS_S if its error may pass."""
    for wait_s in (*RETRY_WAITS_S, None):
        try:
            return write()
        except OSError as error:
            if wait_s is None or error.errno not in TRANSIENT_ERRORS:
                raise storage_error(path, error) from error
            time.sleep(wait_s)
    raise AssertionError("unreachable")


def sync_entries(folder: Path, path: Path) -> None:
    """Sync the entries of a folder for a file in it; retried like a write."""
    with_retries(path, lambda: sync_folder(folder))


@contextlib.contextmanager
def storage_errors(path: Path, doing: str = "writing") -> Iterator[None]:
    """Raise an OSError of the block as the StorageError of a file; errors of featx pass."""
    try:
        yield
    except FeatxError:
        raise  # StoreError is an OSError too
    except OSError as error:
        raise storage_error(path, error, doing) from error


def storage_error(path: Path | str, error: OSError, doing: str = "writing") -> StorageError:
    """Error for a write that failed, with advice that fits its errno."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free some space and give the same command again (df -i: files can run out as well)"
    elif error.errno == errno.EFBIG:
        hint = "Raise the limit (ulimit -f), or copy the store to a disk that takes larger files"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "Raise the limit of open files (ulimit -n) and give the same command again"
    elif isinstance(error, ObjectStoreError):
        hint = "When the object store accepts the request, give the same command again"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "When this user may write there, give the same command again"
    elif error.errno in (errno.EISDIR, errno.ENOTDIR):
        hint = "Move away what has this name, and give the same command again"
    else:
        hint = "When the disk works again, give the same command again"
    return StorageError(
        f"{doing} {path} failed: {error.strerror or error}. Nothing committed is lost. {hint}."
    )
