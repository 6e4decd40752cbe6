"""Beginning and end of the command's process."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import NoReturn


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


def end_process(code: int) -> NoReturn:
    """End the command: run exit handlers, flush both streams, and exit.

    The interpreter is not finalised. Threads may still compute, and a thread that requests the
    interpreter's lock during finalisation would abort the process with "terminate called without an
    active exception". It also saves about a second. With FEATX_DEBUG=1 the interpreter exits as
    usual, for debuggers and profilers.

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
                sys.stderr.write(f"{stream.name} cannot be written: {error.strerror}.\n")
                sys.stderr.flush()
            code = code or 1
    os._exit(code)
