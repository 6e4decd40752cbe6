"""This process: who owns it, its settings, its signals, its standard streams and its end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

_is_own = False


def own_process() -> None:
    """Declare that this process runs the command or is a worker of a run."""
    global _is_own
    _is_own = True


def is_own_process() -> bool:
    """Return whether `own_process` was called in this process, or in the one that forked it."""
    return _is_own


T = TypeVar("T")


class ProcessSetting(Generic[T]):
    """A context manager that keeps a setting at one value while it has any user.

    Users enter and leave in any order and from any thread: the first saves the value, and the last
    restores it. A saved value per user would go wrong if users overlap without nesting, as two
    engines do that are opened and closed in the same order.
    """

    def __init__(self, get: Callable[[], T], set_value: Callable[[T], None], value: T) -> None:
        self._get = get
        self._set = set_value
        self._value = value
        self._lock = threading.Lock()
        self._users = 0
        self._saved = value

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._saved = self._get()
                self._set(self._value)
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._set(self._saved)


Handler: TypeAlias = Callable[[int, FrameType | None], object]

_replaced: list[dict[signal.Signals, object]] = []
"""Handlers that the open blocks have replaced, those of the outermost block first."""


def _restore_in_child() -> None:
    """Put the handlers back in a forked child.

    A child such as a worker of a process pool would otherwise take a signal that ends it for a
    request to stop the run.
    """
    while _replaced:
        _restore(_replaced.pop())


os.register_at_fork(after_in_child=_restore_in_child)


@contextlib.contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Handle signals inside the block, in this process only.

    Signal handlers exist only in the main thread; in other threads nothing is installed. A signal
    that is ignored, as SIGHUP under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [signum for signum in handlers if signal.getsignal(signum) != signal.SIG_IGN]
    before: dict[signal.Signals, Any] = {
        signum: signal.signal(signum, handlers[signum]) for signum in handled
    }
    _replaced.append(before)
    try:
        yield
    finally:
        if any(each is before for each in _replaced):  # not in a forked child
            _replaced.remove(before)
            _restore(before)


@contextlib.contextmanager
def delayed_signals(
    is_delayed: Callable[[FrameType | None], bool] = lambda frame: True,
) -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP to the end of the block, for code that would lose the
    exception of a handler, or leave files and processes behind. With `is_delayed` only those that
    arrive in a frame for which it is true.
    """
    delayed: list[int] = []
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: each for number in signums if callable(each := signal.getsignal(number))}

    def handle(signum: int, frame: FrameType | None) -> None:
        if is_delayed(frame):
            delayed.append(signum)
        else:
            before[signal.Signals(signum)](signum, frame)

    with signal_handlers(dict.fromkeys(before, handle)):
        yield
    for signum in delayed:
        signal.raise_signal(signum)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install handlers as `signal.getsignal` returned them; None is one of another language."""
    for signum, handler in handlers.items():
        if handler is not None:
            signal.signal(signum, handler)


def restart_in_utf8() -> None:
    """Start the command again in Python's UTF-8 mode if the locale has another encoding.

    The names of files, and the text of options, are then the same in every locale, also in child
    processes.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def open_standard_streams() -> None:
    """Open the null device for closed standard streams, as `>&-` and some daemons leave them.

    Otherwise the next file that is opened, such as that of a store, would become descriptor 1 or 2,
    into which libraries write. Python has None for the streams of descriptors that were closed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


@contextlib.contextmanager
def open_above_standard_streams() -> Iterator[None]:
    """Give no descriptor from 0 to 2 to files that are opened inside the block, although a program,
    such as a daemon, has closed its standard streams.
    """
    held = [os.open(os.devnull, os.O_RDWR)]
    while held[-1] < 3:
        held.append(os.open(os.devnull, os.O_RDWR))
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def end_process(code: int) -> NoReturn:
    """End the command: run exit handlers, flush both streams, and exit.

    The interpreter is not finalised. Threads may still compute, and a thread that requests the
    interpreter's lock during finalisation would abort the process with "terminate called without an
    active exception". It also saves about a second. With FEATX_DEBUG=1 the interpreter exits as
    usual, for debuggers and profilers. Exit code 1 replaces 0 if stdout cannot be written, for
    example on a full disk.
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
                sys.stderr.write(f"{stream.name} cannot be written: {error.strerror}.\n")
                sys.stderr.flush()
            code = code or 1
    os._exit(code)


CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
"""Signals that end a process whose decoder accesses memory wrongly or aborts."""

_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that the kernel sends to a process when its parent dies."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of featx, to be used with `module_environment`."""
    # -P keeps the current folder off sys.path, where a types.py of the user would replace the
    # standard module.
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Environment in which a child imports the featx of this process, whatever its folder is."""
    home = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even while no Python code can run.

    Only Linux can do that; elsewhere a parent that is dead already ends this process.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before prctl; then no signal will come.
    if os.getppid() != parent:
        os._exit(1)
