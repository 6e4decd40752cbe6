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
from featx.storage.durability import sync_entries

_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _release_in_child() -> None:
    """Close the locks in a forked child.

    A child that outlives the run, such as a process pool of a data set, would hold them as well.
    `subprocess` does not call this, so that workers inherit the lock of their driver.
    """
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[int]:
    """Hold an exclusive lock on the store within the block, and yield its file descriptor.

    Processes that get it by `pass_fds` of subprocess hold the lock as well; forked ones do not.

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
    _held.add(descriptor)
    try:
        try:
            # flock belongs to the open file, not to the process: a worker that inherits the
            # descriptor holds the lock too, also after its driver was killed.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 4096).decode(errors="replace").strip()
            raise StoreLockedError(
                f"{path.parent} is being written by another process{_holder_text(holder)}. "
                "job=status shows how far a run is. Wait for it, stop it, or choose another "
                "out=DIR."
            ) from error
        except OSError as error:
            raise StoreError(
                f"{path.parent} cannot be locked: {error.strerror}. Choose an out=DIR on a disk "
                "that has file locks."
            ) from error
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        values = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        _write_holder(descriptor, json.dumps(values))
        # Names that a killed holder created may not be synced yet, and this run relies on them.
        sync_entries(path.parent, path.parent)
        yield descriptor
        if descriptor in _held:
            _write_holder(descriptor, "")
    finally:
        if descriptor in _held:  # not in a forked child, where the number may be another file's
            _held.remove(descriptor)
            with contextlib.suppress(OSError):  # no data of the store was written through it
                os.close(descriptor)


def _holder_text(holder: str) -> str:
    """Return what a lock file says about its holder, for people; '' if it says nothing."""
    try:
        values = json.loads(holder)
        return f", pid {values['pid']} on {values['host']} since {values['since']}"
    except (ValueError, TypeError, LookupError):
        return ""


def _write_holder(descriptor: int, text: str) -> None:
    """Write into the lock file who holds it; only for people, so errors are ignored."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
