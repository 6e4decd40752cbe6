"""Executors: where the parts of a run are computed; one module per executor.

Workers form no process group: each computes whole parts with the choices of the driver and commits
them itself. They share nothing but the folder of the run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featx.config.run_config import Config
    from featx.pipeline.executors.worker_spec import PartTask, Session
    from featx.pipeline.executors.worker_stats import RunOutcome
    from featx.pipeline.run_context import RunContext


def check(config: Config) -> None:
    """Raise MissingExtraError if the package that the option `executor` needs is not installed."""
    module: Any = importlib.import_module(f"featx.pipeline.executors.{config.executor.name}")
    module.check(config)


def run_distributed(
    context: RunContext, session: Session, part_task: PartTask, config_yaml: str
) -> RunOutcome:
    """Compute the missing parts with the executor that the option `executor` chooses.

    Args:
        context: run context.
        session: write session of the store or statistics.
        part_task: part task of the workers.
        config_yaml: config as the user wrote it.

    Raises:
        FeatxError: a worker failed; the message names it, the part and its rows.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """
    from featx.pipeline.executors.worker_spec import worker_spec

    module: Any = importlib.import_module(
        f"featx.pipeline.executors.{context.config.executor.name}"
    )
    order = worker_spec(context, session, part_task, config_yaml)
    # Workers load their own copy of the model and need the memory of the device.
    with context.engine.off_device():
        outcome: RunOutcome = module.run(context, session, order)
    return outcome
