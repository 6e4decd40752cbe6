"""Run driver: the steps of every run that fills a folder part by part.

The output is a store or a statistics file. `RunOutput` says what differs between them; the order of
the steps, the executors, and the resume of runs with overwrite=true are here.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from featx.base import announce, log_message
from featx.config import Config
from featx.errors import counted
from featx.pipeline.engine_spec import EngineSpec
from featx.pipeline.executors import check_executor, run_distributed
from featx.pipeline.executors.worker_spec import PartSink, PartTask, Session
from featx.pipeline.executors.worker_stats import RunOutcome
from featx.pipeline.loop import run_parts
from featx.pipeline.metrics_file import with_metrics
from featx.pipeline.overwriting import OverwriteMark, resume_or_overwrite
from featx.pipeline.row_failures import failures_text
from featx.pipeline.run_context import RunContext, build_run_context
from featx.pipeline.run_metrics import peak_memory_mib
from featx.pipeline.run_observer import RunObserver
from featx.pipeline.run_summary import RunDescription
from featx.pipeline.run_target import RunTarget
from featx.store import Heartbeat
from featx.types import Failure


class RunSession(Session, Protocol):
    """Write session of the process of the command.

    Attributes:
        failures: failed rows in committed parts.
    """

    @property
    def failures(self) -> Sequence[Failure]: ...

    def write_failures(self) -> None:
        """Write the list of failures."""


SessionT = TypeVar("SessionT", bound=RunSession)


class RunOutput(ABC, Generic[SessionT]):
    """Output of one run: how it is opened, compared with the images, filled and finished.

    The methods are called in the order in which they stand here.

    Args:
        config: checked config; overwrite=true deletes an existing output.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self) -> None:
        """Refuse impossible requests before images are listed or a model is loaded.

        Raises:
            FeatxError: the request cannot be fulfilled.
        """

    @abstractmethod
    def open_target(self) -> RunTarget:
        """Read what the folder holds, and return the run target."""

    def finished_summary(self) -> dict[str, Any] | None:
        """Return the summary if nothing is left to do, as far as that is known without the model.

        Raises:
            FeatxError: the data set does not fit the output.
        """
        return None

    def check_context(self, context: RunContext) -> None:
        """Refuse what the model and the layers make impossible, before anything is written.

        Raises:
            FeatxError: the request cannot be fulfilled.
        """

    @abstractmethod
    def open_session(self, context: RunContext) -> AbstractContextManager[SessionT]:
        """Lock the folder, delete what overwrite=true and killed processes leave, find the parts.

        Raises:
            StoreLockedError: another process writes to the folder.
            StoreMismatchError: the output was started with other settings.
        """

    @abstractmethod
    def describe(self, context: RunContext, session: SessionT) -> RunDescription:
        """Describe the run before it starts."""

    def observer(self, context: RunContext, session: SessionT) -> RunObserver:
        """Return the observer of the run."""
        return RunObserver()

    @abstractmethod
    def update_rows(self, context: RunContext, session: SessionT) -> None:
        """Compare the images with the output, and compute or discard rows that must change.

        Raises:
            StoreMismatchError: images have changed, and refresh=true was not given.
        """

    @abstractmethod
    def sink(
        self, context: RunContext, session: SessionT, heartbeat: Heartbeat, observer: RunObserver
    ) -> PartSink[Any]:
        """Return the sink that commits parts to the session in this process."""

    @abstractmethod
    def part_task(self, context: RunContext, session: SessionT) -> PartTask:
        """Return the part task of workers, and write what they have to read."""

    @abstractmethod
    def complete(self, session: SessionT, outcome: RunOutcome) -> None:
        """Pack or merge the parts, and add the seconds to the outcome."""

    @abstractmethod
    def summary(self, session: SessionT, outcome: RunOutcome) -> dict[str, Any]:
        """Return the summary of the run as JSON types, and write it if the output has one."""

    def is_whole(self, session: SessionT) -> bool:
        """Return whether nothing is missing, also of earlier runs into the same folder."""
        return True


def drive_run(
    config: Config,
    config_yaml: str,
    engine_spec: EngineSpec,
    marker: OverwriteMark,
    output: Callable[[Config], RunOutput[SessionT]],
) -> dict[str, Any]:
    """Start or resume a run and complete its output; reports progress on stderr.

    Args:
        config: checked config.
        config_yaml: composed config as YAML, without secrets.
        engine_spec: how to build the engine that computes the rows.
        marker: marker of a run with overwrite=true.
        output: returns the output of a run with a config, which has overwrite=false if the same
            command with overwrite=true is resumed.

    Returns:
        summary of the run.

    Raises:
        FeatxError: the config or the folder does not fit, or the run failed.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """

    def run(config: Config) -> dict[str, Any]:
        return _run(output(config), config_yaml, engine_spec, marker)

    return with_metrics(config, lambda: resume_or_overwrite(config, marker, run))


def _run(
    output: RunOutput[SessionT], config_yaml: str, engine_spec: EngineSpec, marker: OverwriteMark
) -> dict[str, Any]:
    """Run once with the config of an output."""
    config = output.config
    output.check()
    check_executor(config)
    with contextlib.ExitStack() as stack:
        target = output.open_target()
        if (summary := output.finished_summary()) is not None:
            return summary
        context = stack.enter_context(build_run_context(config, config_yaml, engine_spec, target))
        output.check_context(context)
        session = stack.enter_context(output.open_session(context))
        if config.overwrite:
            # Written between the deletion and the first part: after a kill, the same command
            # resumes instead of deleting the new parts.
            marker.write(session.disk)
        description = output.describe(context, session)
        announce(description.settings, description.shown)
        observer = output.observer(context, session)
        output.update_rows(context, session)
        if config.is_distributed:
            part_task = output.part_task(context, session)
            outcome = run_distributed(context, session, part_task, config_yaml)
        else:
            outcome = _run_in_process(output, context, session, observer)
        output.complete(session, outcome)
        session.write_failures()
        summary = output.summary(session, outcome)
        observer.run_finished()
        if output.is_whole(session):
            marker.remove(session.disk)
    _log_row_problems(session, outcome)
    return summary


def _run_in_process(
    output: RunOutput[SessionT], context: RunContext, session: SessionT, observer: RunObserver
) -> RunOutcome:
    """Compute the missing parts in this process: executor=local without workers."""
    with Heartbeat(session.disk, str(context.engine.device)) as heartbeat:
        sink = output.sink(context, session, heartbeat, observer)
        metrics = run_parts(context, session, sink, session.disk, observer)
        return RunOutcome(metrics, sink.underflow_rows, peak_memory_mib())


def _log_row_problems(session: RunSession, outcome: RunOutcome) -> None:
    """Report failed rows and underflow rows on stderr."""
    if session.failures:
        log_message(failures_text(session.failures))
    for layer, count in (+outcome.underflow_rows).items():
        log_message(
            f"{counted(count, f'row of {layer} has', f'rows of {layer} have')} no value "
            "above 6.1e-5; float16 holds so little with few bits or as zero. dtype=float32 keeps "
            "it.",
            level="warning",
        )
