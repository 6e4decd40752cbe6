"""executor=local without `devices`: the process of the command computes all parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from featx.pipeline.executors.worker_spec import Maker, Session
from featx.pipeline.executors.worker_stats import RunOutcome
from featx.pipeline.loop import run_parts
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import peak_memory_mib
from featx.pipeline.run_observer import RunObserver
from featx.types import Batch, Failure, Part

if TYPE_CHECKING:
    from featx.engine.engine import Engine


def run(
    prepared: RunContext, session: Session, maker: Maker, observer: RunObserver | None = None
) -> RunOutcome:
    """Compute the missing parts in this process.

    Args:
        prepared: run context.
        session: write session of the store or statistics.
        maker: sink that computes parts and commits them to the session.
        observer: observer of the run, or None.

    Raises:
        FeatxError: the run failed.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """
    figures = run_parts(prepared, _WorkHere(session, maker), session.disk, observer)
    return RunOutcome(figures, maker.underflow_rows, peak_memory_mib())


class _WorkHere:
    """Batch sink made of a maker, which computes, and a session, which knows what is missing."""

    def __init__(self, session: Session, maker: Maker) -> None:
        self.compute: Callable[[Engine, Batch], Any] = maker.compute
        self.take: Callable[[Part, Batch, Callable[[], Any]], list[Failure]] = maker.take
        self.finish_part: Callable[[], Callable[[], object]] = maker.finish_part
        self._session = session
        self._maker = maker

    @property
    def seconds(self) -> Mapping[str, float]:
        """Stage -> busy seconds of stages that only this sink has."""
        return self._maker.seconds

    @property
    def rows_asked(self) -> int:
        """Number of rows that the finished output has."""
        return self._session.rows_asked

    @property
    def rows_done(self) -> int:
        """Number of rows in committed parts."""
        return self._session.rows_done

    @property
    def rows_failed(self) -> int:
        """Number of rows in committed parts whose image failed."""
        return self._session.num_failed

    def missing(self) -> list[Part]:
        """Parts that are still to be computed, in order."""
        return self._session.missing()
