"""executor=ray: actors on this machine or a cluster, each of which loads the backbone once."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from math import inf
from types import ModuleType

from featx.base import for_options, import_extra, log_message
from featx.config import Config, Count, ExecutorConfig, Positive, options
from featx.errors import ConfigError, RunError
from featx.pipeline.executors.job_folder import WorkerSpec, read_spec, shared_folder
from featx.pipeline.executors.registry import EXECUTORS, Executor
from featx.pipeline.executors.worker import run_worker
from featx.pipeline.executors.worker_pool import RESUME_HINT, WorkerPool
from featx.pipeline.output import Session
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import RunOutcome
from featx.storage import parse_path, s3_outage

CONNECT_S = 5.0
"""Seconds to wait for an answer of the head."""

HEAD_LOST_S = 30.0
"""Seconds without an answer of the head until the run ends.

Ray ends the process of the driver after 60 s, without a chance to say what to do.
"""


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
        return self.cpus or 1


def check(options: RayOptions, config: Config) -> None:
    """Check that Ray is installed and that its cluster answers at executor.address."""
    ray = import_ray()
    if options.gpus is not None and config.device == "cpu":
        raise ConfigError(
            f"executor.gpus={options.gpus:g} has no effect with device=cpu; leave one of them out."
        )
    address = options.address
    if address is None:
        return
    if ray.is_initialized():
        raise ConfigError(
            f"executor.address={address} has no effect: this process is connected to a Ray cluster "
            "already. Leave it out, or call ray.shutdown() first."
        )
    try:  # Ray itself would try for minutes
        if address == "auto":
            # Ray has no public function that says which cluster that is without connecting to it.
            with contextlib.suppress(AttributeError, TypeError):  # another version of Ray
                address = ray._private.services.get_ray_address_from_environment(address, None)
        _try_connection(str(address))
    except OSError as error:
        raise _no_cluster(options.address, error) from error


def run(options: RayOptions, context: RunContext, session: Session, spec: WorkerSpec) -> RunOutcome:
    ray = import_ray()
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():  # a connection of the caller is used as it is and stays open
            connect(ray, options.address)
            stack.callback(ray.shutdown)
        return ActorPool(ray, spec, session, context.engine.device.type, options).run()


def import_ray() -> ModuleType:
    return import_extra("ray", "executor=ray", "Ray", "ray")


EXECUTORS.register(
    Executor(
        name="ray",
        help="Actors of a Ray cluster, or of a Ray that is started on this machine.",
        extra="ray",
        options=RayOptions,
        check=for_options("executor=ray", RayOptions, check),
        run=for_options("executor=ray", RayOptions, run),
    )
)


class Actor:
    """Ray actor that computes parts until none is left."""

    @s3_outage.waiting_limit()  # for the folder, which may be in a bucket
    def run(self, folder: str, number: int, device: str) -> None:
        """Compute and commit parts on a type of device, such as 'cuda'."""
        run_worker(read_spec(parse_path(folder)), number, device)


class ActorPool(WorkerPool):
    kind = "actor"

    def __init__(
        self, ray: ModuleType, spec: WorkerSpec, session: Session, device: str, options: RayOptions
    ) -> None:
        cpus, gpus = options.num_cpus, (options.gpus or 1) if device == "cuda" else 0
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(
            int(min(machine.get("CPU", 0) / cpus, machine.get("GPU", 0) / gpus if gpus else inf))
            for machine in machines
        )
        if not room:
            log_message(
                f"no machine of the Ray cluster has the {cpus} CPUs and {gpus:g} GPUs of an actor "
                "(executor.cpus, executor.gpus). Actors wait until one joins the cluster, which "
                "`ray status` shows.",
                level="warning",
            )
        folder = shared_folder(options, session)
        super().__init__(spec, session, folder, options.workers or room)
        self._ray = ray
        self._device = device
        self._actor_type = ray.remote(num_cpus=cpus, num_gpus=gpus)(Actor)
        self._actors: dict[int, tuple[object, object]] = {}  # with the reference to its result
        self._head, self._node = options.address or "", ""
        if not self._head.startswith("ray://"):
            # Without an address where the caller has connected as a client.
            with contextlib.suppress(AttributeError, RuntimeError):
                self._head = str(ray.get_runtime_context().gcs_address)
                self._node = str(ray.get_runtime_context().get_node_id())
        self._answered_at = time.monotonic()

    def start(self, numbers: Sequence[int]) -> None:
        """Start actors; they may have to wait for a node."""
        for number in numbers:
            actor = self._actor_type.remote()
            call = actor.run.remote(str(self.spec.folder), number, self._device)
            self._actors[number] = actor, call

    def ended(self) -> Mapping[int, str]:
        self._check_head()
        calls = {call: number for number, (_, call) in self._actors.items()}
        found, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        return {calls[call]: self._end_text(calls[call]) for call in found}

    def end_workers(self, grace_s: float) -> None:
        for actor, _ in self._actors.values():
            self._ray.kill(actor)
        self._actors = {}

    def _end_text(self, number: int) -> str:
        """Return how an actor ended, and free its place."""
        actor, call = self._actors.pop(number)
        try:
            self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            self._check_node()
            # A task error is an exception outside the work: featx is not installed, for example.
            is_raised = isinstance(error, self._ray.exceptions.RayTaskError)
            text = repr(error.cause) if is_raised else str(error).strip()
            return f"died ({text.splitlines()[0]})"
        finally:
            self._ray.kill(actor)  # one that is unavailable may be alive
        return "has ended"

    def _check_node(self) -> None:
        """Raise RunError if the node of this process has died, as Ray starts no actor then."""
        if self._node in [node["NodeID"] for node in self._ray.nodes() if not node["Alive"]]:
            raise RunError(
                "the raylet, Ray's process on this machine, has ended or does not answer; it may "
                f"have been killed because memory was short. {RESUME_HINT}"
            )

    def _check_head(self) -> None:
        """Raise RunError if the head of the cluster has not answered for long."""
        try:
            _try_connection(self._head)
            self._answered_at = time.monotonic()
        except OSError as error:
            lost_s = time.monotonic() - self._answered_at
            if lost_s >= HEAD_LOST_S:
                raise RunError(
                    f"the head of the Ray cluster at {self._head} has not answered for "
                    f"{lost_s:.0f} s ({error.strerror or error}). Nothing committed is lost; start "
                    "the cluster again and run the same command to resume."
                ) from error


def connect(ray: ModuleType, address: str | None) -> None:
    """Connect Ray to a cluster, or start one on this machine."""
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if address else {"include_dashboard": False}),
        )
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise _no_cluster(address, error) from error


def _try_connection(address: str) -> None:
    """Open and close a connection to host:port; do nothing for a text of another form."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _no_cluster(address: str | None, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"executor.address={address}: no Ray cluster answers there, or it wants a token "
        f"({reason}). `ray status` has to work in this shell; for a cluster with a token set "
        "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH. Leave the address out to start Ray on this "
        "machine."
    )
