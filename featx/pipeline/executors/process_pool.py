"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from featx.base import module_command, module_environment
from featx.pipeline.executors.worker_pool import WorkerPool
from featx.pipeline.executors.worker_spec import Session, WorkerSpec
from featx.types import Part

_NUM_LAST_LINES = 20
"""Number of lines of a worker's output that are repeated if it dies."""


def worker_command(folder: Path, number: int, device: str) -> list[str]:
    """Command that starts a worker; the process id of a parent may follow."""
    return module_command("featx.pipeline.executors.worker", str(folder), str(number), device)


class ProcessPool(WorkerPool):
    """Processes of this machine, each in a process group of its own.

    They hold the lock of the store and die with the driver, unless they outlive it. Their output
    is printed with their name; that of processes that outlive the driver goes to a log file.

    Args:
        spec, session, folder, kind, outlives_driver: as for WorkerPool.
        devices: device of each worker.
        command: command that starts a worker, without the process id of its parent.
    """

    poll_s = 0.2

    def __init__(
        self,
        spec: WorkerSpec,
        session: Session,
        folder: Path,
        devices: Sequence[str],
        kind: str = "worker",
        outlives_driver: bool = False,
        command: Callable[[Path, int, str], list[str]] = worker_command,
    ) -> None:
        super().__init__(spec, session, folder, len(devices), kind, outlives_driver)
        self._devices = devices
        self._command = command
        self._device_of: dict[int, str] = {}
        self._processes: dict[int, _Process] = {}

    def name(self, number: int) -> str:
        """Name of a worker: 'worker 0 (cuda:0)'."""
        return f"{self.spec.kind} {number} ({self._device_of[number]})"

    def start(self, numbers: Sequence[int]) -> None:
        """Start a process for each number."""
        for number in numbers:
            used = Counter(self._device_of[each] for each in self.workers if each < number)
            device = self._device_of[number] = min(self._devices, key=lambda name: used[name])
            command = self._command(self.spec.folder, number, device)
            log = self.spec.folder / f"{number}.log" if self.spec.outlives_driver else None
            self._processes[number] = _Process(command, self.session.lock, log)

    def ended(self) -> Mapping[int, str]:
        """Print what the workers have printed, and find those that have ended."""
        # What a process printed before its end is in the pipe once it has ended.
        codes = {number: self._processes[number].popen.poll() for number in self.workers}
        for number in self.workers:
            self._print_output(number)
        return {number: _end_text(code) for number, code in codes.items() if code is not None}

    def end_workers(self, grace_s: float) -> None:
        """Send SIGTERM, which lets a worker commit complete parts, or SIGKILL without a grace."""
        alive = [each.popen for each in self._processes.values() if each.popen.poll() is None]
        for process in alive:
            process.send_signal(signal.SIGTERM if grace_s else signal.SIGKILL)
        deadline = time.monotonic() + grace_s
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()) if grace_s else None)
        if not grace_s:
            for each in self._processes.values():
                each.close()

    def advice(self, number: int, how: str, parts: Sequence[Part]) -> str:
        """Say what computes the part without workers, and what this one printed last."""
        self._print_output(number)
        lines = "\n".join(f"  {line}" for line in self._processes[number].last_lines)
        output = f" Its last lines of output:\n{lines}" if lines else ""
        return f" With executor.workers=null this process computes the part.{output}"

    def _print_output(self, number: int) -> None:
        """Print the complete lines that a worker has printed."""
        for line in self._processes[number].new_lines():
            self.progress.log(f"{self.name(number)}: {line}")


class _Process:
    """Process of a worker, with its output; one with a log file outlives the driver."""

    def __init__(self, command: Sequence[str], lock: int, log: Path | None) -> None:
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._incomplete = b""
        with contextlib.ExitStack() as stack:
            output = subprocess.PIPE if log is None else stack.enter_context(log.open("ab"))
            self.popen = subprocess.Popen(
                command if log is not None else [*command, str(os.getpid())],
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A worker inherits the lock: no other run can start while a worker is alive.
                pass_fds=() if log is not None else (lock,),
                process_group=0,  # Ctrl-C in the terminal reaches the driver only
            )
        self._output: IO[bytes] | None = self.popen.stdout
        if self._output is not None:
            # The driver looks after all workers in one thread, so it never waits for the output.
            os.set_blocking(self._output.fileno(), False)

    def new_lines(self) -> list[str]:
        """Complete lines that the process has printed since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while self._output and (data := os.read(self._output.fileno(), 1 << 16)):
                *lines, self._incomplete = (self._incomplete + data).split(b"\n")
                found += [line.decode(errors="replace").rstrip() for line in lines]
        self.last_lines += found
        return found

    def close(self) -> None:
        """Close the pipe of a process that has ended."""
        if self._output is not None:
            self._output.close()
            self._output = None


def _end_text(code: int) -> str:
    """Return how a process ended, as text."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
