"""executor=local without workers: the process of the command computes all parts."""

from __future__ import annotations

from featx.pipeline.executors.worker_spec import PartSink, Session
from featx.pipeline.executors.worker_stats import RunOutcome
from featx.pipeline.loop import run_parts
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import peak_memory_mib
from featx.pipeline.run_observer import RunObserver


def run(
    context: RunContext, session: Session, sink: PartSink, observer: RunObserver | None = None
) -> RunOutcome:
    """Compute the missing parts in this process.

    Args:
        context: run context.
        session: write session of the store or statistics.
        sink: sink that computes parts and commits them to the session.
        observer: observer of the run, or None.

    Raises:
        FeatxError: the run failed.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """
    figures = run_parts(context, session, sink, session.disk, observer)
    return RunOutcome(figures, sink.underflow_rows, peak_memory_mib())
