"""Output of a run: what it is made of, and what features and statistics have in common."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from featx.config import Config
from featx.errors import InternalError
from featx.pipeline.loop import PartRows, PartSink, RunObserver
from featx.pipeline.run_context import RunContext, RunTarget
from featx.pipeline.run_metrics import RunOutcome
from featx.storage import AtomicFolder, parse_path
from featx.types import Failure, Listing, Part, Source

PART_SECONDS = 60.0
"""Upper bound of the work per part in seconds, and so of the work that a kill can cost."""

SHORT_PART_SECONDS, SHORT_PARTS = 2.0, 256
"""A run is cut into about SHORT_PARTS parts of SHORT_PART_SECONDS to PART_SECONDS of work each.

So a short run commits its first rows early, and an interruption costs it little.
"""

PARTS_PER_LIMIT = 8
"""Least number of parts that fit into the time limit of a process at the measured speed."""


class Session(Protocol):
    """Write session of the process of the command: what is committed, and what is missing.

    `disk` performs every write to the folder; `lock` is the descriptor that holds its lock.
    """

    root: Path
    disk: AtomicFolder
    lock: int

    @property
    def num_rows(self) -> int:
        """Number of rows that the finished output has."""

    @property
    def num_committed(self) -> int:
        """Number of rows in committed parts."""

    @property
    def num_failed(self) -> int:
        """Number of failed rows in committed parts."""

    @property
    def failures(self) -> Sequence[Failure]:
        """Failed rows in committed parts."""

    def missing(self) -> list[Part]:
        """Parts that are still to be computed, in order."""

    def record_commit(self, part: Part, failures: Sequence[Failure]) -> None:
        """Record that a part is committed, and its failures."""

    def committed_by_others(
        self, parts: Sequence[Part]
    ) -> Iterator[tuple[Part, Sequence[Failure]]]:
        """Yield those of some parts that other processes have committed, with their failures."""


PartT = TypeVar("PartT", bound=PartRows)
SessionT = TypeVar("SessionT", bound=Session)


class Output(RunTarget, PartSink[PartT], Generic[PartT, SessionT]):
    """Output of one run: features in a store, or statistics.

    What the run is built from is declared by `RunTarget`, and how parts are computed by `PartSink`.
    The process of the command calls `begin`, `open`, `update_rows`, `missing` and `finish` in this
    order; `begin_part`, `compute` and `commit` are called for each part, in that process or in
    workers, which have received `for_workers`.

    Args:
        config: checked config; overwrite=true deletes an existing output.
        source: data set given as a Python object; None opens the data set of the config.

    Attributes:
        marker: path of the file that a run with overwrite=true leaves while it is not finished.
        context: run context, from `open` or, in workers, `join` on.
        session: write session, within `open`; None in workers.
        datasets: names of the datasets to compute, in workers.
        underflow_rows: layer -> number of underflow rows committed by this process.
    """

    seconds: dict[str, float]
    marker: Path
    context: RunContext

    def __init__(self, config: Config, source: Source | None = None) -> None:
        self.config = config
        self.source = source
        self.root = parse_path(config.out)
        self.settings: dict[str, Any] = {}
        self.session: SessionT | None = None
        self.datasets: frozenset[str] = frozenset()
        self.seconds = {}
        self.underflow_rows: Counter[str] = Counter()

    def with_config(self, config: Config) -> Self:
        """Copy with another config, before `begin`."""
        other = copy.copy(self)
        other.config = config
        other.settings, other.seconds = dict(self.settings), dict(self.seconds)
        other.underflow_rows = Counter()
        return other

    # The run, in the process of the command.

    @abstractmethod
    def begin(self) -> dict[str, Any] | None:
        """Refuse impossible requests, and read what the folder holds.

        Return the summary if nothing is left to do, as far as that is known without the model.
        Raises FeatxError if the data set does not fit the output.
        """

    @abstractmethod
    def open(self, context: RunContext) -> AbstractContextManager[None]:
        """Lock the folder, delete what overwrite=true and killed processes leave, find the parts.

        Raises StoreLockedError if another process writes to the folder, and StoreMismatchError if
        the output was started with other settings.
        """

    @abstractmethod
    def describe(self) -> list[tuple[str, str]]:
        """Describe the run before it starts; (name, text) of each line."""

    def observer(self) -> RunObserver:
        """Return the observer of the run."""
        return RunObserver()

    @abstractmethod
    def update_rows(self) -> None:
        """Compare the images with the output, and compute or discard rows that must change.

        Raises StoreMismatchError if images have changed, and refresh=true was not given.
        """

    @abstractmethod
    def finish(self, outcome: RunOutcome) -> dict[str, object]:
        """Pack or merge the parts, write the failures, and return the summary as JSON types."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether nothing is missing, also of earlier runs into the same folder."""

    # The parts.

    @property
    def write_session(self) -> SessionT:
        """The write session; the process holds the folder."""
        if self.session is None:
            raise InternalError(f"{self.root} is not open")
        return self.session

    @property
    def num_rows(self) -> int:
        return self.write_session.num_rows

    @property
    def num_committed(self) -> int:
        return self.write_session.num_committed

    @property
    def num_failed(self) -> int:
        return self.write_session.num_failed

    def missing(self) -> list[Part]:
        return self.write_session.missing()

    @abstractmethod
    def commit(self, rows: PartT) -> Sequence[Failure]:
        """Commit a part; return the failures of the part that is stored then.

        Another process may have committed it first.
        """

    # Workers.

    def for_workers(self) -> Self:
        """Copy that can be pickled; what workers have to read is written."""
        other = copy.copy(self)
        other.session, other.source, other.root = None, None, self.root.absolute()
        other.datasets = frozenset(spec.name for spec in self.context.specs)
        del other.context
        return other

    def join(self, context: RunContext) -> None:
        """Begin to compute parts in a worker, with its own run context."""
        self.context = context

    @abstractmethod
    def check_unchanged(self, fingerprint: Mapping[str, object]) -> None:
        """Raise RunError if the folder was overwritten or changed since the run was started."""

    @abstractmethod
    def stored_listing(self, num_rows: int, identity: str) -> Listing | None:
        """Read the listing of the run by its digest, or None if the folder has none."""

    @abstractmethod
    def uncommitted(self, parts: Sequence[Part]) -> list[Part]:
        """Select the parts that no process has committed yet, by the names of files."""


AnyOutput = Output[Any, Any]
"""Output of any kind of parts."""


def seconds_of_part(work_s: float, limit_s: float | None = None) -> float:
    """Seconds of work that a part should take in a run of `work_s` seconds.

    `limit_s` is the time limit of a process in seconds, if there is one. A process also loads the
    model within this limit, and loses the rows of a part that it cannot finish.
    """
    seconds = min(PART_SECONDS, max(SHORT_PART_SECONDS, work_s / SHORT_PARTS))
    return seconds if limit_s is None else min(seconds, limit_s / PARTS_PER_LIMIT)
