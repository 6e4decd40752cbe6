"""File of a store that is written bit by bit and gets its name when it is complete."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from featx.errors import FeatxError
from featx.storage.durability import storage_error, with_retries, write_all


class UnfinishedFile:
    """Temporary file in the folder of its final name, open for writing at any address.

    It is deleted if it is not published: by `discard`, or when the object is collected or the
    interpreter ends. Made by `AtomicFolder.begin_file`.

    Args:
        path: final name.
        temporary: temporary name in the same folder.
        link: gives the temporary file the final name; returns False if the name is taken and the
            existing file is kept.
        sync_entries: syncs the entries of a folder, for a file in it.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(
        self,
        path: Path,
        temporary: Path,
        link: Callable[[Path, Path], bool],
        sync_entries: Callable[[Path, Path], None],
    ) -> None:
        self.path = path
        self._link = link
        self._sync_entries = sync_entries
        self._file = _TemporaryFile(temporary)
        self._descriptor = self._file.descriptor
        # An exception that is still shown may keep this object alive: the end of the interpreter
        # deletes the file at the latest.
        self._discard = weakref.finalize(self, self._file.discard)

    def write(self, data: bytes | memoryview, address: int) -> None:
        """Write bytes at an address; an error that may pass is retried.

        Raises:
            RunError: the disk is full or fails.
        """
        with_retries(self.path, lambda: write_all(self._descriptor, data, address))
        if hasattr(os, "posix_fadvise"):  # not on macOS
            # Linux begins to write these bytes to the disk, so that the sync of `publish` finds
            # little left to write. This is only advice, which a file system may not take.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, address, len(data), os.POSIX_FADV_DONTNEED)

    def read_into(self, buffer: memoryview, address: int) -> int:
        """Read bytes at an address into a buffer; return their number, less at the end of the file.

        Raises:
            RunError: the disk fails.
        """
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(self._descriptor, [buffer[done:]], address + done)
                if not count:
                    break
                done += count
        except OSError as error:
            raise storage_error(self.path, error, "reading back") from error
        return done

    def publish(self, check: Callable[[], None]) -> bool:
        """Sync the file, check it, and give it its final name.

        A failed sync is final: the kernel may drop what it could not write, and report success
        from then on.

        Args:
            check: compares the file with what was written, by `read_into`, which reads past the
                page cache then; raises an error if it differs.

        Returns:
            whether the file got its name. If not, the name was taken, and the existing file is
            kept.

        Raises:
            RunError: the disk is full or fails; nothing is left behind.
        """
        try:
            os.fsync(self._descriptor)
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # reads ahead
            check()
            self._file.close()
            # The content is on disk before the name exists, and the name before the call returns.
            created = self._link(self._file.path, self.path)
            self.discard()
            self._sync_entries(self.path.parent, self.path)
        except FeatxError:
            raise  # an error of `check`; StoreError is an OSError too
        except OSError as error:
            raise storage_error(self.path, error) from error
        finally:
            self.discard()
        return created

    def discard(self) -> None:
        """Close the file and delete its temporary name, once; its final name stays."""
        self._discard()


class _TemporaryFile:
    """Open file that is deleted by the process that created it, and not by a forked child."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._process = os.getpid()
        self._is_open = True

    def close(self) -> None:
        """Close the file, once; a network disk may report a failed write here."""
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)

    def discard(self) -> None:
        """Close the file and delete this name of it."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(OSError):  # nothing of a discarded file is needed
            self.close()
        self.path.unlink(missing_ok=True)
