"""Every system call by which a store changes, in the one right order.

A file appears under its final name only when it is whole and on the disk: written under a
temporary name, synced, linked, and the folder synced. After `AtomicFolder.publish` returns, the
file survives a crash of the process and of the machine, if fsync does what it promises.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from featx.errors import FeatxError, RunError, StoreError, StoreLockedError
from featx.storage.durability import failed, patiently, write_all
from featx.storage.reserved_file import ReservedFile

TEMPORARY = ".tmp-"
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


class AtomicFolder:
    """The folder of one store and all that is ever written to it.

    Attributes:
        has_locks: whether one writer keeps all others out.
    """

    has_locks = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents, each made durable before the next one is made.

        Where the folder is there already, a process that was killed may have made it, or have put
        files into it: they were not durable for that, and are now.
        """
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        there = new[-1].parent if new else path
        for folder in reversed(new or [path]):
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"cannot create the folder {folder}: {error.strerror}. Choose another out=DIR."
                ) from error
            try:
                if folder.parent in (there, there.parent):
                    with contextlib.suppress(PermissionError):  # not ours, so it is an old one
                        self.sync_folder(there.parent)
                self.sync_folder(folder.parent if new else folder)
            except OSError as error:
                raise failed(folder, error) from error

    def publish(self, path: Path, data: bytes | memoryview) -> bool:
        """Create `path` with `data`, whole or not at all.

        Returns:
            False when the name was taken already; the file that is there is kept.

        Raises:
            RunError: the disk is full or fails; nothing is left behind.
        """

        def publish() -> bool:
            with self._temporary(path) as temporary:
                self._write_synced(temporary, data)
                created = self._link(temporary, path)
            self.sync_folder(path.parent)
            return created

        return patiently(path, publish)

    def replace(self, path: Path, data: bytes | memoryview) -> None:
        """Put `data` in place of what `path` holds, whole or not at all."""

        def replace() -> None:
            with self._temporary(path) as temporary:
                self._write_synced(temporary, data)
                os.replace(temporary, path)  # noqa: PTH105 - all system calls in one manner
            self.sync_folder(path.parent)

        patiently(path, replace)

    def compare_and_swap(self, path: Path, before: bytes, data: bytes) -> bool:
        """Put `data` in place of `before`, which under the lock is what `path` holds."""
        self.replace(path, data)
        return True

    def append(self, path: Path, text: str) -> None:
        """Add text to a file that can be made anew from the store; not synced."""
        try:
            with path.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.write(text)
        except OSError as error:
            raise failed(path, error) from error

    def write_best_effort(self, path: Path, text: str) -> None:
        """Put text in place of what `path` holds, for people who look; not synced, and no harm
        where it cannot be done."""
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with self._temporary(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(path)

    def forget(self, path: Path) -> None:
        """Delete what `write_best_effort` wrote, and its folder where nothing else lies in it."""
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    @contextlib.contextmanager
    def reserved(self, path: Path, size: int, replace: bool = False) -> Iterator[ReservedFile]:
        """A file of at most `size` bytes, reserved first, published when the block ends well.

        Args:
            path: its final name.
            size: in bytes.
            replace: put it in place of what has the name; else what is there is kept.
        """
        try:
            with self._temporary(path) as temporary:
                descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                try:
                    file = ReservedFile(descriptor, size)
                    try:
                        yield file
                    except Exception:
                        file.raise_failure()  # what the disk did explains all that came after it
                        raise
                    file.finish()
                finally:
                    os.close(descriptor)
                if replace:
                    os.replace(temporary, path)  # noqa: PTH105 - as in `replace`
                else:
                    self._link(temporary, path)
            self.sync_folder(path.parent)
        except FeatxError:
            raise  # the block's own verdict: a StoreError is an OSError too
        except OSError as error:
            raise failed(path, error) from error

    @contextlib.contextmanager
    def streamed(self, path: Path) -> Iterator[BinaryIO]:
        """A file of any size, written piece by piece, in place of `path` when the block ends well.

        Raises:
            RunError: the disk is full or fails; what had the name is still there.
        """
        try:
            self._remove_dead(path)
            with self._temporary(path) as temporary, temporary.open("xb") as file:
                _lock_as_alive(file)
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)  # noqa: PTH105 - as in `replace`
            self.sync_folder(path.parent)
        except FeatxError:
            raise  # the block's own verdict, as in `reserved`
        except OSError as error:
            raise failed(path, error) from error

    def replace_unlocked(self, path: Path, data: bytes) -> None:
        """As `replace`, of jobs that hold no lock on the folder.

        What a killed process has left of the same file is deleted first: nobody else does it.
        """

        def replace() -> None:
            self._remove_dead(path)
            with self._temporary(path) as temporary, temporary.open("xb") as file:
                _lock_as_alive(file)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)  # noqa: PTH105 - as in `replace`
            self.sync_folder(path.parent)

        patiently(path, replace)

    @contextlib.contextmanager
    def filled_folder(self, path: Path) -> Iterator[Path]:
        """A folder that others fill, under its final name when the block ends well.

        Yields:
            where to fill it.

        Raises:
            RunError: the disk is full or fails, or the name is taken by a folder with files.
        """
        temporary = path.parent / f"{TEMPORARY}{path.name}.{os.getpid()}.{time.monotonic_ns()}"
        try:
            try:
                temporary.mkdir()
                yield temporary
                for folder, _, names in os.walk(temporary, topdown=False):
                    for name in names:
                        with (Path(folder) / name).open("rb") as file:
                            os.fsync(file.fileno())
                    self.sync_folder(Path(folder))
                temporary.rename(path)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            self.sync_folder(path.parent)
        except FeatxError:
            raise
        except OSError as error:
            raise failed(path, error) from error

    def set_aside(self, path: Path, folder: Path) -> Path:
        """Move a file that cannot be trusted out of the way; it is never deleted.

        It has its new name, durably, before it loses the old one.
        """
        self.make_folder(folder)
        names = (folder / f"{path.name}.{number}" for number in itertools.count(1))
        try:
            target = next(name for name in names if self._link(path, name))
            self.sync_folder(folder)
            path.unlink(missing_ok=True)  # where there are no hard links, it was moved
            self.sync_folder(path.parent)
        except OSError as error:
            raise failed(path, error) from error
        return target

    def remove(self, path: Path) -> None:
        """Delete a file or a folder of the store, if it is there."""
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise failed(path, error, "deleting") from error

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems do not sync folders; there the name is as safe as it gets.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def locked(self, path: Path) -> contextlib.AbstractContextManager[int]:
        """Hold the store for writing as long as the block runs, as `exclusive_lock` does."""
        return exclusive_lock(path)

    def free_bytes(self) -> int:
        """Room left for us on the store's disk, in bytes."""
        folder = self.root
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    @contextlib.contextmanager
    def _temporary(self, path: Path) -> Iterator[Path]:
        temporary = path.parent / f"{TEMPORARY}{path.name}.{os.getpid()}.{time.monotonic_ns()}"
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _remove_dead(self, path: Path) -> None:
        """Delete the temporary files of a path whose writers are dead: they hold no lock."""
        for leftover in path.parent.glob(f"{TEMPORARY}{glob.escape(path.name)}.*"):
            with contextlib.suppress(OSError), leftover.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()

    def _write_synced(self, path: Path, data: bytes | memoryview) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(descriptor, data, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _link(self, temporary: Path, path: Path) -> bool:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            # Without hard links a rename could replace a file; the store's lock keeps others out.
            if path.exists():
                return False
            temporary.rename(path)
        return True


def _lock_as_alive(file: BinaryIO) -> None:
    """Show that the writer of a temporary file is alive, until the file is closed.

    The kernel takes the lock away from a process that is killed. Where a file system has no locks,
    nobody gets one, and so nobody deletes the file.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[int]:
    """Hold the store for writing as long as the block runs.

    Yields:
        the descriptor that holds the lock; a process that inherits it holds it as well.

    Raises:
        StoreLockedError: somebody else holds it; the message says who.
        StoreError: the folder cannot be written to, or its file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(
            f"cannot write to {path.parent}: {error.strerror}. Choose another out=DIR."
        ) from error
    try:
        try:
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
        _note_holder(descriptor, holder_text)
        try:
            # What a killed holder gave its name may not be durable yet, and is built upon from now.
            AtomicFolder(path.parent).sync_folder(path.parent)
        except OSError as error:
            raise failed(path.parent, error) from error
        yield descriptor
        _note_holder(descriptor, "")
    finally:
        with contextlib.suppress(OSError):  # nothing of the store is written through it
            os.close(descriptor)


def _note_holder(descriptor: int, text: str) -> None:
    """Say in the lock file who holds it: for people only, so a full disk does not matter here."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def reads_back_differently(path: Path | str, dataset: str) -> RunError:
    """The error for a file in memory that does not hold what was put into it."""
    return RunError(
        f"{path} was not written: /{dataset} reads back differently, still in memory. That is a "
        "fault of this machine's memory or of a library (h5py, hdf5plugin). Nothing committed is "
        "lost. Give the same command again, and on another machine if it happens again."
    )
