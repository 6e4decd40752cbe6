"""In-flight journals, and crash lists of images that may crash their decoder.

A decoder that crashes ends its process. So each thread writes the key of the image it decodes into
a small memory-mapped file, the in-flight journal, which outlives the process. The next start reads
the journal, decodes these few images each in a child process, and records those that crash or hang
it in the crash list. Rows never depend on these files: they only say which images need a child
process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from featx.base import cache_folder, supervisor
from featx.storage import AtomicFolder, S3Path

_JOURNAL_PREFIX = ".decoding-"
"""Beginning of the file names of in-flight journals."""

_CRASH_LIST = ".crash-list"
"""File name of the crash list, a JSON list of keys."""

_SLOT_BYTES = 1024
"""Bytes of the slot of one thread: the length of a key (0 for none), then the key."""

_NUM_SLOTS = 512
"""Number of threads that have a slot; further threads are not recorded."""

_LENGTH = struct.Struct("<H")
"""Length of a key, in front of it in its slot."""


class InFlightJournal:
    """The keys of the images that the threads of one process are decoding.

    Args:
        path: path of the file, which must not exist; `close` removes it. Each thread has a slot of
            1 KiB. Longer keys are not recorded.

    Raises:
        OSError: the file cannot be created, locked or allocated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._slots = iter(range(_NUM_SLOTS))
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._created_folders = _make_folder(path.parent)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # released by the kernel when the process dies
            size = _NUM_SLOTS * _SLOT_BYTES
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, size)  # else SIGBUS on a full disk
            else:
                os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        except OSError:
            self.close()
            raise

    def recording(self, key: bytes) -> _Recording:
        """Context manager that records that the calling thread decodes the image with this key."""
        offset = self._slot() if len(key) <= _SLOT_BYTES - _LENGTH.size else None
        return _Recording(self._memory, offset, key)

    def close(self) -> None:
        """Remove the file, and the empty folders that were created for it.

        The memory stays mapped: a thread whose decoder hangs may still write to it.
        """
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        for folder in self._created_folders:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _slot(self) -> int | None:
        """Byte offset of the slot of the calling thread, or None if all slots are taken."""
        if not hasattr(self._thread, "offset"):
            with self._lock:
                number = next(self._slots, None)
            self._thread.offset = None if number is None else number * _SLOT_BYTES
        offset: int | None = self._thread.offset
        return offset


class _Recording:
    """Keeps a key in a slot of a journal inside a block; every image enters one.

    Args:
        memory: the mapped journal.
        offset: byte offset of the slot, or None if nothing is recorded.
        key: key of the image.
    """

    __slots__ = ("_key", "_memory", "_offset")

    def __init__(self, memory: mmap.mmap, offset: int | None, key: bytes) -> None:
        self._memory = memory
        self._offset = offset
        self._key = key

    def __enter__(self) -> None:
        if self._offset is not None:
            first = self._offset + _LENGTH.size
            # First the key, then its length: a reader never sees a length whose key is incomplete.
            self._memory[first : first + len(self._key)] = self._key
            _LENGTH.pack_into(self._memory, self._offset, len(self._key))

    def __exit__(self, *error: object) -> None:
        if self._offset is not None:
            _LENGTH.pack_into(self._memory, self._offset, 0)


def in_flight_keys(path: Path) -> set[bytes]:
    """Keys of the images that a process was decoding when it ended, from its journal.

    Args:
        path: path of the in-flight journal; the result is empty if it cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return set()
    keys = set()
    for offset in range(0, len(content) - _SLOT_BYTES + 1, _SLOT_BYTES):
        (length,) = _LENGTH.unpack_from(content, offset)
        if 0 < length <= _SLOT_BYTES - _LENGTH.size:
            keys.add(content[offset + _LENGTH.size : offset + _LENGTH.size + length])
    return keys


def was_decoding(folder: Path, pid: int) -> bool:
    """Return whether a process of this machine was decoding an image when it ended.

    Args:
        folder: folder of the run.
        pid: process id.
    """
    return any(
        in_flight_keys(path) for path in journal_folder(folder).glob(f"{_JOURNAL_PREFIX}*-{pid}-*")
    )


def journal_folder(folder: Path) -> Path:
    """Folder of the journals and the crash list of a run.

    It is the folder of the run itself. Objects of a bucket cannot be mapped into memory, so a run
    on S3 uses a folder in the user's cache on this machine.
    """
    if not isinstance(folder, S3Path):
        return folder
    return cache_folder("in-flight") / hashlib.sha256(str(folder).encode()).hexdigest()[:32]


class CrashList:
    """Images of one run that have crashed a decoder or made it hang; child processes decode them.

    Args:
        folder: folder of the run, which holds journals and crash list. None if the job writes to no
            folder: the command then uses a temporary folder until it ends, and the Python API none.
    """

    def __init__(self, folder: Path | None) -> None:
        folder = supervisor.scratch_folder() if folder is None else journal_folder(folder)
        self._folder = folder
        self._lock = threading.Lock()
        self._keys = set() if folder is None else _read_crash_list(folder / _CRASH_LIST)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Add an image, for this run and later ones.

        Args:
            key: key of the image.

        Raises:
            RunError: the disk is full or fails.
        """
        with self._lock:
            if key in self._keys:
                return
            self._keys.add(key)
            # The supervisor restarts the process after another crash only if the list has grown.
            supervisor.count_crash_listed()
            if self._folder is not None and self._folder.is_dir():
                names = sorted(key.decode("utf-8", "surrogateescape") for key in self._keys)
                text = json.dumps(names, indent=0) + "\n"
                AtomicFolder(self._folder).replace(self._folder / _CRASH_LIST, text.encode())

    @contextlib.contextmanager
    def journal(self) -> Iterator[InFlightJournal | None]:
        """Create an in-flight journal for the duration of the block.

        Yields:
            The journal, or None if there can be no file.
        """
        try:
            journal = (
                None if self._folder is None else InFlightJournal(self._folder / _journal_name())
            )
        except OSError:  # the writer of rows reports a folder that is not writable
            journal = None
        if self._folder is not None:
            supervisor.set_journal_folder(self._folder)
        try:
            yield journal
        finally:
            if journal is not None:
                journal.close()

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[set[bytes]]:
        """Keys of the images that were being decoded by processes that died.

        The journals are deleted if the block ends without an exception.
        """
        keys_of_journal = {} if self._folder is None else _journals_of_dead_processes(self._folder)
        yield set().union(*keys_of_journal.values())
        for path in keys_of_journal:
            assert self._folder is not None
            AtomicFolder(self._folder).remove(path)


def _journal_name() -> str:
    """File name of a new journal, unique over machines, processes and time."""
    host = socket.gethostname().replace("/", "-")
    return f"{_JOURNAL_PREFIX}{host}-{os.getpid()}-{time.monotonic_ns()}"


def _make_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents.

    Returns:
        The folders that did not exist, deepest first.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return new


def _journals_of_dead_processes(folder: Path) -> dict[Path, set[bytes]]:
    """Journals whose process has died -> the keys that it was decoding."""
    keys_of_journal = {}
    for path in folder.glob(f"{_JOURNAL_PREFIX}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            # A living process holds the exclusive lock, so this raises and the journal is left out.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            keys_of_journal[path] = in_flight_keys(path)
    return keys_of_journal


def _read_crash_list(path: Path) -> set[bytes]:
    """Keys of the crash list of earlier runs; empty if the file is missing or damaged."""
    try:
        names = json.loads(path.read_bytes())
        return {name.encode("utf-8", "surrogateescape") for name in names}
    except (OSError, ValueError, AttributeError, TypeError):
        return set()
