"""Options of the group `executor`: where the parts of a run are computed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from featx.config.checks import check_choice
from featx.errors import ConfigError

EXECUTORS = ("local", "ray", "slurm")
_OF_EXECUTORS = {
    "devices": ("local",),
    "cpus": ("ray", "slurm"),
    "gpus": ("ray",),
    "address": ("ray",),
    "gres": ("slurm",),
    "partition": ("slurm",),
    "account": ("slurm",),
    "memory_gib": ("slurm",),
    "time_limit_min": ("slurm",),
    "folder": ("slurm",),
    "mode": ("slurm",),
}
"""Option -> the executors that read it; the others refuse it."""

DEFAULT_TIME_LIMIT_MIN = 240
"""Default of the option `time_limit_min` in minutes."""


@dataclass
class ExecutorConfig:
    """Where the parts of a run are computed."""

    name: str = "local"
    """Name of the executor; set by the option `executor` itself."""
    workers: Any = None
    """Number of worker processes that share the parts: processes of this machine, each with its
    share of the CPUs or a GPU of its own; actors of Ray; tasks of a Slurm array. null computes in
    this process (local), takes as many actors as the cluster has room for (ray), or 8 tasks
    (slurm)."""
    devices: Any = None
    """GPUs of this machine, one worker each, for executor=local: [0,1] is cuda:0 and cuda:1."""
    cpus: int | None = None
    """Number of CPUs of each task (slurm; 4 when not given) or actor (ray; 1 when not given). On a
    CPU it is also the number of threads that compute."""
    gpus: float | None = None
    """Number of GPUs of each actor if a GPU computes, 1 when not given; 0.5 puts two actors on each
    GPU."""
    address: str | None = None
    """Address of the Ray cluster, such as auto or ray://head:10001; null starts one on this
    machine."""
    gres: str | None = None
    """Generic resources of each task as Slurm writes them, such as gpu:1; null asks for none."""
    partition: str | None = None
    """Partition of the cluster; null takes its default."""
    account: str | None = None
    """Account that is charged; null takes your default one."""
    memory_gib: float | None = None
    """Memory of each task in GiB; null takes the cluster's default."""
    time_limit_min: int | None = None
    """Minutes that a task may run before its remaining parts are submitted again, 240 when not
    given. Several parts have to fit into this time, so part_rows=auto takes it into account."""
    folder: str | None = None
    """Folder that all machines see, for the descriptions and logs of tasks; null takes OUT/jobs.
    It has to be given if out is in an object store."""
    mode: str | None = None
    """slurm (when not given), or local, which runs the tasks as processes of this machine to try
    the set-up."""

    def __post_init__(self) -> None:
        check_choice("executor", self.name, EXECUTORS)
        for name, owners in _OF_EXECUTORS.items():
            if getattr(self, name) is not None and self.name not in owners:
                raise ConfigError(
                    f"executor.{name} has an effect with executor={' or '.join(owners)} only, now "
                    f"{self.name}."
                )
        self._check_workers()
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value <= 0:
                raise ConfigError(f"executor.{field.name}={value}: expected more than 0.")
        if self.mode is not None:
            check_choice("executor.mode", self.mode, ("slurm", "local"))

    def _check_workers(self) -> None:
        if self.workers is not None and (type(self.workers) is not int or self.workers < 1):
            raise ConfigError(
                f"executor.workers={self.workers}: expected a number of workers, such as 4. GPUs "
                "are listed as executor.devices=[0,1]."
            )
        if self.devices is None:
            return
        is_list = isinstance(self.devices, list | tuple) and len(self.devices) > 0
        if not is_list or not all(type(n) is int and n >= 0 for n in self.devices):
            raise ConfigError(
                f"executor.devices={self.devices}: expected a list of GPUs, such as [0,1]. For a "
                "number of workers give executor.workers=2."
            )
        if self.workers is not None:
            raise ConfigError(
                f"executor.devices={self.devices} means {len(self.devices)} workers; leave "
                "executor.workers out."
            )

    @property
    def has_workers(self) -> bool:
        """Whether other processes than that of the command compute."""
        given = self.workers is not None or self.devices is not None
        return given or self.name != "local"

    @property
    def num_local_workers(self) -> int:
        """Number of processes of this machine that compute, with executor=local."""
        return len(self.devices) if self.devices is not None else int(self.workers or 1)

    @property
    def num_cpus(self) -> int:
        """Number of CPUs of each task or actor."""
        if self.cpus is None:
            return 4 if self.name == "slurm" else 1
        return self.cpus

    @property
    def task_seconds(self) -> float | None:
        """Time limit of a task in seconds; None if there is none."""
        if self.name != "slurm" or self.mode == "local":
            return None
        return 60.0 * (self.time_limit_min or DEFAULT_TIME_LIMIT_MIN)
