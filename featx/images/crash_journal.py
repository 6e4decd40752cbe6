"""Which images may crash their decoder: noted while they are decoded, remembered when one did.

A decoder that crashes takes the process with it. So every thread notes the key of the image it is
decoding in a small file, mapped into memory, which outlives the process. The next start finds the
notes, decodes these few images each in a process of its own, and remembers those that crash it.
No row of a store depends on these files; they say only where care is needed.
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

from featx.base import supervisor
from featx.storage.local_folder import AtomicFolder
from featx.storage.s3_path import S3Path

_NOTES = ".decoding-"
_REMEMBERED = ".suspects"

_SLOT_BYTES = 1024
_NUM_SLOTS = 512
_LENGTH = struct.Struct("<H")


class InFlightJournal:
    """What the threads of one process are decoding right now.

    Args:
        path: of the file, new; removed by `close`. It has a slot of 1 KiB for each thread, and no
            note of a longer key.

    Raises:
        OSError: there can be no such file here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._slots = iter(range(_NUM_SLOTS))
        self._own = threading.local()
        self._lock = threading.Lock()
        self._made = _make_folder(path.parent)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # tells the notes of the living from the others
            size = _NUM_SLOTS * _SLOT_BYTES
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, size)  # on a full disk a write would be SIGBUS
            else:
                os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        except OSError:
            self.close()
            raise

    @contextlib.contextmanager
    def noted(self, key: bytes) -> Iterator[None]:
        """This thread decodes the image with this key, as long as the block runs."""
        at = self._slot() if len(key) <= _SLOT_BYTES - _LENGTH.size else None
        if at is None:
            yield
            return
        first = at + _LENGTH.size
        self._memory[first : first + len(key)] = key
        _LENGTH.pack_into(self._memory, at, len(key))
        try:
            yield
        finally:
            _LENGTH.pack_into(self._memory, at, 0)

    def close(self) -> None:
        """Remove the file, and the folders that were made for it where nothing else is in them.

        The memory stays: a thread that was left behind may still write to it.
        """
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _slot(self) -> int | None:
        """Where this thread notes, None where there are too many threads."""
        if not hasattr(self._own, "at"):
            with self._lock:
                number = next(self._slots, None)
            self._own.at = None if number is None else number * _SLOT_BYTES
        at: int | None = self._own.at
        return at


def noted_keys(path: Path) -> set[bytes]:
    """The images that a process was decoding when it ended, from its notes."""
    try:
        content = path.read_bytes()
    except OSError:
        return set()
    keys = set()
    for at in range(0, len(content) - _SLOT_BYTES + 1, _SLOT_BYTES):
        (length,) = _LENGTH.unpack_from(content, at)
        if 0 < length <= _SLOT_BYTES - _LENGTH.size:
            keys.add(content[at + _LENGTH.size : at + _LENGTH.size + length])
    return keys


def was_decoding(folder: Path, pid: int) -> bool:
    """Whether a process of this machine noted there what it was decoding when it ended."""
    return any(noted_keys(path) for path in folder_of_notes(folder).glob(f"{_NOTES}*-{pid}-*"))


def folder_of_notes(folder: Path) -> Path:
    """Where the processes of a run note and remember: its folder or, for an object store, which
    cannot be mapped into memory, one of this user's on this machine."""
    if not isinstance(folder, S3Path):
        return folder
    base = os.environ.get("XDG_CACHE_HOME")
    cache = Path(base) if base else Path.home() / ".cache"
    return cache / "featx" / "notes" / hashlib.sha256(str(folder).encode()).hexdigest()[:32]


class CrashList:
    """The images of one run that are decoded each in a process of its own.

    Args:
        folder: of the run, where it notes and remembers. None where it writes to none: then the
            command has one for as long as it goes on, and Python none.
    """

    def __init__(self, folder: Path | None) -> None:
        folder = supervisor.scratch_folder() if folder is None else folder_of_notes(folder)
        self._folder = folder
        self._lock = threading.Lock()
        self._keys = set() if folder is None else _remembered(folder / _REMEMBERED)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def remember(self, key: bytes) -> None:
        """Be careful with an image from now on, also in later runs.

        Raises:
            RunError: the disk is full or fails.
        """
        with self._lock:
            if key in self._keys:
                return
            self._keys.add(key)
            supervisor.tell_found()
            if self._folder is not None and self._folder.is_dir():
                names = sorted(key.decode("utf-8", "surrogateescape") for key in self._keys)
                text = json.dumps(names, indent=0) + "\n"
                AtomicFolder(self._folder).replace(self._folder / _REMEMBERED, text.encode())

    @contextlib.contextmanager
    def notes(self) -> Iterator[InFlightJournal | None]:
        """A file for notes, as long as the block runs; None where there can be none."""
        try:
            notes = None if self._folder is None else InFlightJournal(self._folder / _name())
        except OSError:  # a folder that cannot be written to is told of where rows are written
            notes = None
        if self._folder is not None:
            supervisor.tell_notes(self._folder)
        try:
            yield notes
        finally:
            if notes is not None:
                notes.close()

    @contextlib.contextmanager
    def left_behind(self) -> Iterator[set[bytes]]:
        """The images that processes were decoding when they died.

        Their notes are deleted when the block ends well.
        """
        found = {} if self._folder is None else _notes_of_the_dead(self._folder)
        yield set().union(*found.values())
        for path in found:
            assert self._folder is not None
            AtomicFolder(self._folder).remove(path)


def _name() -> str:
    host = socket.gethostname().replace("/", "-")
    return f"{_NOTES}{host}-{os.getpid()}-{time.monotonic_ns()}"


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and those above it; returns those that were not there, the deepest first."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return new


def _notes_of_the_dead(folder: Path) -> dict[Path, set[bytes]]:
    """Notes whose process holds them no more -> the images it was at."""
    found = {}
    for path in folder.glob(f"{_NOTES}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found[path] = noted_keys(path)
    return found


def _remembered(path: Path) -> set[bytes]:
    """The images that an earlier run found to be dangerous; a damaged list is as good as none."""
    try:
        names = json.loads(path.read_bytes())
        return {name.encode("utf-8", "surrogateescape") for name in names}
    except (OSError, ValueError, AttributeError, TypeError):
        return set()
