"""The supervisor: runs the command in a child process and restarts it after decoder crashes.

The child is forked before anything large is imported, so this takes a millisecond, and it has the
same terminal, folder and environment. The parent waits, forwards signals, and exits with the code
of the child.
"""

from __future__ import annotations

import atexit
import contextlib
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

from featx.base.child_process import CRASHES, end_with_parent

MAX_CRASHES = 100
"""Number of crashes after which the command gives up; the run can be resumed."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM)
"""Signals that the parent forwards to the child."""

_ECHO_S = 0.5
"""Seconds within which a second signal of the same kind is taken for an echo of the first."""

_BYTES = 2 * mmap.PAGESIZE
"""Size of the shared memory."""
_COUNT = struct.Struct("<Q")
"""Number of images, at the start of the shared memory; the path follows."""

_shared: mmap.mmap | None = None
"""Shared memory from child to parent: the number of images on the crash list that the child added,
and the folder of its in-flight journal."""

_scratch_path: Path | None = None
"""Folder for the in-flight journal of a job that writes to no folder."""

_last_arrivals: dict[int, float] = {}
"""Signal -> time when it last came."""

_echo_locks: dict[int, threading.Lock] = {signum: threading.Lock() for signum in _FORWARDED}
"""Signal -> lock held while `is_echo` checks a signal of this kind."""


def run_supervised(work: Callable[[], int], was_decoding: Callable[[Path, int], bool]) -> int:
    """Run the work in a child process, and run it again if a decoder crashes the child.

    The child is restarted after the first crash during decoding. After a further one it is
    restarted only if the start before added an image to the crash list; otherwise the images are
    not the cause.

    The work runs in this process if no child can be supervised: outside Linux, in a process with
    several threads (as under a debugger), or with FEATX_DEBUG=1.

    Args:
        work: function that returns an exit code.
        was_decoding: function (folder, process id) -> whether the journals in the folder show that
            the process was decoding when it ended.

    Returns:
        The exit code of the work; 128 + the signal if another signal ended its process; 1 if it was
        killed or crashes for another reason.
    """
    debug = os.environ.get("FEATX_DEBUG") == "1"
    if debug or not sys.platform.startswith("linux") or threading.active_count() > 1:
        return work()
    global _shared, _scratch_path
    _shared = mmap.mmap(-1, _BYTES)
    _scratch_path = Path(tempfile.gettempdir(), f"featx-{os.getpid()}-{secrets.token_hex(8)}")
    parent = os.getpid()
    try:
        return _run_until_done(work, was_decoding)
    finally:
        if os.getpid() == parent:  # the child returns through here as well
            shutil.rmtree(_scratch_path, ignore_errors=True)


def end_process(code: int) -> NoReturn:
    """End the command: run exit handlers, flush both streams, and exit.

    The interpreter is not finalised. Threads may still be decoding (a decoder that hangs cannot be
    stopped), and a thread that requests the interpreter's lock during finalisation would abort the
    process with "terminate called without an active exception". It also saves about a second. With
    FEATX_DEBUG=1 the interpreter exits as usual, for debuggers and profilers.

    Args:
        code: exit code; 1 replaces 0 if stdout cannot be written, for example on a full disk.
    """
    if os.environ.get("FEATX_DEBUG") == "1":
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # the reader has closed the pipe (`| head`)
            continue
        except OSError as error:
            with contextlib.suppress(OSError):
                _say(f"{stream.name} cannot be written: {error.strerror}.")
            code = code or 1
    os._exit(code)


def scratch_folder() -> Path | None:
    """Folder for the journals of a job that writes to no folder; removed when the command ends.

    Returns:
        None if there is no supervisor to read them after a crash, or the folder cannot be created.
    """
    if _scratch_path is None:
        return None
    try:
        _scratch_path.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return _scratch_path


def _run_until_done(work: Callable[[], int], was_decoding: Callable[[Path, int], bool]) -> int:
    """Fork and wait until the work ends without a decoder crash.

    Returns:
        In the parent the exit code of the command, in the child that of the work.
    """
    assert _shared is not None
    num_crashes = num_listed_before = 0
    while True:
        # Signals are blocked across the fork until both processes have their handlers, so none is
        # lost and none ends only one of them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            end_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            return work()
        status = _wait(child)
        if not os.WIFSIGNALED(status):
            return os.WEXITSTATUS(status)
        signum = os.WTERMSIG(status)
        if signum not in {*CRASHES, signal.SIGKILL}:
            return 128 + signum
        num_crashes += 1
        num_listed = _COUNT.unpack_from(_shared)[0]
        has_progress = num_crashes == 1 or num_listed > num_listed_before
        is_decoder_crash = signum in CRASHES and was_decoding(_journal_folder(), child)
        if not (is_decoder_crash and has_progress) or num_crashes > MAX_CRASHES:
            _say(_end_message(signum))
            return 1
        num_listed_before = num_listed
        name = signal.Signals(signum).name
        _say(f"\nThe decoder of an image crashed the process ({name}); it is started again.")


def set_journal_folder(folder: Path) -> None:
    """Tell the supervisor in which folder this process writes its in-flight journal."""
    if _shared is not None:
        name = os.fsencode(folder.absolute())[: _BYTES - _COUNT.size - 1]
        _shared[_COUNT.size : _COUNT.size + len(name) + 1] = name + b"\0"


def count_crash_listed() -> None:
    """Tell the supervisor that an image was added to the crash list."""
    if _shared is not None:
        _COUNT.pack_into(_shared, 0, _COUNT.unpack_from(_shared)[0] + 1)


def is_echo(signum: int) -> bool:
    """Return whether a signal repeats one that came within the last half second.

    Ctrl-C reaches parent and child, and the parent forwards it as well; so does a signal to the
    whole process group.
    """
    check = _echo_locks.get(signum)
    if _shared is None or check is None:
        return False
    # Python runs the handler of a second signal between any two instructions of the handler of the
    # first. The lock is then held by the interrupted call, so this signal is the echo.
    if not check.acquire(blocking=False):
        return True
    try:
        now = time.monotonic()
        last, _last_arrivals[signum] = _last_arrivals.get(signum, -_ECHO_S), now
        return now - last < _ECHO_S
    finally:
        check.release()


def _wait(child: int) -> int:
    """Wait for the child and forward signals to it.

    Returns:
        The wait status of the child.
    """

    def forward(signum: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)

    handlers_before = [signal.signal(signum, forward) for signum in _FORWARDED]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    _, status = os.waitpid(child, 0)
    for signum, handler in zip(_FORWARDED, handlers_before, strict=True):
        signal.signal(signum, handler)
    return status


def _journal_folder() -> Path:
    """Folder of the child's journal; the root of the disk if the child had not yet named one."""
    assert _shared is not None
    return Path("/", os.fsdecode(_shared[_COUNT.size :].split(b"\0", 1)[0]))


def _end_message(signum: int) -> str:
    """Message for a process that ended by a signal and is not restarted."""
    if signum == signal.SIGKILL:
        return (
            "The process was killed (SIGKILL): by a user, or because the machine ran out of "
            "memory. Nothing committed is lost; the same command resumes the run. A smaller "
            "batch_size needs less memory."
        )
    name = signal.Signals(signum).name
    return (
        f"The process crashed ({name}) and is not started again, because no image is known to "
        "crash its decoder. Nothing committed is lost; the same command resumes the run. With "
        "PYTHONFAULTHANDLER=1 in the environment it shows where it crashes."
    )


def _say(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
