"""executor=local with workers: one worker process per device; all draw parts from one queue.

The driver holds the lock of the store, assigns parts, and records committed ones. A worker that
dies is replaced and its parts are computed again; a worker that reports an error ends the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from featx import errors
from featx.base.child_process import module_command, module_environment
from featx.base.console import log_message
from featx.base.machine import num_cpus
from featx.base.progress import Progress
from featx.base.supervisor import CRASHES, MAX_CRASHES
from featx.config.run_config import Config
from featx.errors import FeatxError, RunError, TooManyFailuresError
from featx.images.crash_journal import was_decoding
from featx.pipeline.executors.local_worker import STOP
from featx.pipeline.executors.part_worker import rows_text
from featx.pipeline.executors.worker_spec import Session, WorkerSpec
from featx.pipeline.executors.worker_stats import (
    PartResult,
    ResultCollector,
    RunOutcome,
    WorkerStats,
)
from featx.pipeline.run_context import RunContext
from featx.pipeline.stop_signals import GRACE_S, Interrupted, stop_signals
from featx.store.heartbeat import Heartbeat, clear_sign, sign_name
from featx.types import Part

MAX_DEATHS = 3
"""Number of workers that may die in the same part, or without a part, until the run ends."""

_LISTEN_S = 0.2
_LAST_WORDS = 20

COMMAND = tuple(module_command("featx.pipeline.executors.local_worker"))
"""Command that starts a worker.

