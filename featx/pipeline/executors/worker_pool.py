"""Worker processes of this machine as the driver sees them: all draw parts from one queue.

A worker that dies is replaced and its parts are computed again; a worker that reports an error ends
the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO

from featx import errors
from featx.base import module_command, module_environment
from featx.errors import FeatxError, InternalError, RunError
from featx.pipeline.executors.local_worker import STOP
from featx.pipeline.executors.part_worker import rows_text
from featx.pipeline.executors.scheduler import MAX_DEATHS, RESUME_HINT, Scheduler
from featx.pipeline.executors.worker_spec import Session, WorkerSpec
from featx.pipeline.executors.worker_stats import PartResult, WorkerStats
from featx.pipeline.stop_signals import GRACE_S
from featx.store import clear_heartbeat, heartbeat_name
from featx.types import Part

_LISTEN_S = 0.2
"""Seconds to wait for messages until workers that ended without one are looked for."""

_NUM_LAST_LINES = 20
"""Number of lines of a worker's output that are repeated if it dies."""

COMMAND = tuple(module_command("featx.pipeline.executors.local_worker"))
"""Command that starts a worker.

-P keeps the current folder off sys.path until the worker receives the path of the driver.
"""


@dataclass(eq=False)
class _Worker:
    """Worker process as seen by the driver.

    Attributes:
        number: index of the worker.
        device: device that it computes on.
        process: process handle; its stdout carries stderr as well.
        connection: socket for messages.
        is_ready: whether it has reported that it can compute.
        is_waiting: whether it waits for an answer to its request for a part.
        is_finished: whether it has reported its end, or is no longer needed.
        is_closed: whether its end of the socket is closed.
        incomplete_line: last line of its output as long as it is incomplete.
        last_lines: last complete lines of its output.
    """

    number: int
    device: str
    process: subprocess.Popen[bytes]
    connection: Connection
    is_ready: bool = False
    is_waiting: bool = False
    is_finished: bool = False
    is_closed: bool = False
    incomplete_line: bytes = b""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_NUM_LAST_LINES))

    def __str__(self) -> str:
        return f"worker {self.number} ({self.device})"

    @property
    def output(self) -> IO[bytes]:
        """Pipe from which stdout and stderr of the worker are read."""
        if self.process.stdout is None:
            raise InternalError("a worker was started without a pipe for its output")
        return self.process.stdout

    def close(self) -> None:
        """Close the pipe and the socket of a process that has ended."""
        self.output.close()
        self.connection.close()


