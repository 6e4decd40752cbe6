"""How the parts of a run are spread over processes and machines: one file a way.

Workers need no process group: each computes whole parts as the driver decided everything, and
commits them itself; the run's folder is all that they share.
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
    """Raise MissingExtraError where the package is missing that the key `executor` needs."""
    module: Any = importlib.import_module(f"featx.pipeline.executors.{config.executor.name}")
    module.check(config)


def run_distributed(
    prepared: RunContext, session: Session, product: PartTask, config_yaml: str
) -> RunOutcome:
    """Compute what is missing, as the keys `executor` and `devices` say.

    Args:
        prepared: the run.
        session: its store or statistics, held.
        product: what the workers make.
        config_yaml: as the user gave it.

    Raises:
        FeatxError: a worker failed; the message names it, the part and its rows.
        Interrupted: a signal asked for the end; what was whole is committed.
    """
    from featx.pipeline.executors.worker_spec import worker_spec

    module: Any = importlib.import_module(
        f"featx.pipeline.executors.{prepared.config.executor.name}"
    )
    order = worker_spec(prepared, session, product, config_yaml)
    with prepared.engine.off_device():
        outcome: RunOutcome = module.run(prepared, session, order)
    return outcome
