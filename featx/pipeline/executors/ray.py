"""executor=ray: actors on this machine or a cluster, each of which loads the backbone once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from featx.config import Config, Count, ExecutorConfig, Positive, options
from featx.errors import FeatxError, RunError
from featx.pipeline.executors.ray_cluster import (
    HeadWatch,
    check_cluster,
    connected,
    ray_module,
)
from featx.pipeline.executors.registry import EXECUTORS, Executor
from featx.pipeline.executors.worker import run_worker
from featx.pipeline.executors.worker_pool import RESUME_HINT, WorkerPool
from featx.pipeline.executors.worker_spec import PickledWorkerSpec, Session, WorkerSpec
from featx.pipeline.executors.worker_stats import RunOutcome
from featx.pipeline.run_context import RunContext
from featx.store import layout


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
    """Compute the missing parts in actors of a Ray cluster."""
    options = _options(context.config)
    with connected(ray_module(), options.address) as ray:
        return ActorPool(ray, spec, session, context.engine.device.type, options).run()


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
    """Return the options of this executor."""
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
    """Ray actor that computes parts until none is left."""

    def run(self, spec: PickledWorkerSpec, number: int, device: str) -> None:
        """Compute and commit parts on a type of device, such as 'cuda'."""
        run_worker(spec.open(), number, device)


class ActorPool(WorkerPool):
    """Actors of a Ray cluster."""

    def __init__(
        self, ray: Any, spec: WorkerSpec, session: Session, device: str, options: RayOptions
    ) -> None:
        gpus = options.gpus or 1.0 if device == "cuda" else 0.0
        resources, cpus = ray.cluster_resources(), options.num_cpus
        room = int(resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 0) / cpus)
        folder = session.root.absolute() / layout.JOBS
        super().__init__(spec, session, folder, options.workers or room, "actor")
        self._ray = ray
        self._device = device
        self._actor_type = ray.remote(num_cpus=cpus, num_gpus=gpus)(Actor)
        self._sent_spec = ray.put(PickledWorkerSpec(self.spec))
        self._actors: dict[int, Any] = {}
        self._calls: dict[int, Any] = {}  # number of an actor -> reference to its result
        self._head = HeadWatch(ray, options.address)

    def name(self, number: int) -> str:
        """Name of an actor: 'actor 0'."""
        return f"actor {number}"

    def start(self, numbers: Sequence[int]) -> None:
        """Start actors; they may have to wait for a node."""
        for number in numbers:
            actor = self._actors[number] = self._actor_type.remote()
            self._calls[number] = actor.run.remote(self._sent_spec, number, self._device)

    def ended(self) -> Mapping[int, str]:
        """Find the actors that have returned or died."""
        self._head.check()
        calls = {self._calls[number]: number for number in self.workers}
        found, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        return {
            calls[reference]: self._end_text(calls[reference], reference) for reference in found
        }

    def end_workers(self, grace_s: float) -> None:
        """Kill all actors."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors = {}

    def _end_text(self, number: int, reference: Any) -> str:
        """Return how an actor ended, and free its place."""
        try:
            self._ray.get(reference)
        # The actor raised an exception; any other RayError means that it died.
        except self._ray.exceptions.RayTaskError as error:
            cause = str(getattr(error, "cause", None) or error).rstrip(".")
            failed = RunError(f"{self.name(number)}: {cause}. {RESUME_HINT}")
            failed.add_note(str(error))
            raise failed from None
        except self._ray.exceptions.RayError as error:
            return f"died ({str(error).strip().splitlines()[0]})"
        finally:
            self._ray.kill(self._actors.pop(number))  # one that is unavailable may be alive
        return "has ended"