class WorkerPool(Scheduler[_Worker]):
    """Worker processes of this machine.

    A worker receives its next part while it computes one, so it may have several. A part in which a
    worker died is assigned alone from then on, so that another death is known to belong to it.

    Args:
        spec: worker spec for every worker.
        devices: device of each worker.
        session: write session of the store; records every committed part.
        parts: parts to compute, in order.
        command: command that starts a worker.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        devices: Sequence[str],
        session: Session,
        parts: Sequence[Part],
        command: Sequence[str] = COMMAND,
    ) -> None:
        super().__init__(spec, session, parts, len(devices))
        self._devices = devices
        self._command = command
        self._error: BaseException | None = None
        self._deadline = 0.0

    def work(self) -> None:
        """Start the workers and serve them until all parts are committed or the run fails."""
        super().work()
        if self._error is not None:
            raise self._error

    def start(self) -> None:
        """Start one worker per device."""
        for number, device in enumerate(self._devices):
            self._start_worker(number, device)

    def is_active(self) -> bool:
        """Return whether a worker is alive; after an error, for GRACE_S seconds only."""
        is_late = self._error is not None and time.monotonic() > self._deadline
        return bool(self.workers) and not is_late

    def handle_events(self) -> None:
        """Handle messages and output of the workers, and then look after each of them."""
        sources: list[Connection | int] = []
        owners: dict[object, _Worker] = {}
        for worker in self.workers:
            if not worker.is_closed:
                sources.append(worker.connection)
                owners[worker.connection] = worker
            sources.append(worker.output.fileno())
            owners[worker.output.fileno()] = worker
        for event in wait(sources, _LISTEN_S):
            worker = owners[event]
            if event is worker.connection:
                self._receive(worker)
            else:
                self._read_output(worker)
        for worker in self.workers:
            self._serve_or_replace(worker)

    def stop(self, error: BaseException) -> None:
        """Ask the workers to commit complete parts and end; `work` raises the error afterwards."""
        if self._error is not None:
            return
        self._error = error
        self._deadline = time.monotonic() + GRACE_S  # workers that hang are killed after that
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.connection.send(STOP)
            if not worker.is_ready:
                worker.process.kill()

    def end_workers(self) -> None:
        """Kill all workers, wait for them, and record the parts that they committed before."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            self._receive(worker)
            worker.close()
            clear_heartbeat(self.session.disk, heartbeat_name(worker.process.pid))

    def _start_worker(self, number: int, device: str) -> None:
        """Start a worker; it asks for parts once it has reported that it is ready."""
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), str(os.getpid())],
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A worker inherits the lock: no other run can start while a worker is alive.
                pass_fds=(theirs.fileno(), self.session.lock),
                process_group=0,  # Ctrl-C in the terminal reaches the driver only
            )
        worker = _Worker(number, device, process, ours)
        # The driver serves all workers in one thread, so it must never wait for the output of one.
        os.set_blocking(worker.output.fileno(), False)
        self.add_worker(worker)
        with contextlib.suppress(BrokenPipeError):  # `_serve_or_replace` handles a dead worker
            ours.send([os.path.abspath(folder) for folder in sys.path])  # noqa: PTH100 - '' too
            ours.send((self.spec, device))

    def _receive(self, worker: _Worker) -> None:
        """Handle every message that has arrived from a worker."""
        try:
            while worker.connection.poll():
                kind, *values = worker.connection.recv()
                # local_worker defines the kinds: ready, request, committed, failed and finished.
                getattr(self, f"_on_{kind}")(worker, *values)
        except (EOFError, OSError):
            worker.is_closed = True

    def _on_ready(self, worker: _Worker) -> None:
        """Start the clock of the run with the first worker that is ready."""
        worker.is_ready = True
        self.worker_ready()

    def _on_request(self, worker: _Worker, waits: bool) -> None:
        """Answer a request for a part, at once or in `_serve_or_replace`."""
        if waits:
            worker.is_waiting = True  # answered in `_serve_or_replace`
        else:
            self._send_part(worker, self._part_for(worker))

    def _on_committed(self, worker: _Worker, result: PartResult) -> None:
        """Record a committed part."""
        self.part_committed(result)

    def _on_failed(self, worker: _Worker, kind: str, text: str, trace: str, at: str) -> None:
        """End the run with the error that a worker reported.

        Exceptions of featx are raised again with their type, all others as RunError.

        Args:
            worker: worker that failed.
            kind: class name of its exception.
            text: message of its exception.
            trace: traceback, added as a note.
            at: parts that it was computing, as text.
        """
        worker.is_finished = True
        found = getattr(errors, kind, None)
        known = isinstance(found, type) and issubclass(found, FeatxError)
        what = text if known else f"{kind}: {text}. {RESUME_HINT}"
        error = (found if known and found else RunError)(f"{worker}, {at}: {what}")
        error.add_note(trace)
        self.stop(error)

    def _on_finished(self, worker: _Worker, worker_stats: WorkerStats) -> None:
        """Add the measurements of a worker that has ended."""
        worker.is_finished = True
        self.collector.worker_stats.add(worker_stats)

    def _part_for(self, worker: _Worker) -> Part | None:
        """Part to assign to a worker now; None if it has to wait or no part is left."""
        if self._error is not None:
            return None
        if parts := self.parts_of(worker):
            # Keep the last parts for workers without one.
            are_few = self.num_queued <= len(self.workers)
            if are_few or self.has_deaths(parts):
                return None
        return self.next_part()

    def _send_part(self, worker: _Worker, part: Part | None) -> None:
        """Send a part, or None, to a worker that requested one."""
        if part is not None:
            self.assign(worker, part)
        with contextlib.suppress(OSError):  # `_serve_or_replace` handles a dead worker
            worker.connection.send(part)

    def _serve_or_replace(self, worker: _Worker) -> None:
        """Answer a worker that waits; replace one that died."""
        if worker.is_waiting:
            part = self._part_for(worker)
            # Parts of other workers return to the queue if those workers die.
            if part is not None or not self.is_work_left() or self._error is not None:
                worker.is_waiting = False
                self._send_part(worker, part)
        elif not worker.is_ready and not self.is_work_left():
            worker.process.kill()  # it is still loading the model, and no part is left for it
            worker.is_finished = True
        if worker.process.poll() is not None:
            # What the process sent before its end is still in the socket and the pipe.
            self._receive(worker)
            self._read_output(worker)
            parts = self.remove_worker(worker)
            worker.close()
            clear_heartbeat(self.session.disk, heartbeat_name(worker.process.pid))
            if not worker.is_finished and self._error is None:
                self._replace(worker, parts)

    def _replace(self, worker: _Worker, parts: Sequence[Part]) -> None:
        """Start another worker for one that died, or end the run after MAX_DEATHS deaths.

        Args:
            worker: worker that died.
            parts: parts that it had.
        """
        self.collector.is_complete = False  # a worker reports its measurements at its end
        num_deaths = self.count_death(parts)
        self.put_back(parts, last=True)
        where = f"in {rows_text(parts)}" if parts else "before it had a part"
        how = f"{worker} {_end_text(worker.process.returncode)} {where}"
        if num_deaths < MAX_DEATHS:
            self.progress.log(f"{how}; another one takes its place")
            self._start_worker(worker.number, worker.device)
            return
        lines = "\n".join(f"  {line}" for line in worker.last_lines)
        output = f" Its last lines of output:\n{lines}" if lines else ""
        self.stop(
            RunError(
                f"{how}, the {num_deaths}rd worker that did. {RESUME_HINT} With "
                f"executor.workers=null this process computes the part.{output}"
            )
        )

    def _read_output(self, worker: _Worker) -> None:
        """Print the output of a worker, line by line, with its name."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(worker.output.fileno(), 1 << 16):
                *lines, worker.incomplete_line = (worker.incomplete_line + data).split(b"\n")
                for line in lines:
                    text = line.decode(errors="replace").rstrip()
                    worker.last_lines.append(text)
                    self.progress.log(f"{worker}: {text}")


def _end_text(code: int) -> str:
    """Return how a process ended, as text."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
