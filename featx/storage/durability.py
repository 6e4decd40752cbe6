"""Durable files of a disk: writes with retries, syncs, and names that only complete files get.

`TemporaryFile` and `UnfinishedFile` get their final name when they are complete and on the disk;
the second one is written bit by bit. `storage_error` is the error of a write that keeps failing.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from featx.base import delayed_signals
from featx.errors import FeatxError, ObjectStoreError, RunError, StorageError

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

TEMPORARY_PREFIX = ".tmp-"
"""Prefix of the names of temporary files and folders."""

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}
"""Errors of os.link on file systems without hard links, or with a limit on their number."""


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


def memory_mismatch_error(path: Path | str, dataset: str) -> RunError:
    """Error for an HDF5 file in memory of which a dataset differs from what was written to it."""
    return RunError(
        f"{path} was not written: reading /{dataset} back from memory gives other values. The "
        "cause is this machine's memory or a library (h5py, hdf5plugin). Nothing committed is "
        "lost. Give the same command again; if it fails again, use another machine."
    )


def disk_mismatch_error(path: Path, what: str) -> RunError:
    """Error for a file of which a part, `what`, gives back other bytes than were written to it."""
    return RunError(
        f"{path} was not written: reading {what} back from the disk gives other bytes. Nothing "
        "committed is lost. Check the disk and the memory of this machine, and give the same "
        "command again."
    )


class PositionedFile(io.RawIOBase):
    """File object with a position, from which a subclass reads, and at which it may write."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position


class ReservedFile(PositionedFile):
    """File object for h5py over reserved space, so that writes cannot run out of it.

    HDF5 sees the logical size, while the file on disk keeps the reserved size until `finish`. HDF5
    never sees a failed write, since it crashes on that when it closes the file: the first error is
    kept, further writes are dropped, and `finish` raises it.

    The descriptor is that of an empty file. Raises OSError if the disk has less free space.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._reserved = size
        self._failure: OSError | None = None  # first error of a write, raised by `raise_failure`
        if hasattr(os, "posix_fallocate"):  # not on macOS, where a full disk shows on writing
            os.posix_fallocate(descriptor, 0, max(1, size))

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self.size - self._position))
        data = os.pread(self._descriptor, wanted, self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def write(self, data: Any) -> int:
        """Write at the position; after a failed write, pretend to succeed and write nothing."""
        view = memoryview(data).cast("B")
        end = self._position + len(view)
        if self._failure is None:
            try:
                if end > self._reserved:
                    text = f"{self._reserved} bytes were reserved, {end} are needed"
                    raise OSError(errno.ENOSPC, text)
                write_all(self._descriptor, view, self._position)
            except OSError as error:
                self._failure = error
        self._position = end
        self.size = max(self.size, end)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def raise_failure(self) -> None:
        """Raise the error of the first failed write, if any."""
        # The reference is dropped here: the traceback leads to HDF5's hold on this object, a cycle
        # that the garbage collector cannot see, and h5py crashes at exit on what is left of one.
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Release unused space."""
        self.raise_failure()
        os.ftruncate(self._descriptor, self.size)


