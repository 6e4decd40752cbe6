"""Options of the group `executor` that every executor has."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from featx.config.checks import options


@options("executor")
class ExecutorConfig:
    """Processes that compute the parts of a run.

    An executor with options of its own has them in a subclass in its own module, such as
    `featx.pipeline.executors.slurm.SlurmOptions`, which overrides the properties below.
    """

    name: str = "local"
    """Name of the executor; set by the option `executor` itself."""
    workers: Annotated[int, Ge(1), Le(100_000)] | None = None
    """Number of worker processes that share the parts: processes of this machine, each with its
    share of the CPUs or a GPU of its own (of those in the environment variable
    CUDA_VISIBLE_DEVICES); actors of Ray; tasks of a Slurm array. null computes in this process
    (local), takes as many actors as the cluster has room for (ray), or 8 tasks (slurm)."""

    @property
    def num_cpus(self) -> int:
        """Number of CPUs of each worker of a cluster."""
        return 1

    @property
    def shared_folder(self) -> str | None:
        """Folder that all machines see, if the executor needs one and the command names it."""
        return None

    @property
    def task_seconds(self) -> float | None:
        """Time limit of a worker in seconds; None if there is none."""
        return None
