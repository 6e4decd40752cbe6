"""Child processes that run a module of featx."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

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

    Args:
        parent: process id of the parent.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before prctl; then no signal will come.
    if os.getppid() != parent:
        os._exit(1)