-P keeps the current folder off sys.path until the worker receives the path of the driver.
"""


def check(config: Config) -> None:
    """Do nothing: this executor needs no further package."""


def run(context: RunContext, session: Session, order: WorkerSpec) -> RunOutcome:
    """Compute the missing parts in worker processes.

    Args:
        context: run context of the driver.
        session: write session of the store or statistics.
        order: worker spec for every worker.

    Returns:
        outcome of the run, over all workers.

    Raises:
        RunError: a worker failed, or MAX_DEATHS workers died in the same part.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """
    parts = session.missing()
    devices = [str(device) for device in context.devices]
    _warn(context, len(devices))
    pool = WorkerPool(order, devices[: len(parts)], session, parts)
    with Heartbeat(session.disk, "driver"):
        pool.work()
    return pool.collector.outcome(len(devices[: len(parts)]), order)


def _warn(context: RunContext, num_workers: int) -> None:
    """Warn about too many threads, and about GPUs of different models."""
    threads = context.at_once.threads or 0
    if threads * num_workers > num_cpus():
        log_message(
            f"warning: {num_workers} workers of {threads} threads share {num_cpus()} "
            "CPUs. The store was begun with so many threads each, and the last bits of its rows "
            "depend on them; overwrite=true begins anew with fewer."
        )
    if context.engine.device.type == "cuda":
        import torch

        models = {torch.cuda.get_device_name(device) for device in context.devices}
        if len(models) > 1:
            log_message(
                f"warning: the devices differ ({', '.join(sorted(models))}); rows that one or the "
                "other computes may differ in their last bits."
            )


@dataclass
class _Worker:
    """Worker process as seen by the driver.

    Attributes:
        number: index of the worker.
        device: device that it computes on.
        process: process handle; its stdout carries stderr as well.
        connection: socket for messages.
        held: index -> part, for parts that it received and has not reported as committed.
        ready: whether it has reported that it can compute.
        waits: whether it waits for an answer to its request for a part.
        finished: whether it has reported its end, or is no longer needed.
        closed: whether its end of the socket is closed.
        rest: last line of its output as long as it is incomplete.
        words: last lines of its output.
    """

    number: int
    device: str
    process: subprocess.Popen[bytes]
    connection: Connection
    held: dict[int, Part] = field(default_factory=dict)
    ready: bool = False
    waits: bool = False
    finished: bool = False
    closed: bool = False
    rest: bytes = b""
    words: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_WORDS))

    def __str__(self) -> str:
        return f"worker {self.number} ({self.device})"

    def close(self) -> None:
        """Close the pipe and the socket of a process that has ended."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.connection.close()

    @property
    def output(self) -> int:
        """File descriptor from which stdout and stderr of the worker are read."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()


class WorkerPool:
    """Workers of a run and the queue of its parts; all methods run in the main thread.

    A part in which a worker died is assigned alone from then on, so that another death is known to
    belong to it.

    Args:
        order: worker spec for every worker.
        devices: device of each worker.
        session: write session of the store; records every committed part.
        parts: parts to compute, in order.
        command: command that starts a worker.

    Attributes:
        collector: results and measurements of the workers so far.
    """

    def __init__(
        self,
        order: WorkerSpec,
        devices: Sequence[str],
        session: Session,
        parts: Sequence[Part],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.collector = ResultCollector(sum(len(part) for part in parts))
        self._order = order
        self._devices = devices
        self._session = session
        self._command = command
        self._pending = deque(parts)
        self._crash_list: deque[Part] = (
            deque()
        )  # parts of workers that died, assigned last and alone
        self._deaths: Counter[int] = Counter()  # index of a part -> workers that died in it
        self._idle_deaths = self._crashes = 0
        self._workers: list[_Worker] = []
        self._ending: BaseException | None = None

    def work(self) -> None:
        """Start the workers and serve them until all parts are committed or the run fails."""
        session = self._session
        with (
            stop_signals() as stop,
            Progress(session.rows_asked, session.rows_done) as self._progress,
            self._reap_workers(),
        ):
            for number, device in enumerate(self._devices):
                self._start(number, device)
            while self._workers:
                self._listen()
                for worker in list(self._workers):
                    self._look_after(worker)
                if stop:
                    self._end(Interrupted(stop[0]))
                if self._ending is not None and time.monotonic() > self._deadline:
                    break
        if self._ending is not None:
            raise self._ending

    def _start(self, number: int, device: str) -> None:
        """Start a worker; it asks for parts once it has reported that it is ready."""
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), str(os.getpid())],
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A worker inherits the lock: no other run can start while a worker still lives.
                pass_fds=(theirs.fileno(), self._session.lock),
                process_group=0,  # Ctrl-C in the terminal reaches the driver only
            )
        worker = _Worker(number, device, process, ours)
        # The driver serves all workers in one thread, so it must never wait for the output of one.
        os.set_blocking(worker.output, False)
        self._workers.append(worker)
        with contextlib.suppress(BrokenPipeError):  # a dead worker is handled in `_look_after`
            ours.send([os.path.abspath(folder) for folder in sys.path])  # noqa: PTH100 - '' too
            ours.send((self._order, device))

    def _listen(self) -> None:
        """Wait up to _LISTEN_S seconds for messages and output of the workers, and handle them."""
        sources: dict[Any, _Worker] = {}
        for worker in self._workers:
            if not worker.closed:
                sources[worker.connection] = worker
            sources[worker.output] = worker
        for source in wait(list(sources), _LISTEN_S):
            worker = sources[source]
            if source is worker.connection:
                self._hear(worker)
            else:
                self._read_output(worker)

    def _hear(self, worker: _Worker) -> None:
        """Handle every message that has arrived from a worker."""
        try:
            while worker.connection.poll():
                kind, *values = worker.connection.recv()
                # local_worker defines the kinds of messages: ready, ask, done, failed and bye.
                getattr(self, f"_on_{kind}")(worker, *values)
        except (EOFError, OSError):
            worker.closed = True

    def _on_ready(self, worker: _Worker) -> None:
        """Start the clock of the run with the first worker that is ready."""
        worker.ready = True
        if not self.collector.begun:
            self.collector.begin()
            self._progress.begin()

    def _on_ask(self, worker: _Worker, waits: bool) -> None:
        """Answer a request for a part, at once or in `_look_after`."""
        if waits:
            worker.waits = True  # answered in `_look_after`
        else:
            self._give(worker, self._next_for(worker))

    def _on_done(self, worker: _Worker, done: PartResult) -> None:
        """Record a committed part."""
        del worker.held[done.part.index]
        self._session.committed(done.part, done.failures)
        self.collector.add(done)
        waited = done.waited / len(self._devices)
        self._progress.step(len(done.part), len(done.failures), waited)
        try:
            self.collector.refuse_failures(self._order, self._session)
        except TooManyFailuresError as error:
            self._end(error)

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
        worker.finished = True
        found = getattr(errors, kind, None)
        known = isinstance(found, type) and issubclass(found, FeatxError)
        what = text if known else f"{kind}: {text}"
        error = (found if known and found else RunError)(
            f"{worker}, {at}: {what}"
            + ("" if known else ". Nothing committed is lost; the same command goes on.")
        )
        error.add_note(trace)
        self._end(error)

    def _on_bye(self, worker: _Worker, worker_stats: WorkerStats) -> None:
        """Add the measurements of a worker that has ended."""
        worker.finished = True
        self.collector.worker_stats.add(worker_stats)

    def _next_for(self, worker: _Worker) -> Part | None:
        """Part to assign to a worker now; None if it has to wait or no part is left."""
        if self._ending is not None:
            return None
        if not worker.held:
            queue = self._pending or self._crash_list
            return queue.popleft() if queue else None
        alone = any(self._deaths[index] for index in worker.held)
        # Keep the last parts for workers without one.
        few = len(self._pending) <= len(self._workers)
        return None if alone or few else self._pending.popleft()

    def _give(self, worker: _Worker, part: Part | None) -> None:
        """Send a part, or None, to a worker that asked for one."""
        if part is not None:
            worker.held[part.index] = part
        with contextlib.suppress(OSError):  # a dead worker is handled in `_look_after`
            worker.connection.send(part)

    def _look_after(self, worker: _Worker) -> None:
        """Answer a worker that waits; replace one that died."""
        if worker.waits:
            part = self._next_for(worker)
            # Parts of other workers return to the queue if those workers die.
            others = any(other.held for other in self._workers)
            if part is not None or not others or self._ending is not None:
                worker.waits = False
                self._give(worker, part)
        elif not worker.ready and not self._is_work_left():
            worker.process.kill()  # it is still loading the model, and no part is left for it
            worker.finished = True
        if worker.process.poll() is not None:
            # What the process sent before its end is still in the socket and the pipe.
            self._hear(worker)
            self._read_output(worker)
            self._workers.remove(worker)
            worker.close()
            clear_sign(self._session.disk, sign_name(worker.process.pid))
            if not worker.finished and self._ending is None:
                self._replace(worker)

    def _is_work_left(self) -> bool:
        """Whether a part is queued or assigned to a worker."""
        queued = self._pending or self._crash_list
        return bool(queued) or any(worker.held for worker in self._workers)

    def _replace(self, worker: _Worker) -> None:
        """Start another worker for one that died, or end the run after MAX_DEATHS deaths."""
        self.collector.is_complete = False
        held = [worker.held[index] for index in sorted(worker.held)]
        # If a decoder crashed, the in-flight journal names the image and the next worker decodes it
        # in a subprocess, so the death does not count against the part.
        crashed = -worker.process.returncode in CRASHES
        decoding = crashed and was_decoding(self._session.root, worker.process.pid)
        self._crashes += decoding
        counts = not decoding or self._crashes > MAX_CRASHES
        for part in reversed(held):
            self._deaths[part.index] += counts
            self._crash_list.appendleft(part)
        self._idle_deaths += counts and not held
        deaths = max([self._deaths[part.index] for part in held], default=self._idle_deaths)
        where = f"in {rows_text(held)}" if held else "before it had a part"
        how = f"{worker} {_how(worker.process.returncode)} {where}"
        if deaths < MAX_DEATHS:
            self._progress.tell(f"{how}; another one takes its place")
            self._start(worker.number, worker.device)
            return
        words = "\n".join(f"  {line}" for line in worker.words)
        said = f" Its last words:\n{words}" if words else ""
        self._end(
            RunError(
                f"{how}, the {deaths}rd worker that did. Nothing committed is lost, and the same "
                f"command tries again; with executor.workers=null the part is computed here.{said}"
            )
        )

    def _read_output(self, worker: _Worker) -> None:
        """Print the output of a worker, line by line, with its name."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(worker.output, 1 << 16):
                *lines, worker.rest = (worker.rest + data).split(b"\n")
                for line in lines:
                    text = line.decode(errors="replace").rstrip()
                    worker.words.append(text)
                    self._progress.tell(f"{worker}: {text}")

    def _end(self, error: BaseException) -> None:
        """Ask the workers to commit complete parts and end; `work` raises the error afterwards."""
        if self._ending is not None:
            return
        self._ending = error
        self._deadline = time.monotonic() + GRACE_S  # workers that hang are killed after that
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.send(STOP)
            if not worker.ready:
                worker.process.kill()

    @contextlib.contextmanager
    def _reap_workers(self) -> Iterator[None]:
        """Kill and wait for all workers when the block ends, whatever ends it."""
        try:
            yield
        finally:
            for worker in self._workers:
                worker.process.kill()
            for worker in self._workers:
                worker.process.wait()
                self._hear(worker)  # parts that it committed before
                worker.close()
                clear_sign(self._session.disk, sign_name(worker.process.pid))


def _how(code: int) -> str:
    """How a process ended, as text."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
