"""Atomic writes to the folder of a store on a local or network disk, and its lock.

Every system call that changes a store is in this package, nearly all of them in this module. A
file appears under its final name only when it is complete and on disk: it is written under a
temporary name, synced, linked, and then its folder is synced. After `AtomicFolder.publish` returns,
the file survives a crash of the process and of the machine, as far as fsync keeps its promise.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path

from featx.base import command_text
from featx.errors import FeatxError, StoreError, StoreLockedError
from featx.storage.durability import (
    TEMPORARY_PREFIX,
    TRANSIENT_ERRORS,
    ReservedFile,
    TemporaryFile,
    UnfinishedFile,
    signals_between_calls,
    storage_error,
    storage_errors,
    sync_entries,
    sync_folder,
    temporary_name,
    with_retries,
    write_all,
)


class AtomicFolder:
    """Folder of one store; performs every write to it.

    `has_locks` tells whether `lock` keeps all other writers out.
    """

    has_locks = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents; each is synced before the next one is created.

        If the folder exists, a process that was killed may have created it or put files into it
        without syncing them, so it is synced here. Raises StoreError if a folder cannot be created
        or this user may not write into it, and RunError if the disk is full or fails.
        """
        check_writable(path)
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        there = new[-1].parent if new else path
        for folder in reversed(new or [path]):
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise _creation_error(f"create the folder {folder}", folder, error) from error
            # A killed process may have created the lowest folder that exists without syncing its
            # parent; without that, everything below could be lost with it in a power failure. A
            # folder that we may not read belongs to others, so no run of ours created it.
            if folder.parent in (there, there.parent) and os.access(there.parent, os.R_OK):
                sync_entries(there.parent, folder)
            sync_entries(folder.parent if new else folder, folder)

    def publish(self, path: Path, data: bytes | memoryview) -> bool:
        """Create a file, complete or not at all; its folder exists.

        Return whether it was created. If not, the name was taken, and the existing file is kept.
        Raises RunError if the disk is full or fails; nothing is left behind.
        """
        return self._write(path, data, replace=False)

    def create(self, path: Path, text: str) -> bool:
        """Create a small file that need not survive a power failure; False if it exists."""
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True

    def replace(self, path: Path, data: bytes | memoryview, etag: str | None = None) -> None:
        """Replace the content of a file, completely or not at all.

        An object in a bucket must have the given entity tag, if any; on a disk the lock keeps
        others from changing the file. Raises RunError if it has another, or if the disk is full or
        fails; the old content is still there.
        """
        self._write(path, data, replace=True)

    def etag(self, path: Path) -> str | None:
        """Entity tag of an object, which changes with its content; None on a disk, or if there is
        no object.
        """
        return None

    def replace_unlocked(self, path: Path, data: bytes) -> None:
        """Replace the content of a file from a job that holds no lock on the folder.

        Temporary files that killed processes left for the same path are deleted first, as no later
        run would find them.
        """
        self._write(path, data, replace=True, has_lock=False)

    def compare_and_swap(self, path: Path, before: bytes, data: bytes) -> bool:
        """Replace the content of a file if it holds `before`; return whether it did.

        On a disk the lock guarantees that it does.
        """
        self.replace(path, data)
        return True

    def append(self, path: Path, text: str) -> None:
        """Append text to a file that can be rebuilt from the store, so it is not synced.

        Surrogates from undecodable keys become their original bytes.
        """
        with (
            storage_errors(path),
            path.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file,
        ):
            file.write(text)

    def write_best_effort(self, path: Path, text: str) -> None:
        """Replace the content of a file that only informs people.

        It is not synced, and errors are ignored.
        """
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with self._temporary(path) as file:
                write_all(file.descriptor, text.encode(), 0)
                file.take_name(replace=True)

    def remove_best_effort(self, path: Path) -> None:
        """Delete a file written by `write_best_effort`, and its folder if that is empty."""
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    @contextlib.contextmanager
    def reserve_file(self, path: Path, size: int) -> Iterator[ReservedFile]:
        """File for h5py whose space is reserved first; published when the block succeeds.

        `size` is its largest size in bytes. An existing file is kept. Raises RunError if the disk
        is full or fails; nothing is left behind.
        """
        with self._new_file(path, replace=False) as temporary:
            file = ReservedFile(temporary.descriptor, size)
            try:
                with signals_between_calls(file):
                    yield file
            except Exception:
                file.raise_failure()  # a failed write is the cause of the error at hand
                raise
            file.finish()

    def begin_file(
        self, path: Path, replace: bool = False, reserved_bytes: int = 0
    ) -> UnfinishedFile:
        """Begin a file that is written at any address and gets its name, `path`, at the end.

        Without `replace` an existing file is kept. The file gets `reserved_bytes` now, so that a
        full disk shows at once. Raises RunError if the disk is full or fails.
        """
        return with_retries(path, lambda: UnfinishedFile(path, replace, reserved_bytes))

    @contextlib.contextmanager
    def stream_file(self, path: Path, has_lock: bool = False) -> Iterator[BufferedRandom]:
        """File of any size, written sequentially; it replaces `path` when the block succeeds.

        The block may read back what it wrote. With `has_lock` the folder is not searched for what
        killed processes have left for this path. Raises RunError if the disk is full or fails; the
        old content is still there.
        """
        with (
            self._new_file(path, replace=True, has_lock=has_lock) as temporary,
            open(temporary.descriptor, "w+b", closefd=False) as file,
        ):
            yield file

    @contextlib.contextmanager
    def fill_folder(self, path: Path) -> Iterator[Path]:
        """Temporary folder that the block fills; it gets its final name when the block succeeds.

        Raises RunError if the disk is full or fails, or `path` is a folder with files.
        """
        temporary = temporary_name(path)
        with storage_errors(path):
            try:
                temporary.mkdir()
                yield temporary
                # Files before the folders that name them, and all of them before the final name.
                for folder, _, names in os.walk(temporary, topdown=False):
                    for name in names:
                        with (Path(folder) / name).open("rb") as file:
                            os.fsync(file.fileno())
                    sync_folder(Path(folder))
                temporary.rename(path)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            sync_entries(path.parent, path)

    def set_aside(self, path: Path, folder: Path) -> Path:
        """Rename a file that is damaged or another run's to NAME.damaged in a folder.

        If there is such a file already, the name is NAME.2.damaged, and so on: nothing is deleted.
        """
        target = next(name for name in names_aside(path, folder) if not os.path.lexists(name))
        with storage_errors(path, "renaming"):
            os.replace(path, target)  # noqa: PTH105 - all system calls in one manner
        sync_entries(folder, path)
        sync_entries(path.parent, path)
        return target

    def remove(self, path: Path) -> None:
        """Delete a file or a folder of the store, if it exists."""
        with storage_errors(path, "deleting"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def remove_leftover(self, path: Path) -> None:
        """Delete a temporary file that a dead process has left, which so holds no lock on it.

        On a file system without locks no process gets one, so no process deletes the file.
        """
        # NFS gives an exclusive lock on a file that is open for writing only.
        with contextlib.suppress(OSError), path.open("r+b") as abandoned:
            fcntl.flock(abandoned, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()

    def lock(self, path: Path) -> contextlib.AbstractContextManager[int]:
        """Hold the exclusive lock of the store within the block; see `exclusive_lock`."""
        return exclusive_lock(path)

    def free_bytes(self) -> int:
        """Free space on the disk of the store, in bytes, that this user may fill."""
        folder = self.root
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _write(
        self, path: Path, data: bytes | memoryview, replace: bool, has_lock: bool = True
    ) -> bool:
        """Write a new file and give it its final name; False if that is taken and is to be kept."""

        def write() -> bool:
            with self._temporary(path, has_lock) as file:
                write_all(file.descriptor, data, 0)
                return file.sync_and_name(replace)

        # The content is on disk before the name exists, and the name before the call returns. The
        # two are retried apart: a second write would find the name that the first one created.
        created = with_retries(path, write)
        sync_entries(path.parent, path)
        return created

    @contextlib.contextmanager
    def _new_file(
        self, path: Path, replace: bool, has_lock: bool = True
    ) -> Iterator[TemporaryFile]:
        """New file that the block writes; it gets its final name when the block succeeds."""
        with storage_errors(path):
            with self._temporary(path, has_lock) as file:
                yield file
                file.sync_and_name(replace)
            sync_entries(path.parent, path)

    @contextlib.contextmanager
    def _temporary(self, path: Path, has_lock: bool = True) -> Iterator[TemporaryFile]:
        """New file that is deleted at the end of the block unless it got its final name.

        Without the lock of the folder, temporary files that dead processes have left for the same
        path are deleted first. The new one is locked until it is closed; the kernel releases the
        lock of a killed process.
        """
        if not has_lock:
            for leftover in path.parent.glob(f"{TEMPORARY_PREFIX}{glob.escape(path.name)}.*"):
                self.remove_leftover(leftover)
        file = TemporaryFile(path)
        try:
            if not has_lock:
                with contextlib.suppress(OSError):
                    fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
        finally:
            file.discard()


_ADVICE = (
    "Choose another folder, or change that. A job that writes into the store that it reads can "
    "have a copy of the store."
)
"""What to do about a folder that cannot be written to."""


def check_writable(path: Path) -> None:
    """Refuse a folder that cannot be created, or in which this user may not write.

    A long computation shows so at its start. Raises StoreError.
    """
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not there.is_dir():
        kind = "a link to no folder" if there.is_symlink() else "a file"
        raise StoreError(
            f"cannot create the folder {path}: {there} is {kind}. Choose another folder."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise StoreError(
            f"cannot write to {there}: this user may not, or the disk is read-only. {_ADVICE}"
        )


def _creation_error(action: str, path: Path, error: OSError) -> FeatxError:
    """Error for a folder or lock that cannot be created: a failure of the disk, or a path that
    does not fit.
    """
    if error.errno in TRANSIENT_ERRORS:
        return storage_error(path, error, "creating")
    return StoreError(f"cannot {action}: {error.strerror}. {_ADVICE}")


def names_aside(path: Path, folder: Path) -> Iterator[Path]:
    """Names in a folder for a file that is set aside, in the order in which they are tried."""
    yield folder / f"{path.name}.damaged"
    for number in itertools.count(2):
        yield folder / f"{path.name}.{number}.damaged"


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
        RunError: the disk is full or fails.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _creation_error(f"write to {path}", path, error) from error
    _held.add(descriptor)
    try:
        try:
            # flock belongs to the open file, not to the process: a worker that inherits the
            # descriptor holds the lock too, also after its driver was killed.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 4096).decode(errors="replace").strip()
            status = command_text("job=status", f"store={path.parent}")
            raise StoreLockedError(
                f"{path.parent} is being written by another process{_holder_text(holder)}. "
                f"`{status}` shows how far a run is. Wait for it, stop it, or choose another "
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
