"""Writes that are complete or an error: repeated where a disk is busy, and explained."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from featx.errors import ObjectStoreError, StorageError

T = TypeVar("T")

RETRY_WAITS_S = (0.2, 1.0, 3.0)
"""A disk that is full or does not answer is asked again after these, before the run stops."""

_PASSING = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT}


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """pwrite until all is written: a short write is no error, but it is not the end either."""
    view = memoryview(data)
    written = 0
    while written < len(view):
        count = os.pwrite(descriptor, view[written:], offset + written)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += count


def patiently(path: Path, write: Callable[[], T]) -> T:
    """What `write` returns; what may pass, a full disk for one, is waited for a little."""
    for wait_s in (*RETRY_WAITS_S, None):
        try:
            return write()
        except OSError as error:
            if wait_s is None or error.errno not in _PASSING:
                raise failed(path, error) from error
            time.sleep(wait_s)
    raise AssertionError("unreachable")


def failed(path: Path | str, error: OSError, doing: str = "writing") -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "Make room and give the same command again"
    elif isinstance(error, ObjectStoreError):
        hint = "When the object store accepts it, give the same command again"
    else:
        hint = "When the disk answers again, give the same command again"
    return StorageError(
        f"{doing} {path} failed: {error.strerror or error}. Nothing committed is lost. {hint}."
    )
