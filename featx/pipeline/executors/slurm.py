"""executor=slurm: tasks of a job array; each computes parts until its time is up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from featx.config import (
    Config,
    Count,
    ExecutorConfig,
    Positive,
    options,
)
from featx.errors import ConfigError, FeatxError
from featx.pipeline.executors.process_pool import ProcessPool
from featx.pipeline.executors.registry import EXECUTORS, Executor
from featx.pipeline.executors.slurm_array import JobArray
from featx.pipeline.executors.slurm_queue import check_partition
from featx.pipeline.executors.worker_spec import Session, WorkerSpec
from featx.pipeline.executors.worker_stats import RunOutcome
from featx.pipeline.run_context import RunContext
from featx.store import layout

_NUM_TASKS = 8
"""Number of tasks if executor.workers is not given."""

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
    """Return the options of this executor."""
    if not isinstance(config.executor, SlurmOptions):
        raise FeatxError(f"executor=slurm was given the options {config.executor}.")
    return config.executor


def check(config: Config) -> None:
    """Check that Slurm, its controller and the partition are available.

    Raises:
        ConfigError: this machine has no Slurm, or the cluster no such partition.
        RunError: the controller does not answer.
    """
    if _options(config).mode == "local":
        return
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "executor=slurm: there is no Slurm on this machine (sbatch is not found). Start the "
            "command on a machine of the cluster; executor.mode=local runs the same path here."
        )
    check_partition(_options(config).partition)


def run(context: RunContext, session: Session, spec: WorkerSpec) -> RunOutcome:
    """Compute the missing parts in tasks."""
    options = _options(context.config)
    folder = _shared_folder(options, session)
    device = context.engine.device.type
    num_tasks = options.workers or _NUM_TASKS
    if options.mode == "local":
        devices = [device] * min(num_tasks, len(spec.parts))
        return ProcessPool(spec, session, folder, devices, "task", outlives_driver=True).run()
    requests = {
        "cpus-per-task": ("cpus", options.num_cpus),
        "time": ("time_limit_min", options.time_limit_min or DEFAULT_TIME_LIMIT_MIN),
        "mem": ("memory_gib", options.memory_gib and f"{options.memory_gib * 1024:.0f}M"),
        "partition": ("partition", options.partition),
        "gres": ("gres", options.gres),
        "account": ("account", options.account),
    }
    given = {name: pair for name, pair in requests.items() if pair[1] is not None}
    return JobArray(spec, session, folder, num_tasks, device, given).run()


EXECUTORS.register(
    Executor(
        name="slurm",
        help="Tasks of a Slurm job array, each over neighbouring parts.",
        options=SlurmOptions,
        check=check,
        run=run,
    )
)


def _shared_folder(options: SlurmOptions, session: Session) -> Path:
    """Folder for worker spec, claims, reports and logs."""
    if options.folder is None:
        return session.root.absolute() / layout.JOBS
    folder = Path(options.folder).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"executor.folder={options.folder}: {error.strerror}. It holds what tasks share and "
            "their logs; choose a folder that all machines can write to."
        ) from error
    return folder
