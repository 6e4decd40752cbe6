"""Lock of a folder, which one process holds while it writes there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from featx.errors import StoreError, StoreLockedError
from featx.storage.durability import storage_error, sync_folder


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[int]:
    """Hold an exclusive lock on the store within the block.

    Args:
        path: lock file.

    Yields:
        file descriptor that holds the lock; processes that inherit it hold the lock as well.

    Raises:
        StoreLockedError: another process holds the lock; the message names it.
        StoreError: the folder is not writable, or its file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(
            f"cannot write to {path.parent}: {error.strerror}. Choose another out=DIR."
        ) from error
    try:
        try:
            # flock belongs to the open file, not to the process: a worker that inherits the
            # descriptor holds the lock too, also after its driver was killed.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 4096).decode(errors="replace").strip()
            raise StoreLockedError(
                f"{path.parent} is being written by another process: {holder or 'unknown'}. "
                "Wait for it, stop it, or choose another out=DIR."
            ) from error
        except OSError as error:
            raise StoreError(
                f"{path.parent} cannot be locked: {error.strerror}. Choose an out=DIR on a disk "
                "that has file locks."
            ) from error
        holder_text = json.dumps(
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
        )
        _write_holder(descriptor, holder_text)
        try:
            # Names that a killed holder created may not be synced yet, and this run relies on them.
            sync_folder(path.parent)
        except OSError as error:
            raise storage_error(path.parent, error) from error
        yield descriptor
        _write_holder(descriptor, "")
    finally:
        with contextlib.suppress(OSError):  # no data of the store was written through it
            os.close(descriptor)


def _write_holder(descriptor: int, text: str) -> None:
    """Write into the lock file who holds it; only for people, so errors are ignored."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
