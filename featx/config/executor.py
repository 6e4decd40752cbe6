"""The key `executor`: where the parts of a run are computed."""

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
"""Keys of some executors only."""

DEFAULT_TIME_LIMIT_MIN = 240
"""Minutes that a task of Slurm may run, when the key `time_limit_min` is not given."""


@dataclass
class ExecutorConfig:
    """Where the parts of a run are computed."""

    name: str = "local"
    """Taken from the key `executor` itself."""
    workers: Any = None
    """Number of worker processes that share the parts: processes of this machine, each with its
    share of the CPUs or a GPU of its own; actors of Ray; tasks of a Slurm array. null computes in
    this process (local), takes as many actors as the cluster has room for (ray), or 8 tasks
    (slurm)."""
    devices: Any = None
    """GPUs of this machine, one worker each, for executor=local: [0,1] is cuda:0 and cuda:1."""
    cpus: int | None = None
    """CPUs of each task or actor, when not given 4 with slurm and 1 with ray; on a CPU also the
    threads that compute."""
    gpus: float | None = None
    """GPUs of each actor, 1 when not given, where the device is one; 0.5 puts two on each."""
    address: str | None = None
    """Of the Ray cluster, such as auto or ray://head:10001; null starts one on this machine."""
    gres: str | None = None
    """What each task gets beside CPUs, such as gpu:1."""
    partition: str | None = None
    """The partition of the cluster; null takes its default."""
    account: str | None = None
    """The account that is charged; null takes yours."""
    memory_gib: float | None = None
    """Memory of each task; null takes the cluster's default."""
    time_limit_min: int | None = None
    """Minutes that a task may run before what it left undone is submitted again, 240 when not
    given. A part has to fit in several times, so part_rows=auto takes it into account."""
    folder: str | None = None
    """That all machines see, for what tasks are to do and for their logs; null takes OUT/jobs, and
    where out is a bucket it has to be given."""
    mode: str | None = None
    """slurm (when not given), or local: the same path in processes of this machine, to try it."""

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
        """The key `cpus`."""
        if self.cpus is None:
            return 4 if self.name == "slurm" else 1
        return self.cpus

    @property
    def task_seconds(self) -> float | None:
        """Time limit of a task in seconds; None where there is none."""
        if self.name != "slurm" or self.mode == "local":
            return None
        return 60.0 * (self.time_limit_min or DEFAULT_TIME_LIMIT_MIN)
