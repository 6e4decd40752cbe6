"""executor=slurm: a job array over the parts, by submitit; each task computes neighbouring parts.

The driver holds the lock of the store (none exists in a bucket), waits for the tasks, records the
parts that they commit, packs, and writes the summary.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from featx.config import (
    Config,
    Count,
    ExecutorConfig,
    Positive,
    options,
)
from featx.errors import ConfigError, FeatxError
from featx.pipeline.executors.registry import EXECUTORS, Executor
from featx.pipeline.executors.slurm_array import JobArray
from featx.pipeline.executors.slurm_queue import check_partition
from featx.pipeline.executors.slurm_task import SIGNAL_DELAY_S, submitit_module
from featx.pipeline.executors.worker_spec import Session, WorkerSpec
from featx.pipeline.executors.worker_stats import RunOutcome
from featx.pipeline.run_context import RunContext
from featx.storage import AtomicFolder
from featx.store import clear_heartbeats, layout

_ENDLESS = 10**9
"""Number of times that submitit may queue a task again after its time limit. `Task` has its own."""


DEFAULT_TIME_LIMIT_MIN = 240
"""Default of the option `time_limit_min` in minutes."""


@options("executor")
class SlurmOptions(ExecutorConfig):
    """Options of executor=slurm."""

    name: str = "slurm"
    cpus: Count | None = None
    """Number of CPUs of each task, 4 when not given; on a CPU also the number of threads that
    compute."""
    gres: str | None = None
    """Generic resources of each task as Slurm writes them, such as gpu:1; null asks for none."""
    partition: str | None = None
    """Partition of the cluster; null takes its default."""
    account: str | None = None
    """Account that is charged; null takes your default one."""
    memory_gib: Positive | None = None
    """Memory of each task in GiB; null takes the cluster's default."""
    time_limit_min: Count | None = None
    """Minutes that a task may run before its remaining parts are submitted again, 240 when not
    given. Several parts have to fit into this time, so part_rows=auto takes it into account."""
    folder: str | None = None
    """Folder that all machines see, for the descriptions and logs of tasks; null takes OUT/jobs.
    It has to be given if out is in an object store."""
    mode: Literal["slurm", "local"] | None = None
    """slurm (when not given), or local, which runs the tasks as processes of this machine to try
    the set-up."""

    @property
    def num_cpus(self) -> int:
        """Number of CPUs of each task."""
        return self.cpus or 4

    @property
    def shared_folder(self) -> str | None:
        """The option `folder`."""
        return self.folder

    @property
    def task_seconds(self) -> float | None:
        """Time limit of a task in seconds; None with mode=local."""
        if self.mode == "local":
            return None
        return 60.0 * (self.time_limit_min or DEFAULT_TIME_LIMIT_MIN)


def _options(config: Config) -> SlurmOptions:
    """Return the options of this executor.

    Raises:
        FeatxError: the config has those of another executor.
    """
    if not isinstance(config.executor, SlurmOptions):
        raise FeatxError(f"executor=slurm was given the options {config.executor}.")
    return config.executor


def check(config: Config) -> None:
    """Check that submitit, Slurm, its controller and the partition are available.

    Raises:
        MissingExtraError: submitit is not installed.
        ConfigError: this machine has no Slurm, or the cluster no such partition.
        RunError: the controller does not answer.
    """
    submitit_module()
    if _options(config).mode == "local":
        return
    if shutil.which("srun") is None:
        raise ConfigError(
            "executor=slurm: there is no Slurm on this machine (srun is not found). Start the "
            "command on a machine of the cluster; executor.mode=local runs the same path here."
        )
    check_partition(_options(config).partition)


def run(context: RunContext, session: Session, spec: WorkerSpec) -> RunOutcome:
    """Compute the missing parts in tasks of a job array.

    Args:
        context: run context of the driver.
        session: write session of the store or statistics.
        spec: worker spec for every task.

    Returns:
        outcome of the run, over all tasks.

    Raises:
        RunError: a task failed; the message names it, the part and its rows.
        Interrupted: SIGINT or SIGTERM arrived; the tasks were told to commit complete parts.
    """
    options = _options(context.config)
    folder = _folder_of_tasks(options, session)
    executor = _executor(options, folder)
    is_local = options.mode == "local"
    array = JobArray(spec, context, session, folder, executor, options, is_local=is_local)
    outcome = array.run()
    clear_heartbeats(session.disk, spec.driver)  # killed tasks leave their heartbeat files behind
    AtomicFolder(folder.parent).remove(folder)
    return outcome


EXECUTORS.register(
    Executor(
        name="slurm",
        help="Tasks of a Slurm job array, each over neighbouring parts.",
        extra="slurm",
        options=SlurmOptions,
        check=check,
        run=run,
    )
)


def _folder_of_tasks(options: SlurmOptions, session: Session) -> Path:
    """Folder for the pickled tasks, their results and logs.

    Raises:
        ConfigError: the folder of executor.folder cannot be created.
    """
    given = options.folder
    if given is None:
        return session.root / layout.JOBS
    folder = Path(given).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One folder per driver: a store in a bucket has no lock that keeps a second driver out.
        return Path(tempfile.mkdtemp(prefix="featx-", dir=folder))
    except OSError as error:
        raise ConfigError(
            f"executor.folder={given}: {error.strerror}. It holds the pickled tasks "
            "and their logs; choose a folder that all machines can write to."
        ) from error


def _executor(options: SlurmOptions, folder: Path) -> Any:
    """Executor of submitit with the resources that the options request."""
    mode = options.mode or "slurm"
    more = {"slurm_max_num_timeout": _ENDLESS} if mode == "slurm" else {}
    executor = submitit_module().AutoExecutor(folder=folder, cluster=mode, **more)
    limit_min = options.time_limit_min or DEFAULT_TIME_LIMIT_MIN
    parameters: dict[str, Any] = {
        "timeout_min": limit_min,
        "cpus_per_task": options.num_cpus,
        "name": "featx",
    }
    if mode == "slurm":
        # Slurm announces a limit up to a minute early. That is a second safeguard for long limits
        # only: it would end a task with a short limit right after its start (0 means none).
        is_long = limit_min * 60 > 10 * SIGNAL_DELAY_S
        parameters["slurm_signal_delay_s"] = SIGNAL_DELAY_S if is_long else 0
        parameters["slurm_additional_parameters"] = {"requeue": True}
        if options.memory_gib is not None:
            parameters["mem_gb"] = options.memory_gib
        for key in ("partition", "gres", "account"):
            if (value := getattr(options, key)) is not None:
                parameters[f"slurm_{key}"] = value
    try:
        executor.update_parameters(**parameters)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"submitit does not take these settings: {error}") from error
    return executor
