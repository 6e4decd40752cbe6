"""executor=ray: actors on this machine or a cluster, each of which loads the backbone once.

The driver holds the lock of the store (none exists in a bucket), gives each actor one part at a
time, and records committed parts. An actor that dies, or whose node does, is replaced and its part
is computed again.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from featx.base import own_process
from featx.config import Config, Count, ExecutorConfig, Positive, options
from featx.errors import FeatxError, InternalError, RunError
from featx.pipeline.executors.part_worker import PartWorker, add_worker_context, rows_text
from featx.pipeline.executors.ray_cluster import (
    HeadWatch,
    address_in_use,
    check_cluster,
    connected,
    ray_module,
)
from featx.pipeline.executors.registry import EXECUTORS, Executor
from featx.pipeline.executors.scheduler import MAX_DEATHS, RESUME_HINT, Scheduler
from featx.pipeline.executors.worker_spec import (
    PickledWorkerSpec,
    Session,
    WorkerSpec,
    worker_context,
)
from featx.pipeline.executors.worker_stats import PartResult, RunOutcome, WorkerStats
from featx.pipeline.run_context import RunContext
from featx.storage import open_folder
from featx.store import Heartbeat, clear_heartbeat, clear_heartbeats, heartbeat_name
from featx.types import Part

WAIT_S = 0.5
"""Seconds to wait for results before signals are checked again."""


def check(config: Config) -> None:
    """Check that Ray is installed and that its cluster answers.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: no cluster answers at executor.address.
    """
    ray = ray_module()
    if (address := _options(config).address) is not None:
        check_cluster(ray, address)


def run(context: RunContext, session: Session, spec: WorkerSpec) -> RunOutcome:
    """Compute the missing parts in actors of a Ray cluster.

    Args:
        context: run context of the driver.
        session: write session of the store or statistics.
        spec: worker spec for every actor.

    Returns:
        outcome of the run, over all actors.

    Raises:
        RunError: an actor failed; the message names its part and rows.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """
    with connected(ray_module(), _options(context.config).address) as ray:
        return ActorPool(ray, spec, context, session).run()


@options("executor")
class RayOptions(ExecutorConfig):
    """Options of executor=ray."""

    name: str = "ray"
    cpus: Count | None = None
    """Number of CPUs of each actor, 1 when not given; on a CPU also the number of threads that
    compute."""
    gpus: Positive | None = None
    """Number of GPUs of each actor if a GPU computes, 1 when not given; 0.5 puts two actors on each
    GPU."""
    address: str | None = None
    """Address of the Ray cluster, such as auto or ray://head:10001; null starts one on this
    machine."""

    @property
    def num_cpus(self) -> int:
        """Number of CPUs of each actor."""
        return self.cpus or 1


def _options(config: Config) -> RayOptions:
    """Return the options of this executor.

    Raises:
        FeatxError: the config has those of another executor.
    """
    if not isinstance(config.executor, RayOptions):
        raise FeatxError(f"executor=ray was given the options {config.executor}.")
    return config.executor


EXECUTORS.register(
    Executor(
        name="ray",
        help="Actors of a Ray cluster, or of a Ray that is started on this machine.",
        extra="ray",
        options=RayOptions,
        check=check,
        run=run,
    )
)


class Actor:
    """Ray actor that computes parts; it loads the backbone once.

    Args:
        spec: worker spec.
        device: type of the device to compute on, such as 'cuda'.
    """

    def __init__(self, spec: PickledWorkerSpec, device: str) -> None:
        own_process()
        self._spec = spec
        self._device = device
        self._name = f"actor {os.getpid()} on {device}"
        self._stack = contextlib.ExitStack()
        self._worker: PartWorker | None = None
        self._results: list[PartResult] = []

    def ready(self) -> str:
        """Build the run context; return the name of the heartbeat file of this process."""
        with add_worker_context(self._name, lambda: rows_text([])):
            spec = self._spec.open()
            heartbeat = Heartbeat(open_folder(spec.root), f"actor on {self._device}", spec.driver)
            self._stack.enter_context(heartbeat)
            context = self._stack.enter_context(worker_context(spec, self._device))
            self._worker = PartWorker(context, spec, self._results.append, heartbeat)
        return heartbeat_name(os.getpid())

    def compute(self, part: Part) -> tuple[list[PartResult], WorkerStats]:
        """Compute and commit a part.

        Returns:
            results since the last call, and the measurements of this part.
        """
        if self._worker is None:
            raise InternalError("the actor is not ready")
        with add_worker_context(self._name, lambda: rows_text([part])):
            worker_stats = self._worker.compute_parts(iter([part]))
        results = list(self._results)
        self._results.clear()
        return results, worker_stats

    def close(self) -> None:
        """Release the model and the heartbeat."""
        self._stack.close()


@dataclass(eq=False)
class _ActorHandle:
    """Actor as seen by the driver.

    Attributes:
        ray_handle: handle of Ray.
        heartbeat: name of its heartbeat file once it is ready, otherwise None.
    """

    ray_handle: Any
    heartbeat: str | None = None


class ActorPool(Scheduler[_ActorHandle]):
    """Actors of a Ray cluster; each has one part at a time.

    Args:
        ray: the module, connected to a cluster.
        spec: worker spec for every actor.
        context: run context of the driver.
        session: write session of the store or statistics.
    """

    def __init__(self, ray: Any, spec: WorkerSpec, context: RunContext, session: Session) -> None:
        options = _options(context.config)
        parts = session.missing()
        device = context.engine.device.type
        gpus = options.gpus or 1.0 if device == "cuda" else 0.0
        resources = ray.cluster_resources()
        cpus = options.num_cpus
        room = int(resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 0) / cpus)
        super().__init__(spec, session, parts, min(options.workers or max(1, room), len(parts)))
        self._device = device
        self._actor_type = ray.remote(num_cpus=cpus, num_gpus=gpus)(Actor)
        self._sent_spec = ray.put(PickledWorkerSpec(spec))
        self._ray = ray
        # Reference to a pending result -> actor, and its part or None until the actor is ready.
        self._calls: dict[Any, tuple[_ActorHandle, Part | None]] = {}
        self._idle: list[_ActorHandle] = []
        self._head = HeadWatch(address_in_use(ray, options.address))

    def start(self) -> None:
        """Start the actors."""
        for _ in range(self.num_workers):
            self._start_actor()

    def handle_events(self) -> None:
        """Wait up to WAIT_S seconds for the result of a call, and handle it.

        Raises:
            RunError: the head of the cluster has not answered for HEAD_LOST_S seconds.
        """
        self._head.check()
        ended, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=WAIT_S)
        for reference in ended:
            self._handle_result(reference)

    def end_workers(self) -> None:
        """Kill all actors."""
        for actor in self.workers:
            self._ray.kill(actor.ray_handle)
        # This covers actors that were not ready, whose heartbeat names are unknown here.
        clear_heartbeats(self.session.disk, self.spec.driver)

    def _start_actor(self) -> None:
        """Start an actor; it gets a part when it is ready, which may have to wait for a node."""
        actor = _ActorHandle(self._actor_type.remote(self._sent_spec, self._device))
        self.add_worker(actor)
        self._calls[actor.ray_handle.ready.remote()] = actor, None

    def _assign_next(self, actor: _ActorHandle) -> None:
        """Assign the next part to an actor, or let it idle if none is queued now."""
        part = self.next_part()
        if part is None:
            self._idle.append(actor)
            return
        self.assign(actor, part)
        self._calls[actor.ray_handle.compute.remote(part)] = actor, part

    def _handle_result(self, reference: Any) -> None:
        """Handle the result of a call, and assign the next part to its actor."""
        actor, part = self._calls.pop(reference)
        try:
            result = self._ray.get(reference)
        # The actor raised an exception; any other RayError below means that it died.
        except self._ray.exceptions.RayTaskError as error:
            cause = str(getattr(error, "cause", None) or error).rstrip(".")
            failed = RunError(f"{cause}. {RESUME_HINT}")
            failed.add_note(str(error))
            raise failed from None
        except self._ray.exceptions.RayError as error:
            self._replace(actor, str(error).strip().splitlines()[0])
            return
        if part is None:
            actor.heartbeat = result
            self.worker_ready()
        else:
            results, worker_stats = result
            for each in results:
                self.part_committed(each)
            self.collector.worker_stats.add(worker_stats)
        self._assign_next(actor)

    def _replace(self, actor: _ActorHandle, reason: str) -> None:
        """Give the part of a dead actor to another one, or end the run after MAX_DEATHS deaths."""
        if actor.heartbeat is not None:
            clear_heartbeat(self.session.disk, actor.heartbeat)
        parts = self.remove_worker(actor)
        where = rows_text(parts)
        if self.count_death(parts) >= MAX_DEATHS:
            raise RunError(f"{MAX_DEATHS} actors died in {where}: {reason} {RESUME_HINT}")
        self.progress.log(f"an actor died in {where} ({reason}); another one takes its place")
        self.put_back(parts)
        if self._idle:
            self._assign_next(self._idle.pop())  # a full cluster may have no room for a new actor
        else:
            self._start_actor()
