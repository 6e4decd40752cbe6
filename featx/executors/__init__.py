"""How the parts of a run are spread over processes and machines: one file a way.

Workers need no process group: each computes whole parts as the driver decided everything, and
commits them itself; the store's folder is all that they share.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featx.config import Config
    from featx.executors.harvest import Outcome
    from featx.prepare import Prepared
    from featx.store.session import StoreSession


def check(config: Config) -> None:
    """Raise MissingExtraError where the package is missing that the key `executor` needs."""
    module: Any = importlib.import_module(f"featx.executors.{config.executor.name}")
    module.check(config)


def spread(prepared: Prepared, session: StoreSession, config_yaml: str) -> Outcome:
    """Compute what a store lacks, as the key `executor` says.

    Args:
        prepared: the run.
        session: its store, held.
        config_yaml: as the user gave it.

    Raises:
        FeatxError: a worker failed; the message names it, the part and its rows.
        Interrupted: a signal asked for the end; what was whole is committed.
    """
    module: Any = importlib.import_module(f"featx.executors.{prepared.config.executor.name}")
    outcome: Outcome = module.run(prepared, session, config_yaml)
    return outcome
