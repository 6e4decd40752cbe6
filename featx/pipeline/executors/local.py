"""executor=local with workers: one process of this machine for each device."""

from __future__ import annotations

from typing import Annotated

from annotated_types import MinLen

from featx.base import log_message, num_cpus
from featx.config import ExecutorConfig, NaturalNumber, options
from featx.errors import ConfigError, counted
from featx.pipeline.executors.job_folder import WorkerSpec
from featx.pipeline.executors.process_pool import ProcessPool, temporary_worker_folder
from featx.pipeline.executors.registry import EXECUTORS, Executor
from featx.pipeline.output import Session
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import RunOutcome


@options("executor")
class LocalOptions(ExecutorConfig):
    """Options of executor=local."""

    name: str = "local"
    devices: Annotated[
        Annotated[list[NaturalNumber], MinLen(1)] | None,
        "a list of GPUs, such as [0,1]; for a number of workers give executor.workers=2",
    ] = None
    """GPUs of this machine, one worker each: [0,1] is cuda:0 and cuda:1."""

    def __post_init__(self) -> None:
        if self.devices is not None and self.workers is not None:
            raise ConfigError(
                f"executor.devices={self.devices} means {len(self.devices)} workers; leave "
                "executor.workers out."
            )

    @property
    def gpu_indices(self) -> list[int] | None:
        return self.devices


def run(options: object, context: RunContext, session: Session, spec: WorkerSpec) -> RunOutcome:
    devices = [str(device) for device in context.devices]
    _warn(context, len(devices))
    with temporary_worker_folder() as folder:
        return ProcessPool(spec, session, folder, devices).run()


EXECUTORS.register(
    Executor(
        name="local",
        help="The process of the command, or worker processes of this machine.",
        options=LocalOptions,
        run=run,
    )
)


def _warn(context: RunContext, num_workers: int) -> None:
    """Warn about too many threads, and about GPUs of different models."""
    threads = context.parallelism.threads or 0
    if threads * num_workers > num_cpus():
        text = f"{num_workers} workers of {counted(threads, 'thread')} share {num_cpus()} CPUs. "
        if threads == 1:
            text += f"executor.workers={num_cpus()} is as many as have a CPU of their own."
        else:
            text += (
                "The store was started with this number of threads per worker, and the last bits "
                "of its rows depend on it; overwrite=true starts a new store with fewer threads."
            )
        log_message(text, level="warning")
    if context.engine.device.type == "cuda":
        import torch

        models = {torch.cuda.get_device_name(device) for device in context.devices}
        if len(models) > 1:
            log_message(
                f"the devices differ ({', '.join(sorted(models))}); rows that one or the "
                "other computes may differ in their last bits.",
                level="warning",
            )
