"""The command's work in a child process, which is started again where a decoder crashes it.

The child is forked before anything heavy is imported, so it costs a millisecond, and has the same
terminal, folder and environment. The parent waits, forwards signals, and ends as the child does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import secrets
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
"""The signals by which a decoder that writes where it must not ends its process."""

MAX_CRASHES = 100
"""After so many the command gives up; the store can be gone on with."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_ECHO_S = 0.5
_PR_SET_PDEATHSIG = 1
_BYTES = 2 * mmap.PAGESIZE
_FOUND = struct.Struct("<Q")

_told: mmap.mmap | None = None
"""What the child tells its parent: how many dangerous images it found, and where it notes them."""

_scratch: Path | None = None
"""Where a child may note what it decodes, if its job writes to no folder."""

_last: dict[int, float] = {}


def supervised(work: Callable[[], int], was_decoding: Callable[[Path, int], bool]) -> int:
    """Do the work in a child process, again where a decoder crashed it.

    It is started again after the first such crash, and after another where the start before found
    an image that crashes its decoder; else it is not the images that are to blame.

    Args:
        work: returns an exit code.
        was_decoding: whether the notes in a folder say that a process, given by its id, was
            decoding when it ended.

    Where no child can be watched (outside of Linux; in a process with several threads, as under a
    debugger; with FEATX_DEBUG=1) the work is done in this process.

    Returns:
        the exit code of the work; 1 where its process was killed, or crashes for another reason.
    """
    debug = os.environ.get("FEATX_DEBUG") == "1"
    if debug or not sys.platform.startswith("linux") or threading.active_count() > 1:
        return work()
    global _told, _scratch
    _told = mmap.mmap(-1, _BYTES)
    _scratch = Path(tempfile.gettempdir(), f"featx-{os.getpid()}-{secrets.token_hex(8)}")
    parent = os.getpid()
    try:
        return _until_done(work, was_decoding)
    finally:
        if os.getpid() == parent:  # a child that is done comes here as well
            shutil.rmtree(_scratch, ignore_errors=True)


def end_process(code: int) -> NoReturn:
    """End the command: run what is registered for the exit, flush both streams, and leave.

    The interpreter is not torn down. Threads may still be decoding (a decoder that hangs cannot be
    stopped), and one that asks for the interpreter's lock meanwhile would abort the process with
    "terminate called without an active exception". It also saves about a second. With
    FEATX_DEBUG=1 the interpreter ends as usual, for debuggers and profilers.

    Args:
        code: exit code; 1 instead of 0 where stdout cannot be written, on a full disk for one.
    """
    if os.environ.get("FEATX_DEBUG") == "1":
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # the reader has had enough, as `featx --help | head` has
            continue
        except OSError as error:
            with contextlib.suppress(OSError):
                _say(f"{stream.name} cannot be written: {error.strerror}.")
            code = code or 1
    os._exit(code)


def scratch_folder() -> Path | None:
    """A folder for the notes of a job that writes to none, kept until the command ends.

    Returns:
        None where no parent would look at them after a crash, or there can be no folder.
    """
    if _scratch is None:
        return None
    try:
        _scratch.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return _scratch


def _until_done(work: Callable[[], int], was_decoding: Callable[[Path, int], bool]) -> int:
    """The exit code of the work, started again as `supervised` says; in a child, of the work."""
    assert _told is not None
    num_crashes = num_found = 0
    while True:
        # Blocked until both sides have their handlers: no signal is lost, none ends one side only.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _die_with(parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            return work()
        status = _wait(child)
        if not os.WIFSIGNALED(status):
            return os.WEXITSTATUS(status)
        signum = os.WTERMSIG(status)
        if signum not in {*CRASHES, signal.SIGKILL}:
            return 128 + signum
        num_crashes += 1
        found = _FOUND.unpack_from(_told)[0]
        progress = num_crashes == 1 or found > num_found
        decoding = signum in CRASHES and was_decoding(_notes_folder(), child)
        if not (decoding and progress) or num_crashes > MAX_CRASHES:
            _say(_ended(signum))
            return 1
        num_found = found
        name = signal.Signals(signum).name
        _say(f"\nThe decoder of a picture ended the process ({name}); it is started again.")


def tell_notes(folder: Path) -> None:
    """Say where this process notes what it decodes; the parent looks there after a crash."""
    if _told is not None:
        name = os.fsencode(folder.absolute())[: _BYTES - _FOUND.size - 1]
        _told[_FOUND.size : _FOUND.size + len(name) + 1] = name + b"\0"


def tell_found() -> None:
    """Say that an image was found that crashes its decoder."""
    if _told is not None:
        _FOUND.pack_into(_told, 0, _FOUND.unpack_from(_told)[0] + 1)


def is_echo(signum: int) -> bool:
    """Whether a signal is the one that came a moment ago.

    Ctrl-C reaches parent and child, and the parent forwards it; so does what ends a whole group.
    """
    if _told is None:
        return False
    now = time.monotonic()
    last, _last[signum] = _last.get(signum, -_ECHO_S), now
    return now - last < _ECHO_S


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, however that comes about."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _wait(child: int) -> int:
    """Wait for the child, hand it the signals that come meanwhile, and return how it ended."""

    def forward(signum: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)

    before = [signal.signal(signum, forward) for signum in _FORWARDED]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    _, status = os.waitpid(child, 0)
    for signum, handler in zip(_FORWARDED, before, strict=True):
        signal.signal(signum, handler)
    return status


def _notes_folder() -> Path:
    """Where the child noted what it decoded; the root of the disk, where it did not come so far."""
    assert _told is not None
    return Path("/", os.fsdecode(_told[_FOUND.size :].split(b"\0", 1)[0]))


def _ended(signum: int) -> str:
    if signum == signal.SIGKILL:
        return (
            "The process was killed (SIGKILL): by hand, or because the machine has no memory left. "
            "Nothing committed is lost; the same command goes on. Less memory is needed with a "
            "smaller batch_size."
        )
    name = signal.Signals(signum).name
    return (
        f"The process crashed ({name}) and is not started again: no picture is known to crash its "
        "decoder. Nothing committed is lost; the same command goes on. With PYTHONFAULTHANDLER=1 "
        "before it, it shows where it crashes."
    )


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
