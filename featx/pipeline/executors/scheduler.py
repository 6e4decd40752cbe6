"""Scheduler: the bookkeeping of a run whose parts are computed by workers.

It knows which parts are missing, which worker has which part, in which part workers died, and what
the workers measured. An executor derives its own scheduler, which says how to start workers, how to
wait for events, and how to end workers.

There are two kinds of executors. Workers of `local` and `ray` ask for one part at a time and report
each commit. Tasks of `slurm` receive several neighbouring parts at their start and report at their
end only, so the driver looks for committed files. Both kinds call `part_committed`, and a part may
be committed by a worker that the scheduler does not know any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from featx.base import Progress
from featx.errors import TooManyFailuresError
from featx.pipeline.executors.worker_spec import Session, WorkerSpec
from featx.pipeline.executors.worker_stats import PartResult, ResultCollector, RunOutcome
from featx.pipeline.stop_signals import stop_signals
from featx.store import DRIVER, Heartbeat
from featx.types import Part

MAX_DEATHS = 3
"""Number of workers that may die in the same part, or without a part, until the run ends."""

RESUME_HINT = "Nothing committed is lost; run the same command again to resume."
"""Last sentence of errors that end a run."""

WorkerT = TypeVar("WorkerT")


class Scheduler(ABC, Generic[WorkerT]):
    """Parts and workers of a run in the driver; all methods run in the main thread.

    `WorkerT` is what the executor knows a worker by: any hashable object.

    Args:
        spec: worker spec for every worker.
        session: write session; records every committed part.
        parts: parts to compute, in order.
        num_workers: number of workers that share the parts.

    Attributes:
        spec: as given.
        session: as given.
        num_workers: as given.
        collector: results and measurements of the workers so far.
        progress: progress bar of the run; set by `work`.
        heartbeat: heartbeat of the driver, which `run` writes.
    """

    progress: Progress

    def __init__(
        self, spec: WorkerSpec, session: Session, parts: Sequence[Part], num_workers: int
    ) -> None:
        self.spec = spec
        self.session = session
        self.num_workers = num_workers
        self.heartbeat = Heartbeat(session.disk, DRIVER)
        self.collector = ResultCollector(sum(len(part) for part in parts))
        self._missing = {part.index: part for part in parts}
        self._queue = deque(parts)
        self._last: deque[Part] = deque()  # queued parts that are given to workers after all others
        self._assigned: dict[WorkerT, dict[int, Part]] = {}  # parts that are not yet committed
        self._holders: dict[int, WorkerT] = {}  # index of a part -> worker that has it
        self._deaths: Counter[int | None] = Counter()  # index of a part, or None -> dead workers

    # Abstract methods, and those that an executor may override

    @abstractmethod
    def start(self) -> None:
        """Start the workers, and announce each with `add_worker`."""

    @abstractmethod
    def handle_events(self) -> None:
        """Wait for events, at most about a second, and handle them.

        Events are reported with `worker_ready`, `part_committed` and `remove_worker`.
        """

    @abstractmethod
    def end_workers(self) -> None:
        """End all workers that are left; called once, whatever ends the run."""

    def is_active(self) -> bool:
        """Return whether `work` has to wait for further events."""
        return self.is_work_left()

    def stop(self, error: BaseException) -> None:
        """End the run with an error, at once unless a subclass gives the workers time to end."""
        raise error

    # Run loop

    def run(self) -> RunOutcome:
        """Compute all parts, with a heartbeat of the driver; return the outcome of the run.

        Raises:
            RunError: a worker failed, or MAX_DEATHS workers died in the same part.
            TooManyFailuresError: more images failed than max_failures allows.
            Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
        """
        with self.heartbeat:
            self.work()
        return self.collector.outcome(self.num_workers, self.spec)

    def work(self) -> None:
        """Start the workers and serve them until all parts are committed or the run fails."""
        session = self.session
        with (
            stop_signals() as stop,
            Progress(session.num_rows, session.num_committed) as self.progress,
        ):
            try:
                self.start()
                while self.is_active():
                    self.handle_events()
                    if stop:
                        self.stop(stop.interrupted())
            finally:
                self.end_workers()

    # Parts

    def is_work_left(self) -> bool:
        """Return whether a part is not yet committed, be it queued or assigned."""
        return bool(self._missing)

    def missing(self) -> list[Part]:
        """Parts that are not yet committed, in order."""
        return list(self._missing.values())

    @property
    def num_queued(self) -> int:
        """Number of parts in the queue, without those that are given to workers last."""
        return len(self._queue)

    def next_part(self) -> Part | None:
        """Take the next part out of the queue, or None if the queue is empty."""
        queue = self._queue or self._last
        return queue.popleft() if queue else None

    def take_queued(self) -> list[Part]:
        """Take all parts that are not yet committed out of the queue, in order of their rows."""
        parts = [*self._queue, *self._last]
        self._queue.clear()
        self._last.clear()
        missing = [part for part in parts if part.index in self._missing]
        return sorted(missing, key=lambda part: part.index)

    def put_back(self, parts: Sequence[Part], last: bool = False) -> None:
        """Queue parts again that a worker did not complete.

        Args:
            parts: the parts, in order.
            last: whether they are given to workers after all other parts, otherwise next.
        """
        (self._last if last else self._queue).extendleft(reversed(parts))

    def part_committed(self, result: PartResult, is_earlier: bool = False) -> None:
        """Record a committed part; end the run if too many images have failed.

        Args:
            result: result of the part.
            is_earlier: whether it is unknown when its worker was ready.
        """
        part, failures = result.part, result.failures
        self._missing.pop(part.index, None)
        holder = self._holders.pop(part.index, None)
        if holder is not None:
            self._assigned[holder].pop(part.index, None)
        self.session.record_commit(part, failures)
        self.heartbeat.set_failures(self.session.num_failed)
        self.worker_ready()
        self.collector.add(result, is_earlier)
        waited_s = result.waited_s / self.num_workers
        self.progress.step(len(part), len(failures), waited_s, is_earlier)
        try:
            self.collector.refuse_failures(self.spec, self.session)
        except TooManyFailuresError as error:
            self.stop(error)

    # Workers

    @property
    def workers(self) -> list[WorkerT]:
        """Workers that are alive as far as the driver knows."""
        return list(self._assigned)

    def add_worker(self, worker: WorkerT, parts: Sequence[Part] = ()) -> None:
        """Record a worker that was started.

        Args:
            worker: the worker.
            parts: parts that it received at its start.
        """
        self._assigned[worker] = {}
        for part in parts:
            self.assign(worker, part)

    def assign(self, worker: WorkerT, part: Part) -> None:
        """Record that a worker has received a part."""
        self._assigned[worker][part.index] = part
        self._holders[part.index] = worker

    def parts_of(self, worker: WorkerT) -> list[Part]:
        """Parts that a worker has received and that are not yet committed, in order."""
        parts = self._assigned[worker]
        return [parts[index] for index in sorted(parts)]

    def remove_worker(self, worker: WorkerT) -> list[Part]:
        """Record that a worker has ended; return its parts that are not yet committed, in order."""
        parts = self.parts_of(worker)
        for part in parts:
            del self._holders[part.index]
        del self._assigned[worker]
        return parts

    def worker_ready(self) -> None:
        """Start the clock of the run with the first worker that is ready."""
        if not self.collector.has_started:
            self.progress.begin()
            self.collector.start()

    def count_death(self, parts: Sequence[Part]) -> int:
        """Count a worker that died, or was lost, in some parts.

        Args:
            parts: parts that may be the reason; none if it died before it had a part.

        Returns:
            number of workers that died in the same part so far.
        """
        indices: list[int | None] = [part.index for part in parts]
        for index in indices or [None]:
            self._deaths[index] += 1
        return max(self._deaths[index] for index in indices or [None])

    def has_deaths(self, parts: Sequence[Part]) -> bool:
        """Return whether a worker died in one of some parts."""
        return any(self._deaths[part.index] for part in parts)
