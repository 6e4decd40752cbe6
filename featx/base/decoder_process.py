"""Child processes that decode images or videos, which may crash or hang without harm to the run."""

from __future__ import annotations

import signal
import subprocess

from featx.base.child_process import CRASHES, module_command, module_environment
from featx.types import ImageFault, Status


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
