"""executor=local with workers: one process of this machine for each device."""

from __future__ import annotations

from featx.base import log_message, num_cpus
from featx.errors import counted
from featx.pipeline.executors.job_folder import WorkerSpec
from featx.pipeline.executors.process_pool import ProcessPool, temporary_worker_folder
from featx.pipeline.executors.registry import EXECUTORS, Executor
from featx.pipeline.output import Session
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import RunOutcome


def run(options: object, context: RunContext, session: Session, spec: WorkerSpec) -> RunOutcome:
    devices = [str(device) for device in context.devices]
    threads = context.parallelism.threads or 0
    if threads * len(devices) > num_cpus():
        text = f"{len(devices)} workers of {counted(threads, 'thread')} share {num_cpus()} CPUs. "
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
    with temporary_worker_folder() as folder:
        return ProcessPool(spec, session, folder, devices).run()


EXECUTORS.register(
    Executor(
        name="local",
        help="The process of the command, or worker processes of this machine.",
        run=run,
    )
)
