"""The family of executors, and the executor of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from featx.base import Member, Registry

if TYPE_CHECKING:
    from featx.config import Config
    from featx.pipeline.executors.job_folder import WorkerSpec
    from featx.pipeline.output import AnyOutput, Session
    from featx.pipeline.run_context import RunContext
    from featx.pipeline.run_metrics import RunOutcome


@dataclass(frozen=True, kw_only=True)
class Executor(Member):
    """A place where workers compute the parts of a run.

    Attributes:
        run: computes the missing parts in workers, with a `WorkerPool`, by the options of the
            executor; raises RunError if a worker failed, and Interrupted after SIGINT or SIGTERM.
        check: checks, before images are listed, that the executor can be used with its options and
            a config; raises MissingExtraError, ConfigError or RunError.
    """

    run: Callable[[object, RunContext, Session, WorkerSpec], RunOutcome]
    check: Callable[[object, Config], None] = lambda options, config: None


EXECUTORS: Registry[Executor] = Registry("executor", "featx.pipeline.executors")
"""Executors by the value of the option `executor`."""


def run_distributed(
    context: RunContext, session: Session, output: AnyOutput, config_yaml: str
) -> RunOutcome:
    """Compute the missing parts with the executor that the option `executor` chooses.

    `output` is that of `Output.for_workers`. Raises FeatxError if a worker failed, and Interrupted
    after SIGINT or SIGTERM, when complete parts are committed.
    """
    from featx.pipeline.executors.job_folder import worker_spec

    options = context.config.executor
    spec = worker_spec(context, session, output, config_yaml)
    # Workers load their own copy of the model and need the memory of the device.
    with context.engine.off_device():
        return EXECUTORS.get(options.name).run(options, context, session, spec)
