"""executor=ray: actors on this machine or a cluster, each of which loads the backbone once.

The driver holds the lock of the store (none exists in a bucket), gives each actor one part at a
time, and records committed parts. An actor that dies, or whose node does, is replaced and its part
is computed again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from featx.base.progress import Progress
from featx.config.run_config import Config
from featx.errors import ConfigError, MissingExtraError, RunError
from featx.pipeline.executors.part_worker import PartWorker, add_worker_context, rows_text
from featx.pipeline.executors.worker_spec import (
    PickledWorkerSpec,
    Session,
    WorkerSpec,
    worker_context,
)
from featx.pipeline.executors.worker_stats import (
    PartResult,
    ResultCollector,
    RunOutcome,
    WorkerStats,
)
from featx.pipeline.run_context import RunContext
from featx.pipeline.stop_signals import Interrupted, stop_signals
from featx.storage.s3_folder import open_folder
from featx.store.heartbeat import Heartbeat, clear_sign, clear_signs, sign_name
from featx.types import Part

WAIT_S = 0.5
"""Seconds to wait for results before signals are checked again."""

CONNECT_S = 10.0
"""Seconds to wait for an answer at executor.address."""

MAX_DEATHS = 3
"""Number of actors that may die in the same part, or before they are ready, until the run ends."""


def check(config: Config) -> None:
    """Check that Ray is installed and that its cluster answers.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: no cluster answers at executor.address.
    """
    _ray()
    host, _, port = (config.executor.address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():  # Ray itself would retry for many minutes
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except OSError as error:
            raise _no_cluster(config, error) from error


def run(context: RunContext, session: Session, order: WorkerSpec) -> RunOutcome:
    """Compute the missing parts in actors of a Ray cluster.

    Args:
        context: run context of the driver.
        session: write session of the store or statistics.
        order: worker spec for every actor.

    Returns:
        outcome of the run, over all actors.

    Raises:
        RunError: an actor failed; the message names its part and rows.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """
    with _cluster(context.config) as ray, Heartbeat(session.disk, "driver"):
        pool = Pool(ray, order, context, session)
        pool.work()
    return pool.collector.outcome(pool.size, order)


class Actor:
    """Ray actor that computes parts; it loads the backbone once.

    Args:
        order: worker spec.
        device: type of the device to compute on, such as 'cuda'.
    """

    def __init__(self, order: PickledWorkerSpec, device: str) -> None:
        self._order = order
        self._device = device
        self._name = f"actor {os.getpid()} on {device}"
        self._stack = contextlib.ExitStack()
        self._work: PartWorker | None = None
        self._done: list[PartResult] = []

    def ready(self) -> str:
        """Build the run context; return the name of the heartbeat file of this process."""
        with add_worker_context(self._name, lambda: rows_text([])):
            order = self._order.open()
            heartbeat = Heartbeat(open_folder(order.root), f"actor on {self._device}", order.driver)
            self._stack.enter_context(heartbeat)
            context = self._stack.enter_context(worker_context(order, self._device))
            self._work = PartWorker(context, order, self._done.append, heartbeat)
        return sign_name(os.getpid())

    def do(self, part: Part) -> tuple[list[PartResult], WorkerStats]:
        """Compute and commit a part.

        Returns:
            results since the last call, and the measurements of this part.
        """
        assert self._work is not None, "the actor is not ready"
        with add_worker_context(self._name, lambda: rows_text([part])):
            worker_stats = self._work.do(iter([part]))
        done = list(self._done)
        self._done.clear()
        return done, worker_stats

    def leave(self) -> None:
        """Release the model and the heartbeat."""
        self._stack.close()


@dataclass
class _Hand:
    """Actor as seen by the driver.

    Attributes:
        handle: handle of Ray.
        sign: name of its heartbeat file once it is ready, otherwise None.
    """

    handle: Any
    sign: str | None = None


class Pool:
    """Actors of a run and the queue of its parts.

    Args:
        ray: the module, connected to a cluster.
        order: worker spec for every actor.
        context: run context of the driver.
        session: write session of the store or statistics.

    Attributes:
        collector: results and measurements of the actors so far.
        size: number of actors.
    """

    def __init__(self, ray: Any, order: WorkerSpec, context: RunContext, session: Session) -> None:
        keys = context.config.executor
        self._pending = deque(session.missing())
        self.collector = ResultCollector(sum(len(part) for part in self._pending))
        self._asked = order
        self._device = context.engine.device.type
        gpus = keys.gpus or 1.0 if self._device == "cuda" else 0.0
        there = ray.cluster_resources()
        room = int(there.get("GPU", 0) / gpus if gpus else there.get("CPU", 0) / keys.num_cpus)
        self.size = min(keys.workers or max(1, room), len(self._pending))
        self._kind = ray.remote(num_cpus=keys.num_cpus, num_gpus=gpus)(Actor)
        self._order = ray.put(PickledWorkerSpec(order))
        self._ray, self._session = ray, session
        # Reference to a pending result -> actor, and its part or None until the actor is ready.
        self._at: dict[Any, tuple[_Hand, Part | None]] = {}
        self._idle: list[_Hand] = []
        self._deaths: Counter[int | None] = Counter()

    def work(self) -> None:
        """Start the actors and serve them until every part is committed."""
        session = self._session
        with (
            stop_signals() as stop,
            Progress(session.rows_asked, session.rows_done) as self._progress,
        ):
            try:
                for _ in range(self.size):
                    self._start()
                while self._is_work_left():
                    ended, _ = self._ray.wait(list(self._at), num_returns=1, timeout=WAIT_S)
                    for reference in ended:
                        self._take(reference)
                    if stop:
                        raise Interrupted(stop[0])
            finally:
                self._dismiss()

    def _is_work_left(self) -> bool:
        """Whether a part is queued or being computed."""
        return bool(self._pending) or any(part is not None for _, part in self._at.values())

    def _start(self) -> None:
        """Start an actor; it gets a part when it is ready, which may have to wait for a node."""
        hand = _Hand(self._kind.remote(self._order, self._device))
        self._at[hand.handle.ready.remote()] = hand, None

    def _give(self, hand: _Hand) -> None:
        """Assign the next part to an actor, or let it idle if none is queued now."""
        if self._pending:
            part = self._pending.popleft()
            self._at[hand.handle.do.remote(part)] = hand, part
        else:
            self._idle.append(hand)

    def _take(self, reference: Any) -> None:
        """Handle the result of an actor, and assign its next part."""
        hand, part = self._at.pop(reference)
        try:
            result = self._ray.get(reference)
        # The actor raised an exception; any other RayError below means that it died.
        except self._ray.exceptions.RayTaskError as error:
            said = str(getattr(error, "cause", None) or error).rstrip(".")
            told = RunError(f"{said}. Nothing committed is lost; the same command goes on.")
            told.add_note(str(error))
            raise told from None
        except self._ray.exceptions.RayError as error:
            if hand.sign is not None:
                clear_sign(self._session.disk, hand.sign)
            self._replace(part, str(error).strip().splitlines()[0])
            return
        if part is None:
            hand.sign = result
            if not self.collector.begun:
                self._progress.begin()
            self.collector.begin()
        else:
            done, worker_stats = result
            for each in done:
                self._session.committed(each.part, each.failures)
                self.collector.add(each)
                waited = each.waited / self.size
                self._progress.step(len(each.part), len(each.failures), waited)
                self.collector.refuse_failures(self._asked, self._session)
            self.collector.worker_stats.add(worker_stats)
        self._give(hand)

    def _replace(self, part: Part | None, reason: str) -> None:
        """Give the part of a dead actor to another one, or end the run after MAX_DEATHS deaths."""
        index = None if part is None else part.index
        self._deaths[index] += 1
        where = rows_text([] if part is None else [part])
        if self._deaths[index] >= MAX_DEATHS:
            raise RunError(
                f"{MAX_DEATHS} actors died in {where}: {reason} Nothing committed is lost, and "
                "the same command tries again."
            )
        self._progress.tell(f"an actor died in {where} ({reason}); another one takes its place")
        if part is not None:
            self._pending.appendleft(part)
        if self._idle:
            self._give(self._idle.pop())  # a full cluster may have no room for a new actor
        else:
            self._start()

    def _dismiss(self) -> None:
        """Kill all actors, whatever ends the run."""
        for hand in (*self._idle, *(hand for hand, _ in self._at.values())):
            self._ray.kill(hand.handle)
        # This covers actors that were not ready, whose heartbeat names are unknown here.
        clear_signs(self._session.disk, self._asked.driver)


@contextlib.contextmanager
def _cluster(config: Config) -> Iterator[Any]:
    """Connect Ray to the cluster of the config, or start one on this machine.

    A connection of the caller is used as it is and stays open.
    """
    ray = _ray()
    ours = not ray.is_initialized()
    if ours:
        address = config.executor.address
        try:
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if address else {"include_dashboard": False}),
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(config, error) from error
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def _no_cluster(config: Config, error: Exception) -> ConfigError:
    """Error for an address at which no cluster answers."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"executor.address={config.executor.address}: no Ray cluster answers there ({reason}). "
        "Leave it out to start one on this machine."
    )


def _ray() -> Any:
    """Import Ray.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError('executor=ray needs Ray: pip install "featx[ray]".') from error
    return ray
