"""Run a command with the featx of a checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def run_in_checkout(
    command: list[str], checkout: Path, cwd: Path, on_one_cpu: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command that imports featx from a checkout.

    Args:
        command: program and arguments.
        checkout: folder that holds the package.
        cwd: folder to run in. It is no checkout, whose featx would be imported.
        on_one_cpu: whether all threads run on one CPU, where the system supports it.

    Returns:
        Exit code and output as text; nothing is raised if the command fails.
    """

    def take_one_cpu() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=take_one_cpu if on_one_cpu else None,
    )
