"""Child processes that run a module of featx."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from featx.types import ImageFault, Status

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


def start_decoder(module: str, stderr: int) -> subprocess.Popen[bytes]:
    """Start a module of featx that decodes what it reads from stdin, and answers on stdout.

    Args:
        module: name of the module.
        stderr: `subprocess.PIPE` or `subprocess.DEVNULL`.
    """
    return subprocess.Popen(
        module_command(module),
        env=module_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        bufsize=0,
    )


def check_decoder_end(returncode: int, what: str) -> None:
    """Raise the exception of a decoder's process that a signal ended; return for other ends.

    Args:
        returncode: return code of the process, which is negative for a signal.
        what: what it decodes, for the message.

    Raises:
        ImageFault: a crash ended it, which is the fault of the image.
        MemoryError: it was killed, as the kernel does when memory is exhausted.
    """
    if -returncode in CRASHES:
        name = signal.Signals(-returncode).name
        message = f"decoding it ends the process with {name}, also in a subprocess"
        raise ImageFault(Status.CRASHES_DECODER, message, name)
    if returncode == -signal.SIGKILL:
        raise MemoryError(f"the process that decodes {what} was killed")


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even while no Python code can run.

    Only Linux can do that; elsewhere a parent that is dead already ends this process.

    Args:
        parent: process id of the parent.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before prctl; then no signal will come.
    if os.getppid() != parent:
        os._exit(1)