def signals_between_calls(file: ReservedFile) -> contextlib.AbstractContextManager[None]:
    """Context that delays signals that arrive while HDF5 calls a file object, to its end.

    h5py ignores an exception of such a call while it closes a dataset: the interrupt is lost, and
    the write with it.
    """

    def is_called(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_locals.get("self") is file:
                return True
            frame = frame.f_back
        return False

    return delayed_signals(is_called)


class TemporaryFile:
    """New file under a temporary name in the folder of its final one, open for any access.

    `discard` deletes it unless it got its final name, in the process that created it and not in a
    forked child. Raises OSError if the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, temporary_name(path)
        self.descriptor = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._process = os.getpid()

    def sync_and_name(self, replace: bool, check: Callable[[], None] | None = None) -> bool:
        """Sync the file, check it, and give it its final name; see `take_name`.

        `check` compares the file, past the page cache, with what was written.
        """
        os.fsync(self.descriptor)
        if check is not None:
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # reads ahead
            check()
        return self.take_name(replace)

    def take_name(self, replace: bool) -> bool:
        """Close the file and give it its final name; False if that is taken and is to be kept.

        A hard link fails if the name exists, whereas a rename would replace the file silently.
        """
        self._close()
        if replace:
            os.replace(self._temporary, self._path)  # noqa: PTH105 - all system calls in one manner
            return True
        try:
            os.link(self._temporary, self._path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            # Between this check and the rename, only the lock of the store keeps other writers out.
            if self._path.exists():
                return False
            self._temporary.rename(self._path)
        return True

    def discard(self) -> None:
        """Close the file and delete its temporary name; its final name stays."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(OSError):  # nothing of a discarded file is needed
            self._close()
        self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        """Close the file, once; a network disk may report a failed write here."""
        # Another file may get the number: a write that comes later, from a thread, must fail.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """Return a new temporary name in the folder of `path`."""
    return path.parent / f"{TEMPORARY_PREFIX}{path.name}.{os.getpid()}.{time.monotonic_ns()}"


class UnfinishedFile:
    """Temporary file in the folder of its final name, open for writing at any address.

    It is deleted if it is not finished: by `discard`, or when the object is collected or the
    interpreter ends. Made by `AtomicFolder.begin_file`; reserved bytes that are not written are
    released when it is finished. Raises OSError if the file cannot be created, or the disk has
    less free space.
    """

    def __init__(self, path: Path, replace: bool, reserved_bytes: int = 0) -> None:
        self.path = path
        self._replace = replace
        self._size = 0
        self._is_reserved = reserved_bytes > 0 and hasattr(os, "posix_fallocate")  # not on macOS
        self._file = TemporaryFile(path)
        # An exception that is still shown may keep this object alive: the end of the interpreter
        # deletes the file at the latest.
        self._discard = weakref.finalize(self, self._file.discard)
        if self._is_reserved:
            try:
                os.posix_fallocate(self._file.descriptor, 0, reserved_bytes)
            except OSError:
                self.discard()
                raise

    def write(self, data: bytes | memoryview, address: int) -> None:
        """Write bytes at an address; an error that may pass is retried.

        Raises RunError if the disk is full or fails.
        """
        with_retries(self.path, lambda: write_all(self._file.descriptor, data, address))
        self._size = max(self._size, address + len(data))
        if hasattr(os, "posix_fadvise"):  # not on macOS
            # Linux begins to write these bytes to the disk, so that the sync of `finish` finds
            # little left to write. This is only advice, which a file system may not take.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file.descriptor, address, len(data), os.POSIX_FADV_DONTNEED)

    def read_into(self, buffer: memoryview, address: int) -> int:
        """Read bytes at an address into a buffer; return their number, less at the end of the file.

        Raises RunError if the disk fails.
        """
        done = 0
        with storage_errors(self.path, "reading back"):
            while done < len(buffer):
                count = os.preadv(self._file.descriptor, [buffer[done:]], address + done)
                if not count:
                    break
                done += count
        return done

    def finish(self, check: Callable[[], None]) -> bool:
        """Sync the file, check it, and give it its final name; return whether it got that.

        A failed sync is final: the kernel may drop what it could not write, and report success
        from then on. If the name was taken, the existing file is kept. `check` compares the file
        with what was written, by `read_into`, which reads past the page cache then; it raises an
        error if the file differs. Raises RunError if the disk is full or fails; nothing is left
        behind.
        """
        with storage_errors(self.path):
            try:
                if self._is_reserved:
                    os.ftruncate(self._file.descriptor, self._size)
                # The content is on disk before the name, and the name before the call returns.
                created = self._file.sync_and_name(self._replace, check)
            finally:
                self.discard()
            sync_entries(self.path.parent, self.path)
        return created

    def discard(self) -> None:
        """Close the file and delete its temporary name, once; its final name stays.

        Raises RunError if the disk fails.
        """
        with storage_errors(self.path):
            self._discard()
