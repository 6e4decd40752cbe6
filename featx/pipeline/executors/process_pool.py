"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from featx.base import module_command, module_environment
from featx.pipeline.executors.job_folder import SPEC, WorkerSpec
from featx.pipeline.executors.worker_pool import WorkerPool
from featx.pipeline.output import Session
from featx.storage import open_folder
from featx.types import Part

_NUM_LAST_LINES = 20
"""Number of lines of a worker's output that are repeated if it dies."""

_FOLDER_PREFIX = "featx-workers-"


@contextlib.contextmanager
def temporary_worker_folder() -> Iterator[Path]:
    """Temporary folder for workers; those that killed drivers of this user have left are deleted.

    The driver holds a lock on its folder from before the worker spec is in it. The kernel releases
    the lock when the driver dies.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*/*/{SPEC}"):
        folder = left.parent.parent
        with contextlib.suppress(OSError), _locked(folder):  # another user's, or a living driver's
            shutil.rmtree(folder)
    with (
        tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as name,
        contextlib.ExitStack() as stack,
    ):
        with contextlib.suppress(OSError):  # a file system without locks: no one deletes it
            stack.enter_context(_locked(Path(name)))
        yield Path(name)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; raises OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _blocked_sigint() -> Iterator[None]:
    """Start processes for which SIGINT waits until they unblock it.

    Python would print a traceback if it came while they import modules.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def worker_command(folder: Path, number: int, device: str) -> list[str]:
    """Command that starts a worker; the process id of a parent may follow."""
    return module_command("featx.pipeline.executors.worker", str(folder), str(number), device)


class ProcessPool(WorkerPool):
    """Processes of this machine, one for each device and each in a process group of its own.

    They hold the lock of the store and die with the driver, which prints their output with their
    name, unless `outlives_driver` is set.
    """

    poll_s = 0.2

    def __init__(
        self,
        spec: WorkerSpec,
        session: Session,
        folder: Path,
        devices: Sequence[str],
        command: Callable[[Path, int, str], list[str]] = worker_command,
    ) -> None:
        super().__init__(spec, session, folder, len(devices))
        self._devices = devices[: self.spec.num_workers]
        self._command = command
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._printed: dict[int, int] = {}  # number of a worker -> bytes of its log

    def name(self, number: int) -> str:
        return f"{self.kind} {number} ({self._device(number)})"

    def start(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            command = self._command(self.spec.folder, number, self._device(number))
            is_tied = not self.outlives_driver
            path = self._log(number)
            open_folder(path.parent).append(path, "")  # an error if the disk is full
            with path.open("ab") as log, _blocked_sigint():
                self._processes[number] = subprocess.Popen(
                    [*command, str(os.getpid())] if is_tied else command,
                    env=module_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A worker inherits the lock: no other run can start while a worker is alive.
                    pass_fds=(self.session.lock,) if is_tied else (),
                    process_group=0,  # Ctrl-C in the terminal reaches the driver only
                )

    def ended(self) -> Mapping[int, str]:
        """Print what the workers have printed, and find those that have ended."""
        # What a process printed before its end is in its log once it has ended.
        codes = {number: self._processes[number].poll() for number in self.workers}
        for number in self.workers:
            self._print_output(number)
        return {number: _end_text(code) for number, code in codes.items() if code is not None}

    def end_workers(self, grace_s: float) -> None:
        """Send SIGTERM, which lets a worker commit complete parts, or SIGKILL without a grace."""
        alive = [process for process in self._processes.values() if process.poll() is None]
        for process in alive:
            process.send_signal(signal.SIGTERM if grace_s else signal.SIGKILL)
        deadline = time.monotonic() + grace_s
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()) if grace_s else None)

    def advice(self, number: int, how: str, parts: Sequence[Part]) -> str:
        """Say what computes the part without workers, and what this one printed last."""
        lines = self._log(number).read_text(errors="replace").splitlines()[-_NUM_LAST_LINES:]
        text = "".join(f"\n  {line}" for line in lines)
        output = f" Its last lines of output:{text}" if lines else ""
        return f" With executor.workers=null this process computes the part.{output}"

    def _device(self, number: int) -> str:
        """Device of a worker, which is that of the worker that it replaces."""
        return self._devices[number % len(self._devices)]

    def _log(self, number: int) -> Path:
        return self.spec.folder / f"{number}.log"

    def _print_output(self, number: int) -> None:
        """Print the complete lines that a worker has printed since the last call."""
        if self.outlives_driver:
            return
        with self._log(number).open("rb") as log:
            log.seek(self._printed.get(number, 0))
            for line in log:
                if line.endswith(b"\n"):
                    text = line.decode(errors="replace").rstrip()
                    self.progress.log(f"{self.name(number)}: {text}")
                    self._printed[number] = log.tell()


def _end_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
